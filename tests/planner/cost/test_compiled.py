"""What torch.compile is said to keep and to move is what it keeps and moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen2Config

from megatrain.engine.graphs import run_for_graph
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import Inductor, cheap_retention
from megatrain.models.transforms.fp8 import Fp8Policy, apply_fp8
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost import compiled
from megatrain.planner.cost.compiled import CompiledLayer, predict_compiled
from megatrain.planner.cost.shape import shape_of
from tests.support import FAMILIES, MORE_FAMILIES, tiny_config

ROWS, TOKENS, HIDDEN = 2, 16, 32
QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN_14B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


def traced(
    config: Any, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, runs_on: str = "cuda"
) -> CompiledLayer:
    skeleton = Skeleton(config, dtype=dtype)
    _, calls = skeleton.dry_call(ROWS, tokens)
    shape, fused = (
        (ROWS, tokens, config.hidden_size),
        skeleton.config._attn_implementation != "eager",
    )
    layer = predict_compiled(
        skeleton.layers[0], shape, dtype, calls[0], fused_attention=fused, runs_on=runs_on
    )
    assert layer is not None
    return layer


@pytest.mark.parametrize(("sizes", "bytes_per_token"), [(QWEN_7B, 158_840), (QWEN_14B, 148_648)])
def test_a_large_layer_keeps_what_was_measured_on_a_gpu(
    sizes: dict[str, Any], bytes_per_token: int
) -> None:
    layer = traced(Qwen2Config(**sizes, vocab_size=8, num_hidden_layers=1), tokens=512)
    hidden, width = 2 * sizes["hidden_size"], 2 * sizes["intermediate_size"]
    assert (
        layer.full.saved_bytes // (ROWS * 512) + hidden == bytes_per_token
    )  # H200, cuDNN's attention
    assert layer.full.saved_bytes - layer.cheap.saved_bytes == ROWS * 512 * (
        2 * hidden + width
    )  # two norms' outputs, silu(gate) * up


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("cheap", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon-40b"])
def test_what_is_kept_is_what_torch_compile_keeps(family: str, cheap: bool) -> None:
    config, dtype = tiny_config(family), torch.float32
    skeleton = Skeleton(config, dtype=dtype)
    skeleton.bind(skeleton.anatomy.embed, torch.zeros(skeleton.anatomy.embed.layout.numel))
    skeleton.bind(skeleton.anatomy.blocks[1], torch.ones(skeleton.anatomy.blocks[1].layout.numel))
    hidden, calls = skeleton.embed({"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)})
    layer, hidden = skeleton.layers[0], torch.ones(hidden.shape, requires_grad=True)
    given = [
        hidden,
        *layer.parameters(),
        *(t for t in (*calls[0].args, *calls[0].kwargs.values()) if isinstance(t, Tensor)),
    ]
    given += list(calls[0].kwargs.get("position_embeddings") or ())
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch._dynamo.reset()
    layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with (
        saved_tensors_hooks(note, lambda tensor: tensor),
        cheap_retention() if cheap else nullcontext(),
    ):
        output = skeleton.layer(0, hidden, calls[0])
    theirs = {tensor.untyped_storage().data_ptr() for tensor in [output, *given]}
    found = sum(size for address, size in kept.items() if address not in theirs)
    expected = traced(config, dtype=dtype, runs_on="cpu")
    assert found == pytest.approx(
        expected.cheap.saved_bytes if cheap else expected.full.saved_bytes, rel=0.01
    )  # a seed here, a mask there


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_every_family_can_be_traced(family: str) -> None:
    layer = traced(tiny_config(family))
    assert layer.full.saved_bytes > 0
    assert 0 < layer.full.forward.kernels < layer.full.backward.kernels
    assert 0 < layer.full.forward.bytes < layer.full.backward.bytes < layer.cheap.backward.bytes
    assert 0 < layer.cheap.saved_bytes < layer.full.saved_bytes


class Mlp(nn.Module):
    """A layer whose traffic can be counted by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(HIDDEN, width, bias=False),
            nn.Linear(width, HIDDEN, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(nn.functional.relu(self.up(hidden)) * 3)
        return output


def predict_alone(layer: nn.Module) -> CompiledLayer | None:
    return predict_compiled(
        layer,
        (1, TOKENS, HIDDEN),
        torch.bfloat16,
        LayerCall((), {}),
        fused_attention=True,
        runs_on="cuda",
    )


def test_traffic_by_hand() -> None:
    width = 64
    layer = predict_alone(Mlp(width))
    assert layer is not None
    # relu and times three read one matmul's output and write another's input; the sum reads two and
    # writes one
    assert layer.full.forward == (
        2 * TOKENS * (2 * width + 3 * HIDDEN) + TOKENS * width,
        2 + 2,
    )  # and what relu let through, a byte each
    assert layer.full.saved_bytes == 2 * TOKENS * width + TOKENS * width
    # relu's gradient reads what it let through and one matmul's output, and writes another's input;
    # the residual's sum as above
    assert layer.full.backward == (2 * TOKENS * (2 * width + 3 * HIDDEN) + TOKENS * width, 4 + 2)


def test_cheap_retention_by_hand() -> None:
    width = 64
    layer = predict_alone(Mlp(width))
    assert layer is not None
    assert (
        layer.cheap.saved_bytes == 2 * TOKENS * width
    )  # what relu was given; times three and what it let through are computed again
    # one kernel more, which reads that and writes the product's input; relu's gradient reads it too
    assert layer.cheap.backward == (
        2 * TOKENS * (2 * width + 3 * HIDDEN) + 2 * TOKENS * 3 * width,
        4 + 3,
    )


def test_what_lives_by_hand() -> None:
    width, rows = 64, 3
    layer = predict_compiled(
        Mlp(width),
        (rows, TOKENS, HIDDEN),
        torch.bfloat16,
        LayerCall((), {}),
        fused_attention=True,
        runs_on="cuda",
    )
    assert layer is not None
    weight, wide, mask, narrow = (
        2 * HIDDEN * width,
        2 * TOKENS * width,
        TOKENS * width,
        2 * TOKENS * HIDDEN,
    )
    # relu's input, its output and what it let through; with down's gradient, its input's gradient,
    # that of relu's input and what it let through; in the end two weights' gradients, the gradient
    # of up's output, and what becomes of it
    assert {
        (2 * wide + mask, 0),
        (2 * wide + mask, weight),
        (wide + narrow, 2 * weight),
    } <= layer.again.moments
    assert layer.again.peak(rows) == rows * (2 * wide + mask) + weight
    assert layer.again.peak(10 * rows) == 10 * rows * (2 * wide + mask) + weight
    assert layer.full.beyond.peak(rows) == rows * wide + weight
    # cheaply retained, relu's input serves again, in one kernel: for down's input and the gradient
    assert (4 * wide - wide, 0) in layer.cheap.beyond.moments
    assert layer.cheap.beyond.peak(10 * rows) == 10 * rows * 3 * wide


LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("config", "rows", "tokens", "mib"),
    [
        (Qwen2Config(**QWEN_7B, vocab_size=8, num_hidden_layers=1), 16, 1024, 4146),
        (
            Qwen2Config(
                **QWEN_7B, vocab_size=8, num_hidden_layers=1, max_position_embeddings=1 << 17
            ),
            1,
            1 << 17,
            33_168,
        ),
        (LlamaConfig(**LLAMA_70B, vocab_size=8, num_hidden_layers=1), 16, 1024, 6723),
    ],
)
def test_a_large_layer_that_is_recomputed_needs_what_was_measured_on_a_gpu(
    config: Any, rows: int, tokens: int, mib: int
) -> None:
    shape = shape_of(Skeleton(config), tokens, [rows * tokens], runs_on="cuda", compiled=True)
    assert shape.compiled is not None
    needed = shape.compiled.recomputed.at(rows * tokens)
    assert needed / 2**20 == pytest.approx(mib, rel=0.001)  # H200, at the peak of a step
    assert shape.layer_bytes(rows * tokens) > 1.1 * needed


def test_what_cheap_retention_computes_again_is_alive_with_what_it_is_computed_from() -> None:
    config = Qwen2Config(
        **QWEN_7B, vocab_size=8, num_hidden_layers=1, max_position_embeddings=1 << 17
    )
    shape = shape_of(Skeleton(config), 1 << 17, [1 << 17], runs_on="cuda", compiled=True)
    assert shape.compiled is not None
    cheap = shape.compiled.beyond_cheap_graph.at(1 << 17)
    assert cheap / 2**20 == pytest.approx(
        18_946, rel=0.001
    )  # H200: 7.6B with 128k tokens of context
    assert shape.compiled.beyond_graph.at(1 << 17) < cheap


@pytest.mark.parametrize(("shared_heads", "scratch"), [(8, 2), (2, 4)])
def test_attention_takes_memory_for_itself_on_cuda(shared_heads: int, scratch: int) -> None:
    config = Qwen2Config(
        hidden_size=1024,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=shared_heads,
        vocab_size=8,
        num_hidden_layers=1,
    )
    on_cuda, on_cpu = (
        shape_of(Skeleton(config), 1024, [1024], runs_on=device, compiled=True).compiled
        for device in ("cuda", "cpu")
    )
    assert on_cuda is not None
    assert on_cpu is not None
    query = 1024 * 1024 * 2
    assert on_cuda.recomputed.at(1024) == on_cpu.recomputed.at(1024) + scratch * query
    assert on_cuda.beyond_graph.at(1024) == on_cpu.beyond_graph.at(1024) + scratch * query


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator has given out and not got back while `run` lasts."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    most: int = max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )
    return most


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("cheap", [False, True], ids=["recomputed", "cheaply retained"])
def test_what_is_alive_is_what_compiled_code_allocates(cheap: bool) -> None:
    config, rows, tokens = tiny_config("llama", hidden_size=128, intermediate_size=512), 11, 64
    skeleton = Skeleton(config)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.ones(block.layout.numel))
    hidden, calls = skeleton.embed({"input_ids": torch.zeros(rows, tokens, dtype=torch.long)})
    layer, skipped = skeleton.layers[0], () if cheap else ("mlp.down_proj",)
    torch._dynamo.reset()
    layer.compile(backend=Inductor(cheap=cheap))

    def run() -> None:
        with skipping(layer, skipped):
            graph, output = run_for_graph(
                lambda _, given, call: layer(given, *call.args, **call.kwargs),
                0,
                hidden.detach(),
                calls[0],
            )
        del output
        graph.gradients(list(layer.parameters()), dy)

    dy = torch.ones_like(hidden)
    run()  # compiles
    _, on_meta = Skeleton(config).dry_call(rows, tokens)
    dtype = torch.float32
    expected = predict_compiled(
        Skeleton(config).layers[0],
        (rows, tokens, 128),
        dtype,
        on_meta[0],
        fused_attention=True,
        runs_on="cpu",
        skipped=skipped,
    )
    assert expected is not None
    alive = (
        expected.cheap.beyond.peak(rows) + expected.cheap.saved_bytes
        if cheap
        else expected.again.peak(rows)
    )
    assert peak_of(run) == pytest.approx(alive, rel=0.001)


def test_weights_are_kept_for_nothing() -> None:
    layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False)).bfloat16()
    assert apply_fp8(layer, Fp8Policy()) == 1
    predicted = predict_alone(layer)
    assert predicted is not None
    assert (
        predicted.full.saved_bytes == TOKENS * HIDDEN + 4 * HIDDEN
    )  # its input, quantised, and scales; the weight is quantised anew


class Counts(nn.Module):
    """What it computes depends on values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * int((hidden > 0).sum())


def test_a_layer_that_depends_on_values_cannot_be_traced() -> None:
    assert predict_alone(Counts()) is None


def test_torch_s_private_api_has_one_door() -> None:
    folder = Path(compiled.__file__).parent
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    touching = {name for name, text in texts.items() if re.search(r"torch(\.utils)?\._", text)}
    reading = {name for name, text in texts.items() if "planner.cost.fx_graph" in text}
    assert (touching, reading) == ({"compiled.py", "fx_graph.py"}, {"compiled.py"})

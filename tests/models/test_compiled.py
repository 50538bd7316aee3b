"""What torch.compile is said to keep and to move is what it keeps and moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen2Config

from megatrain.engine.graphs import run_for_graph
from megatrain.engine.settings import Settings
from megatrain.errors import ConfigError
from megatrain.models.compiled import CompiledLayer, Inductor, cheap_retention, trace_compiled
from megatrain.models.fp8 import Fp8Policy, apply_fp8
from megatrain.models.recorder import LayerCall
from megatrain.models.shape import shape_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.skippable import skipping
from tests.support import FAMILIES, MORE_FAMILIES, engine_of, full_batches, tiny_config

ROWS, TOKENS, HIDDEN = 2, 16, 32
QWEN_7B: dict[str, Any] = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_14B: dict[str, Any] = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 8}


def traced(config: Any, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, runs_on: str = "cuda") -> CompiledLayer:
    skeleton = Skeleton(config, dtype=dtype)
    _, calls = skeleton.dry_call(ROWS, tokens)
    shape, fused = (ROWS, tokens, config.hidden_size), skeleton.config._attn_implementation != "eager"
    layer = trace_compiled(skeleton.layers[0], shape, dtype, calls[0], fused_attention=fused, runs_on=runs_on)
    assert layer is not None
    return layer


@pytest.mark.parametrize(("sizes", "bytes_per_token"), [(QWEN_7B, 158_840), (QWEN_14B, 148_648)])
def test_a_large_layer_keeps_what_was_measured_on_a_gpu(sizes: dict[str, Any], bytes_per_token: int) -> None:
    layer = traced(Qwen2Config(**sizes, vocab_size=8, num_hidden_layers=1), tokens=512)
    hidden, width = 2 * sizes["hidden_size"], 2 * sizes["intermediate_size"]
    assert layer.saved_bytes // (ROWS * 512) + hidden == bytes_per_token  # H200, cuDNN's attention
    assert layer.saved_bytes - layer.cheap_saved_bytes == ROWS * 512 * (2 * hidden + width)  # two norms' outputs, silu(gate) * up


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
    given = [hidden, *layer.parameters(), *(t for t in (*calls[0].args, *calls[0].kwargs.values()) if isinstance(t, Tensor))]
    given += list(calls[0].kwargs.get("position_embeddings") or ())
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch._dynamo.reset()
    layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with saved_tensors_hooks(note, lambda tensor: tensor), cheap_retention() if cheap else nullcontext():
        output = skeleton.layer(0, hidden, calls[0])
    theirs = {tensor.untyped_storage().data_ptr() for tensor in [output, *given]}
    found = sum(size for address, size in kept.items() if address not in theirs)
    expected = traced(config, dtype=dtype, runs_on="cpu")
    assert found == pytest.approx(expected.cheap_saved_bytes if cheap else expected.saved_bytes, rel=0.01)  # a seed here, a mask there


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_every_family_can_be_traced(family: str) -> None:
    layer = traced(tiny_config(family))
    assert layer.saved_bytes > 0
    assert 0 < layer.forward.kernels < layer.backward.kernels
    assert 0 < layer.forward.bytes < layer.backward.bytes < layer.cheap_backward.bytes
    assert 0 < layer.cheap_saved_bytes < layer.saved_bytes


class Mlp(nn.Module):
    """A layer whose traffic can be counted by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(nn.functional.relu(self.up(hidden)) * 3)
        return output


def trace_alone(layer: nn.Module) -> CompiledLayer | None:
    return trace_compiled(layer, (1, TOKENS, HIDDEN), torch.bfloat16, LayerCall((), {}), fused_attention=True, runs_on="cuda")


def test_traffic_by_hand() -> None:
    width = 64
    layer = trace_alone(Mlp(width))
    assert layer is not None
    # relu and times three read one product and write another's input; the sum reads two and writes one
    assert layer.forward == (2 * TOKENS * (2 * width + 3 * HIDDEN) + TOKENS * width, 2 + 2)  # and what relu let through, a byte each
    assert layer.saved_bytes == 2 * TOKENS * width + TOKENS * width
    # relu's gradient reads what it let through and one product and writes another's input; the residual's sum as above
    assert layer.backward == (2 * TOKENS * (2 * width + 3 * HIDDEN) + TOKENS * width, 4 + 2)


def test_cheap_retention_by_hand() -> None:
    width = 64
    layer = trace_alone(Mlp(width))
    assert layer is not None
    assert layer.cheap_saved_bytes == 2 * TOKENS * width  # what relu was given; times three and what it let through are computed again
    # one kernel more, which reads that and writes the product's input; relu's gradient reads it too
    assert layer.cheap_backward == (2 * TOKENS * (2 * width + 3 * HIDDEN) + 2 * TOKENS * 3 * width, 4 + 3)


def test_what_lives_by_hand() -> None:
    width, rows = 64, 3
    layer = trace_compiled(Mlp(width), (rows, TOKENS, HIDDEN), torch.bfloat16, LayerCall((), {}), fused_attention=True, runs_on="cuda")
    assert layer is not None
    weight, wide, mask, narrow = 2 * HIDDEN * width, 2 * TOKENS * width, TOKENS * width, 2 * TOKENS * HIDDEN
    # relu's input, its output and what it let through; with down's gradient, its input's gradient, that of relu's input and what it let
    # through; in the end two weights' gradients, the gradient of up's output, and what becomes of it
    assert {(2 * wide + mask, 0), (2 * wide + mask, weight), (wide + narrow, 2 * weight)} <= layer.again.moments
    assert layer.again.peak(rows) == rows * (2 * wide + mask) + weight
    assert layer.again.peak(10 * rows) == 10 * rows * (2 * wide + mask) + weight
    assert layer.beyond.peak(rows) == rows * wide + weight
    # cheaply retained, relu's input serves again, in one kernel: for down's input and for the gradient
    assert (4 * wide - wide, 0) in layer.cheap_beyond.moments
    assert layer.cheap_beyond.peak(10 * rows) == 10 * rows * 3 * wide


LLAMA_70B: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("config", "rows", "tokens", "mib"),
    [
        (Qwen2Config(**QWEN_7B, vocab_size=8, num_hidden_layers=1), 16, 1024, 4146),
        (Qwen2Config(**QWEN_7B, vocab_size=8, num_hidden_layers=1, max_position_embeddings=1 << 17), 1, 1 << 17, 33_168),
        (LlamaConfig(**LLAMA_70B, vocab_size=8, num_hidden_layers=1), 16, 1024, 6723),
    ],
)
def test_a_large_layer_that_is_recomputed_needs_what_was_measured_on_a_gpu(config: Any, rows: int, tokens: int, mib: int) -> None:
    shape = shape_of(Skeleton(config), tokens, [rows * tokens], runs_on="cuda", compiled=True)
    assert shape.compiled is not None
    needed = shape.compiled.recomputed.at(rows * tokens)
    assert needed / 2**20 == pytest.approx(mib, rel=0.001)  # H200, at the peak of a step
    assert shape.layer_bytes(rows * tokens) > 1.1 * needed


def test_what_cheap_retention_computes_again_is_alive_with_what_it_is_computed_from() -> None:
    config = Qwen2Config(**QWEN_7B, vocab_size=8, num_hidden_layers=1, max_position_embeddings=1 << 17)
    shape = shape_of(Skeleton(config), 1 << 17, [1 << 17], runs_on="cuda", compiled=True)
    assert shape.compiled is not None
    cheap = shape.compiled.beyond_cheap_graph.at(1 << 17)
    assert cheap / 2**20 == pytest.approx(18_946, rel=0.001)  # H200: 7.6B with 128k tokens of context
    assert shape.compiled.beyond_graph.at(1 << 17) < cheap


@pytest.mark.parametrize(("shared_heads", "scratch"), [(8, 2), (2, 4)])
def test_attention_takes_memory_for_itself_on_cuda(shared_heads: int, scratch: int) -> None:
    config = Qwen2Config(
        hidden_size=1024, intermediate_size=64, num_attention_heads=8, num_key_value_heads=shared_heads, vocab_size=8, num_hidden_layers=1
    )
    on_cuda, on_cpu = (shape_of(Skeleton(config), 1024, [1024], runs_on=device, compiled=True).compiled for device in ("cuda", "cpu"))
    assert on_cuda is not None
    assert on_cpu is not None
    query = 1024 * 1024 * 2
    assert on_cuda.recomputed.at(1024) == on_cpu.recomputed.at(1024) + scratch * query
    assert on_cuda.beyond_graph.at(1024) == on_cpu.beyond_graph.at(1024) + scratch * query


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator has given out and not got back while `run` lasts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most: int = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
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
            graph, output = run_for_graph(lambda _, given, call: layer(given, *call.args, **call.kwargs), 0, hidden.detach(), calls[0])
        del output
        graph.gradients(list(layer.parameters()), dy)

    dy = torch.ones_like(hidden)
    run()  # compiles
    _, on_meta = Skeleton(config).dry_call(rows, tokens)
    dtype = torch.float32
    expected = trace_compiled(
        Skeleton(config).layers[0], (rows, tokens, 128), dtype, on_meta[0], fused_attention=True, runs_on="cpu", skipped=skipped
    )
    assert expected is not None
    alive = expected.cheap_beyond.peak(rows) + expected.cheap_saved_bytes if cheap else expected.again.peak(rows)
    assert peak_of(run) == pytest.approx(alive, rel=0.001)


def kept_and_gradients(layer: nn.Module, hidden: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that autograd keeps beyond the weights and the layer's input."""
    given = {tensor.data_ptr() for tensor in (hidden, *layer.parameters())}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden)
    grads = torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))
    return sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in given), list(grads)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_inductor_keeps_as_little_for_this_layer_alone() -> None:
    torch.manual_seed(0)
    cheap, full = Mlp(64).bfloat16(), Mlp(64).bfloat16()
    full.load_state_dict(cheap.state_dict())
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    cheap.compile(backend=Inductor(cheap=True))
    full.compile()
    bytes_kept, gradients = kept_and_gradients(cheap, hidden)
    bytes_of_full, expected = kept_and_gradients(full, hidden)
    assert bytes_kept == 2 * TOKENS * 64
    assert bytes_of_full == 3 * TOKENS * 64
    assert all(map(torch.equal, gradients, expected))


def test_weights_are_kept_for_nothing() -> None:
    layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False)).bfloat16()
    assert apply_fp8(layer, Fp8Policy()) == 1
    traced_layer = trace_alone(layer)
    assert traced_layer is not None
    assert traced_layer.saved_bytes == TOKENS * HIDDEN + 4 * HIDDEN  # its input, quantised, and scales; the weight is quantised anew


class Counts(nn.Module):
    """What it computes depends on values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * int((hidden > 0).sum())


def test_a_layer_that_depends_on_values_cannot_be_traced() -> None:
    assert trace_alone(Counts()) is None


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_a_compiler_that_fails_is_named_and_how_to_do_without(monkeypatch, tmp_path):
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    with (
        inductor.patch({"cpp.cxx": (None, "/bin/false")}),
        engine_of(tiny_config("llama", hidden_size=48), settings=Settings(compile=True)) as engine,
        pytest.raises(ConfigError, match=r"compile: torch.compile could not .*No working C\+\+ compiler.*; set compile: false"),
    ):
        engine.train_step(full_batches(0))


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("process", ["one", "another"])
def test_graphs_are_found_again_only_with_the_attention_that_they_have(process: str) -> None:
    orders = {False: [SDPBackend.FLASH_ATTENTION], True: [SDPBackend.MATH]}
    torch._dynamo.reset()
    with fresh_cache():
        for lengths_vary in (False, True, False):
            if process == "another":
                torch._dynamo.reset()  # what is left is on disk
            with sdpa_kernel(orders[lengths_vary]):
                assert runs_flash(compiled_layer(lengths_vary=lengths_vary)) is not lengths_vary


def compiled_layer(*, lengths_vary: bool) -> Callable[[], None]:
    """Forward and backward of a small model's first layer."""
    skeleton = Skeleton(tiny_config("llama"))
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.ones(block.layout.numel))
    hidden, calls = skeleton.embed({"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)})
    skeleton.compile_layers(lengths_vary=lengths_vary)
    return lambda: skeleton.layer(0, hidden.detach().requires_grad_(), calls[0]).sum().backward()


def runs_flash(work: Callable[[], None]) -> bool:
    """Whether `work`, done once more, takes its attention from PyTorch's flash kernel."""
    work()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        work()
    return any("flash_attention" in event.key for event in seen.key_averages())

"""What torch.compile is said to keep and to move is what it keeps and moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, LlamaConfig, Qwen2Config

from megatrain.engine.graphs import run_for_graph
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import Inductor, cheap_retention
from megatrain.models.transforms.fp8 import Fp8Policy, apply_fp8
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost import compiled
from megatrain.planner.cost.compiled import Alive, CompiledLayer, Lifetime, extent, predict_compiled
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import LayerBytes
from megatrain.planner.cost.shape import ModelShape
from tests.helpers.planned import QWEN_SIZES, sizes
from tests.helpers.support import tiny_config

ROWS, TOKENS, HIDDEN = 2, 16, 32
QWEN_7B: Any = {**QWEN_SIZES["7B"], "vocab_size": 8, "num_hidden_layers": 1}
QWEN_14B: Any = {**QWEN_SIZES["14B"], "vocab_size": 8, "num_hidden_layers": 1}
LLAMA_70B: Any = {**sizes(8192, 28672, 64, 8), "vocab_size": 8, "num_hidden_layers": 1}
LARGE: dict[str, Any] = {
    "7B": Qwen2Config(**QWEN_7B, max_position_embeddings=1 << 17),
    "70B": LlamaConfig(**LLAMA_70B),
    "120B": GptOssConfig(num_local_experts=128, vocab_size=8, num_hidden_layers=1),
}


@cache
def large(size: str, rows: int, tokens: int) -> ModelShape:
    found = Skeleton(LARGE[size])
    return shape_of(found, tokens, [rows * tokens], runs_on="cuda", compiled=True)


def predicted(
    layer: nn.Module,
    shape: tuple[int, int, int] = (1, TOKENS, HIDDEN),
    dtype: torch.dtype = torch.bfloat16,
    call: LayerCall | None = None,
    **how: Any,
) -> CompiledLayer:
    how = {"fused_attention": True, "runs_on": "cuda", **how}
    found = predict_compiled(layer, shape, dtype, call or LayerCall((), {}), **how)
    assert found is not None
    return found


def traced(
    config: Any, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, runs_on: str = "cuda"
) -> CompiledLayer:
    skeleton = Skeleton(config, dtype=dtype)
    _, calls = skeleton.dry_call(ROWS, tokens)
    shape = (ROWS, tokens, config.hidden_size)
    fused = skeleton.config._attn_implementation != "eager"
    how = {"fused_attention": fused, "runs_on": runs_on}
    return predicted(skeleton.layers[0], shape, dtype, calls[0], **how)


@pytest.mark.slow
def test_a_large_layer_keeps_what_was_measured_on_a_gpu():
    layer = traced(Qwen2Config(**QWEN_14B), tokens=512)
    hidden, width = 2 * QWEN_14B["hidden_size"], 2 * QWEN_14B["intermediate_size"]
    # H200, cuDNN's attention
    assert layer.full.saved_bytes // (ROWS * 512) + hidden == 148_648
    # two norms' outputs, silu(gate) * up
    cheaper = layer.full.saved_bytes - layer.cheap.saved_bytes
    assert cheaper == ROWS * 512 * (2 * hidden + width)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize(
    ("family", "cheap"),
    [("llama", False), ("llama", True), ("gpt2", True), ("falcon-40b", False)],
)
def test_what_is_kept_is_what_torch_compile_keeps(family, cheap):
    config, dtype = tiny_config(family), torch.float32
    skeleton = Skeleton(config, dtype=dtype)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.ones(block.layout.numel))
    hidden, calls = skeleton.embed({"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)})
    layer, hidden = skeleton.layers[0], torch.ones(hidden.shape, requires_grad=True)
    given = [*calls[0].args, *calls[0].kwargs.values()]
    given += calls[0].kwargs.get("position_embeddings") or ()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch._dynamo.reset()
    layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    saved = saved_tensors_hooks(note, lambda tensor: tensor)
    with saved, cheap_retention() if cheap else nullcontext():
        output = skeleton.layer(0, hidden, calls[0])
    others = [output, hidden, *layer.parameters(), *given]
    theirs = {t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor)}
    found = sum(size for address, size in kept.items() if address not in theirs)
    expected = traced(config, dtype=dtype, runs_on="cpu")
    saved_bytes = (expected.cheap if cheap else expected.full).saved_bytes
    assert found == pytest.approx(saved_bytes, rel=0.01)  # a seed here, a mask there


# one of each kind of layer: attention's forms, norms' places, masks by layer, experts
LAYERS = ("falcon-rw", "opt-projected", "gemma3", "ctrl", "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_every_family_s_layer_can_be_traced(family):
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


WIDTH = 64
WEIGHT, WIDE, NARROW = 2 * HIDDEN * WIDTH, 2 * TOKENS * WIDTH, 2 * TOKENS * HIDDEN  # bytes
MASK = TOKENS * WIDTH


def test_traffic_by_hand():
    layer = predicted(Mlp(WIDTH))
    # relu and times three read one matmul's output and write another's input; the sum reads two and
    # writes one; and what relu let through, a byte each
    assert layer.full.forward == (2 * WIDE + 3 * NARROW + MASK, 2 + 2)
    assert layer.full.saved_bytes == WIDE + MASK
    # relu's gradient reads what it let through and one matmul's output, and writes another's input;
    # the residual's sum as above
    assert layer.full.backward == (2 * WIDE + 3 * NARROW + MASK, 4 + 2)


class Columns(nn.Module):
    """Adds every so manyth column of a matmul's output."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.up, self.step = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), step

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + 3 * self.up(hidden)[..., : HIDDEN * self.step : self.step]
        return output


def test_kernels_that_pick_columns_count_twice():
    # reads the residual and all columns, writes the sum
    bytes_moved = [predicted(Columns(step)).full.forward.bytes for step in (1, 2)]
    assert bytes_moved == [4 * NARROW, 2 * 4 * NARROW]


def test_cheap_retention_by_hand():
    layer = predicted(Mlp(WIDTH))
    # what relu was given; times three and what it let through are computed again
    assert layer.cheap.saved_bytes == WIDE
    # one kernel more, which reads that and writes the product's input; relu's gradient reads it too
    assert layer.cheap.backward == (3 * NARROW + 5 * WIDE, 4 + 3)


def test_what_lives_by_hand():
    rows = 3
    layer = predicted(Mlp(WIDTH), (rows, TOKENS, HIDDEN))
    # relu's input, its output and what it let through; with that the first weight's gradient
    assert layer.again.peak(rows) == rows * (2 * WIDE + MASK) + WEIGHT
    assert layer.again.peak(10 * rows) == 10 * rows * (2 * WIDE + MASK) + WEIGHT
    assert layer.bytes_at(rows).beyond == rows * WIDE + WEIGHT
    # cheaply retained, relu's input serves again, in one kernel: for down's input and the gradient
    assert layer.bytes_at(10 * rows, cheap=True).beyond == 10 * rows * 3 * WIDE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "rows", "tokens", "mib"), [("7B", 1, 1 << 17, 33_168), ("70B", 16, 1024, 6723)]
)
def test_a_large_layer_that_is_recomputed_needs_what_was_measured_on_a_gpu(size, rows, tokens, mib):
    shape = large(size, rows, tokens)
    assert shape.compiled is not None
    needed = shape.compiled.recomputed.at(rows * tokens)
    assert needed / 2**20 == pytest.approx(mib, rel=0.001)  # H200, at the peak of a step
    assert shape.layer_bytes(rows * tokens) > 1.1 * needed


@pytest.mark.slow
def test_gradients_of_experts_come_when_activations_have_gone():
    """Compiled layers compute them last; in the graph's order 9,430 MiB would be alive."""
    shape = large("120B", 4, 4096)
    assert shape.compiled is not None
    needed = shape.compiled.recomputed.at(1 << 14)
    assert 7300 < needed / 2**20 < 1.1 * 7300  # H100, of 8,200 MiB at the peak of a step
    held = needed + shape.compiled.holes.at(1 << 14)
    assert held / 2**20 == pytest.approx(10_900, rel=0.06)  # of 11,800


def test_what_cheap_retention_computes_again_is_alive_with_what_it_is_computed_from():
    shape = large("7B", 1, 1 << 17)
    assert shape.compiled is not None
    cheap = shape.compiled.beyond_cheap_graph.at(1 << 17)
    # H200: 7.6B with 128k tokens of context
    assert cheap / 2**20 == pytest.approx(18_946, rel=0.001)
    assert shape.compiled.beyond_graph.at(1 << 17) < cheap


@pytest.mark.slow
@pytest.mark.parametrize(("shared_heads", "scratch"), [(8, 2), (2, 4)])
def test_attention_takes_memory_for_itself_on_cuda(shared_heads, scratch):
    layer: Any = sizes(1024, 64, 8, shared_heads)
    config = Qwen2Config(**layer, vocab_size=8, num_hidden_layers=1)

    def row(runs_on: str) -> LayerBytes:
        skeleton = Skeleton(config)
        _, (call,) = skeleton.dry_call(11, 1024)
        given = (skeleton.layers[0], (11, 1024, 1024), torch.bfloat16, call)
        return predicted(*given, runs_on=runs_on).bytes_at(1)

    on_cuda, on_cpu, more = row("cuda"), row("cpu"), scratch * 1024 * 1024 * 2
    assert on_cuda.recomputed == on_cpu.recomputed + more
    assert on_cuda.beyond == on_cpu.beyond + more


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator has given out and not got back while `run` lasts."""
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    most: int = max(accumulate(event.nbytes() for event in allocations))
    return most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("cheap", [False, True], ids=["recomputed", "cheaply retained"])
def test_what_is_alive_is_what_compiled_code_allocates(cheap):
    config, rows, tokens = tiny_config("llama", hidden_size=128, intermediate_size=512), 11, 64
    skeleton = Skeleton(config)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.ones(block.layout.numel))
    hidden, calls = skeleton.embed({"input_ids": torch.zeros(rows, tokens, dtype=torch.long)})
    layer, skipped = skeleton.layers[0], () if cheap else ("mlp.down_proj",)
    torch._dynamo.reset()
    layer.compile(backend=Inductor(cheap=cheap))

    def forward(_: int, given: Tensor, call: LayerCall) -> Tensor:
        output: Tensor = layer(given, *call.args, **call.kwargs)
        return output

    def run() -> None:
        with skipping(layer, skipped):
            graph, output = run_for_graph(forward, 0, hidden.detach(), calls[0])
        del output
        graph.gradients(list(layer.parameters()), dy)

    dy = torch.ones_like(hidden)
    run()  # compiles
    unbound = Skeleton(config)
    _, on_meta = unbound.dry_call(rows, tokens)
    given = (unbound.layers[0], (rows, tokens, 128), torch.float32, on_meta[0])
    expected = predicted(*given, runs_on="cpu", skipped=skipped)
    retained = expected.bytes_at(rows, cheap=True).beyond + expected.cheap.saved_bytes
    alive = retained if cheap else expected.again.peak(rows)
    assert peak_of(run) == pytest.approx(alive, rel=0.001)


def test_weights_are_kept_for_nothing():
    layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False)).bfloat16()
    assert apply_fp8(layer, Fp8Policy()) == 1
    # its input, quantised, and scales; the weight is quantised anew
    assert predicted(layer).full.saved_bytes == TOKENS * HIDDEN + 4 * HIDDEN


class Counts(nn.Module):
    """What it computes depends on values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * int((hidden > 0).sum())


def test_a_layer_that_depends_on_values_cannot_be_traced():
    given = ((1, TOKENS, HIDDEN), torch.bfloat16, LayerCall((), {}))
    assert predict_compiled(Counts(), *given, fused_attention=True, runs_on="cuda") is None


def test_torch_s_private_api_has_one_door():
    folder = Path(compiled.__file__).parent
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    touching = {name for name, text in texts.items() if re.search(r"torch(\.utils)?\._", text)}
    assert touching == {"compiled.py"}


# -- holes -----------------------------------------------------------------------------------------


FOUR, TWO = Lifetime(0, 1, 1, 2), Lifetime(0, 3, 0, 2)  # bytes with two sequences: 4, 2


@pytest.mark.parametrize(
    ("later", "bytes_"),
    [
        ([3], 4 + 2),  # in the hole of the first
        ([3, 1], 4 + 2),
        ([5], 4 + 2 + 5),  # no hole holds it
        ([2, 3], 4 + 2 + 3),  # two are left of the hole
    ],
)
def test_a_piece_takes_the_smallest_hole_that_holds_it(later, bytes_):
    pieces = [FOUR, TWO, *(Lifetime(2, 3, 0, size) for size in later)]
    assert extent(pieces, 2) == bytes_


def test_holes_that_touch_are_one_and_the_last_one_grows():
    first = [Lifetime(0, 0, 0, 3), Lifetime(0, 0, 0, 3), Lifetime(0, 2, 0, 1)]
    assert extent([*first, Lifetime(1, 2, 0, 6)], 1) == 7
    assert extent([*first[:2], Lifetime(1, 2, 0, 9)], 1) == 9


def test_the_order_that_needs_least_is_taken_with_its_holes():
    tight = (FOUR, Lifetime(2, 3, 0, 5))  # 5 alive, in 5
    loose = (FOUR, TWO, Lifetime(2, 3, 0, 5))  # 7 alive, in 11
    assert [Alive((order,)).peak(2) for order in (tight, loose)] == [5, 7]
    assert [Alive((order,)).holes(2) for order in (tight, loose)] == [0, 4]
    assert Alive((tight, loose)).peak(2) == 5
    assert Alive((tight, loose)).holes(2) == 0

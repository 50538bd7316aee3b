"""On CUDA: a layer keeps and needs the bytes that its dry run found, and its gradients do not
depend on what it keeps or leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Config

from megatrain.engine.components import fastest_attention
from megatrain.engine.graphs import run_for_graph
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import Inductor
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import call_peak_bytes
from tests.helpers.compare import differing

SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4864, "vocab_size": 96}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
CONFIG = Qwen2Config(**SIZES)
ROWS, TOKENS = 4, 1024
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
Layer = tuple[nn.Module, Tensor, LayerCall]


@pytest.fixture(autouse=True)
def gradients_in_the_calling_thread() -> Iterator[None]:
    """As in a step."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def first_layer(skeleton: Skeleton, rows: int = ROWS, tokens: int = TOKENS) -> Layer:
    """A decoder layer of random weights, hidden states for it, and what it receives besides."""
    skeleton.move_buffers(CUDA)
    torch.manual_seed(0)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.randn(block.layout.numel, device=CUDA, dtype=BF16) * 0.05)
    with torch.no_grad():
        ids = torch.randint(0, 96, (rows, tokens), device=CUDA)
        hidden, calls = skeleton.embed({"input_ids": ids})
    return skeleton.layers[0], hidden.requires_grad_(), calls[0]


def gradients(
    layer: nn.Module, hidden: Tensor, call: LayerCall, skipped: tuple[str, ...]
) -> dict[str, Tensor]:
    with fastest_attention(CUDA), skipping(layer, skipped):
        output = layer(hidden, *call.args, **call.kwargs)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(output, [hidden, *parameters.values()], torch.ones_like(output))
    return {name: grad.cpu() for name, grad in zip(["hidden", *parameters], grads, strict=True)}


@pytest.mark.parametrize(("compiled", "cheap"), [(False, False), (True, False), (True, True)])
def test_a_graph_keeps_what_the_dry_run_found(compiled: bool, cheap: bool) -> None:
    layer, hidden, call = first_layer(Skeleton(CONFIG))
    if compiled:
        layer.compile(backend=Inductor(cheap=cheap))
    gradients(layer, hidden, call, ())  # whatever a first run allocates for good
    before = torch.cuda.memory_allocated()
    with fastest_attention(CUDA):
        output = layer(hidden, *call.args, **call.kwargs)
    kept = torch.cuda.memory_allocated() - before - output.nbytes
    shape = shape_of(Skeleton(CONFIG), TOKENS, [ROWS * TOKENS], runs_on="cuda", compiled=compiled)
    planned = shape.retained_bytes(ROWS * TOKENS, 1, compiled=compiled, cheap=cheap)
    assert kept == pytest.approx(planned, rel=0.01)


def peak_of(
    layer: nn.Module, hidden: Tensor, call: LayerCall, skipped: tuple[str, ...], retained: bool
) -> int:
    """Peak bytes of a layer's graph and gradients.

    retained: of the gradients alone, beyond what the graph holds.
    """
    parameters = list(layer.parameters())

    def run(_: int, given: Tensor, call: LayerCall) -> Tensor:
        output: Tensor = layer(given, *call.args, **call.kwargs)
        return output

    with fastest_attention(CUDA), skipping(layer, skipped):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph, output = run_for_graph(run, 0, hidden.detach(), call)
    dy = torch.ones_like(output)
    before += dy.nbytes
    del output
    if retained:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    graph.gradients(parameters, dy)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("retained", "cheap"), [(False, False), (True, False), (True, True)])
def test_a_compiled_layer_needs_what_its_trace_says(retained: bool, cheap: bool) -> None:
    layer, hidden, call = first_layer(Skeleton(CONFIG))
    skipped = () if retained else ("mlp.down_proj",)
    layer.compile(backend=Inductor(cheap=cheap))
    peak_of(layer, hidden, call, skipped, retained)  # which compiles
    shape = shape_of(Skeleton(CONFIG), TOKENS, [ROWS * TOKENS], runs_on="cuda", compiled=True)
    sets = shape.compiled
    assert sets is not None
    beyond = sets.beyond_cheap_graph if cheap else sets.beyond_graph
    expected = beyond if retained else sets.recomputed
    needed, bound = peak_of(layer, hidden, call, skipped, retained), expected.at(ROWS * TOKENS)
    # a full graph's gradients may take the place of what they are computed from: nearly all do
    assert (0.5 if retained and not cheap else 0.97) * bound <= needed <= 1.01 * bound


SKIPPED = ("mlp.down_proj",)


def test_gradients_without_the_last_product_are_the_same_bits(deterministic: None) -> None:
    given = first_layer(Skeleton(CONFIG))
    assert differing(gradients(*given, ()), gradients(*given, SKIPPED)) == []


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_7b_layer_of_64k_tokens_in_chunks_takes_what_the_plan_says(compiled: bool) -> None:
    tokens, chunk = 65_536, 8192
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": tokens}
    config = Qwen2Config(**SIZES | sizes | {"num_attention_heads": 28, "num_key_value_heads": 4})
    shape = shape_of(Skeleton(config), tokens, [tokens], runs_on="cuda", layer_chunks=[chunk])
    skeleton = Skeleton(config)
    skeleton.chunk_layers(chunk, compiled)
    skeleton.find_skippable()
    if compiled:
        skeleton.compile_layers()
    layer, hidden, call = first_layer(skeleton, 1, tokens)
    given, grad, parameters = hidden.detach(), torch.ones_like(hidden), list(layer.parameters())

    def work() -> None:
        with fastest_attention(CUDA):
            # as in a step, nobody holds on to the output
            graph = run_for_graph(skeleton.layer_again, 0, given, call)[0]
        graph.gradients(parameters, grad)

    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_allocated() - before
    assert 0.6 * shape.layer_bytes(tokens, chunk) < needed < 1.05 * shape.layer_bytes(tokens, chunk)


@pytest.mark.parametrize("shared_heads", [28, 4])
def test_attention_takes_what_its_stand_in_allocates(shared_heads: int) -> None:
    tokens, width = 8192, 128

    def inputs(device: str) -> list[Tensor]:
        heads = (28, shared_heads, shared_heads)
        # as layers lay them out
        rows = (torch.ones(1, tokens, n, width, dtype=BF16, device=device) for n in heads)
        return [row.transpose(1, 2).requires_grad_() for row in rows]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with fastest_attention(query.device):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shared_heads < 28
            )

    def peak() -> int:
        given = inputs("cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(*given)
        grad = torch.ones_like(out)
        torch.autograd.grad(out, given, grad)
        return torch.cuda.max_memory_allocated() - before - grad.nbytes

    given = inputs("meta")
    expected = call_peak_bytes(lambda: attend(*given), given, runs_on="cuda").peak_bytes
    peak()  # which loads libraries
    assert peak() == pytest.approx(expected, rel=0.01)

"""On CUDA: a layer keeps the bytes that its dry run found, and its gradients do not depend on what it keeps or leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Config

from megatrain.engine.context import fastest_attention
from megatrain.engine.graphs import run_for_graph
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.compiled import Inductor
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost.footprint import call_peak_bytes
from megatrain.planner.cost.shape import shape_of
from tests.support import differing, distance

CONFIG = Qwen2Config(
    hidden_size=1024,
    intermediate_size=4864,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=96,
    num_hidden_layers=1,
)
ROWS, TOKENS = 4, 1024
CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.fixture(autouse=True)
def gradients_in_the_calling_thread() -> Iterator[None]:
    """As in a step."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def layer_on_gpu() -> tuple[nn.Module, Tensor, LayerCall]:
    """A decoder layer of random weights, hidden states for it, and what it receives besides."""
    skeleton = Skeleton(CONFIG)
    skeleton.move_buffers(CUDA)
    torch.manual_seed(0)
    for block in skeleton.anatomy.blocks[:2]:
        skeleton.bind(block, torch.randn(block.layout.numel, device=CUDA, dtype=BF16) * 0.05)
    with torch.no_grad():
        hidden, calls = skeleton.embed(
            {"input_ids": torch.randint(0, 96, (ROWS, TOKENS), device=CUDA)}
        )
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
    layer, hidden, call = layer_on_gpu()
    if compiled:
        layer.compile(backend=Inductor(cheap=cheap))
    gradients(layer, hidden, call, ())  # whatever a first run allocates for good
    before = torch.cuda.memory_allocated()
    with fastest_attention(CUDA):
        output = layer(hidden, *call.args, **call.kwargs)
    kept = torch.cuda.memory_allocated() - before - output.nbytes
    shape = shape_of(Skeleton(CONFIG), TOKENS, [ROWS * TOKENS], runs_on="cuda", compiled=compiled)
    assert kept == pytest.approx(
        shape.retained_bytes(ROWS * TOKENS, 1, compiled=compiled, cheap=cheap), rel=0.01
    )


def peak_of(
    layer: nn.Module, hidden: Tensor, call: LayerCall, skipped: tuple[str, ...], retained: bool
) -> int:
    """Bytes at the worst moment of a layer's graph and gradients; of a retained graph, of the gradients and beyond what it holds."""
    parameters = list(layer.parameters())
    with fastest_attention(CUDA), skipping(layer, skipped):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph, output = run_for_graph(
            lambda _index, given, call: layer(given, *call.args, **call.kwargs),
            0,
            hidden.detach(),
            call,
        )
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
    layer, hidden, call = layer_on_gpu()
    skipped = () if retained else ("mlp.down_proj",)
    layer.compile(backend=Inductor(cheap=cheap))
    peak_of(layer, hidden, call, skipped, retained)  # which compiles
    shape = shape_of(Skeleton(CONFIG), TOKENS, [ROWS * TOKENS], runs_on="cuda", compiled=True)
    sets = shape.compiled
    assert sets is not None
    expected = (
        (sets.beyond_cheap_graph if cheap else sets.beyond_graph) if retained else sets.recomputed
    )
    needed, bound = peak_of(layer, hidden, call, skipped, retained), expected.at(ROWS * TOKENS)
    full = (
        retained and not cheap
    )  # whose gradients may take the place of what they are computed from: nearly all of them do
    assert (0.5 if full else 0.97) * bound <= needed <= 1.01 * bound


def test_gradients_of_cheap_retention_are_the_same_but_for_rounding(deterministic: None) -> None:
    layer, hidden, call = layer_on_gpu()
    layer.compile()
    full = gradients(layer, hidden, call, ())
    layer.compile(backend=Inductor(cheap=True))
    cheap = gradients(layer, hidden, call, ())
    assert {
        name for name in full if distance(cheap[name], full[name]) > 0.004
    } == set()  # what is computed twice may round twice


def test_gradients_without_the_last_product_are_the_same_bits(deterministic: None) -> None:
    layer, hidden, call = layer_on_gpu()
    assert (
        differing(
            gradients(layer, hidden, call, ()), gradients(layer, hidden, call, ("mlp.down_proj",))
        )
        == []
    )


def test_compiled_gradients_without_the_last_product_are_the_same_but_for_rounding(
    deterministic: None,
) -> None:
    layer, hidden, call = layer_on_gpu()
    layer.compile()
    full, without = (
        gradients(layer, hidden, call, skipped) for skipped in ((), ("mlp.down_proj",))
    )
    assert {
        name for name in full if distance(without[name], full[name]) > 0.004
    } == set()  # the two graphs are fused each its own way


@pytest.mark.parametrize("shared_heads", [28, 4])
def test_attention_takes_what_its_stand_in_allocates(shared_heads: int) -> None:
    tokens, width = 8192, 128

    def inputs(device: str) -> list[Tensor]:
        heads = (28, shared_heads, shared_heads)
        rows = (
            torch.ones(1, tokens, count, width, dtype=torch.bfloat16, device=device)
            for count in heads
        )  # as layers lay them out
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

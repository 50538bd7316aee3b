"""A layer recomputed without the matmuls that no gradient needs has the same gradients and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms import skippable as module_under_test
from megatrain.models.transforms.skippable import skippable, skippable_in, skipping
from tests.helpers.compare import differing
from tests.helpers.support import KINDS, tiny_config

ROWS, TOKENS, HIDDEN = 2, 11, 32

LLAMA_LIKE = ("mlp.down_proj",)
# attention and MLP are added to the residual stream side by side
NEOX = ("attention.dense", "mlp.dense_4h_to_h")
FALCON = ("self_attention.dense", "mlp.dense_4h_to_h")
EXPECTED = {
    **dict.fromkeys(("llama", "mistral-sliding", "qwen2-tied", "phi3", "stablelm"), LLAMA_LIKE),
    **dict.fromkeys(("falcon-7b", "falcon-40b"), FALCON),
    "gpt-neox": NEOX,
    "falcon-rw": FALCON[1:],
    "bloom": FALCON[1:],
    "gpt2": ("mlp.c_proj",),
    "gpt-bigcode": ("mlp.c_proj",),
    "opt": ("fc2",),
    "cohere": ("self_attn.o_proj", *LLAMA_LIKE),
    "ctrl": ("ffn.2",),
    "gemma2": (),  # a norm after the product needs its value
    "gemma3": (),
    "olmo2": (),
    "opt-projected": (),
    "mixtral": (),  # the experts are no modules of their own
}


def layer_of(
    family: str, dtype: torch.dtype, chunk: int | None = None, **changes: object
) -> tuple[nn.Module, LayerCall]:
    """A decoder layer of random weights, and what it receives besides hidden states."""
    skeleton = Skeleton(tiny_config(family, **changes), dtype=dtype)
    if chunk:
        skeleton.chunk_layers(chunk)
    block = skeleton.anatomy.blocks[1]
    generator = torch.Generator().manual_seed(3)
    skeleton.bind(block, (torch.randn(block.layout.numel, generator=generator) * 0.2).to(dtype))
    embed = skeleton.anatomy.embed
    skeleton.bind(embed, torch.zeros(embed.layout.numel, dtype=dtype))
    with torch.no_grad():
        _, calls = skeleton.embed({"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)})
    return skeleton.layers[0], calls[0]


def gradients(
    layer: nn.Module, dtype: torch.dtype, call: LayerCall, skipped: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A random loss's, with respect to hidden states and every parameter."""
    generator = torch.Generator().manual_seed(5)
    shape = (ROWS, TOKENS, HIDDEN)
    hidden, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    hidden.requires_grad_()
    with skipping(layer, skipped):
        output = layer(hidden, *call.args, **call.kwargs)
    output = output[0] if isinstance(output, tuple) else output
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(output, [hidden, *parameters.values()], grad)
    return dict(zip(["hidden", *parameters], grads, strict=True))


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not computed is NaN."""
    monkeypatch.setattr(
        module_under_test,
        "uninitialised",
        lambda x, *shape: x.new_full(shape, float("nan")),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPECTED)
def test_products_that_only_feed_the_residual_stream_are_found(family: str) -> None:
    layer, call = layer_of(family, torch.bfloat16)
    assert skippable(layer, (ROWS, TOKENS, HIDDEN), torch.bfloat16, call) == EXPECTED[family]


@pytest.mark.slow
@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [family for family in KINDS if EXPECTED[family]])
def test_gradients_are_the_same_bits(family: str, dtype: torch.dtype) -> None:
    layer, call = layer_of(family, dtype)
    without = gradients(layer, dtype, call, EXPECTED[family])
    assert differing(gradients(layer, dtype, call), without) == []


@pytest.mark.usefixtures("garbage")
def test_a_product_that_is_needed_would_be_missed() -> None:
    layer, call = layer_of("llama", torch.float32)
    wrong = gradients(layer, torch.float32, call, ("self_attn.o_proj",))
    assert "mlp.gate_proj.weight" in differing(gradients(layer, torch.float32, call), wrong)


def test_nothing_is_skipped_outside_the_context() -> None:
    layer, call = layer_of("llama", torch.float32)
    hidden = torch.ones(ROWS, TOKENS, HIDDEN)
    before = layer(hidden, *call.args, **call.kwargs)
    with pytest.raises(ZeroDivisionError), skipping(layer, LLAMA_LIKE):
        raise ZeroDivisionError
    assert torch.equal(layer(hidden, *call.args, **call.kwargs), before)


def test_layers_are_told_apart_by_all_that_matters_and_each_kind_is_run_once(monkeypatch) -> None:
    skeleton = Skeleton(tiny_config("llama", num_hidden_layers=6), dtype=torch.float32)
    dropped: Any = skeleton.layers[1]  # a module of the same shapes that needs the product
    dropped.mlp.down_proj = nn.Sequential(dropped.mlp.down_proj, nn.Tanh())
    skeleton.layers[3].mlp.act_fn = nn.Tanh()  # type: ignore[union-attr]
    hidden, calls = skeleton.dry_call(1, 2)
    given = tuple(hidden.shape), torch.float32
    expected = [
        skippable(layer, *given, call) for layer, call in zip(skeleton.layers, calls, strict=True)
    ]
    run: list[nn.Module] = []

    def noted(layer: nn.Module, *others: Any) -> tuple[str, ...]:
        run.append(layer)
        return skippable(layer, *others)

    monkeypatch.setattr(module_under_test, "skippable", noted)
    assert skippable_in(skeleton.layers, *given, calls) == expected
    assert expected == [LLAMA_LIKE, (), *[LLAMA_LIKE] * 4]
    assert run == [skeleton.layers[index] for index in (0, 1, 3)]


def test_dropout_after_a_product_keeps_it() -> None:
    layer, call = layer_of("falcon-rw", torch.float32, hidden_dropout=0.1)
    assert skippable(layer.train(), (ROWS, TOKENS, HIDDEN), torch.float32, call) == ()


def test_a_product_that_decides_is_kept() -> None:
    class Asks(nn.Module):
        def __init__(self, asks: bool) -> None:
            super().__init__()
            self.linear, self.asks = nn.Linear(4, 4), asks

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = self.linear(hidden)
            return hidden + product if self.asks and (product > 0).all() else product + hidden

    for asks, expected in ((False, ("linear",)), (True, ())):
        assert skippable(Asks(asks), (1, 2, 4), torch.float32, LayerCall((), {})) == expected


# torch.compile does that to autograd functions
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("family", ["gpt2"])
def test_a_compiled_layer_has_a_graph_with_and_one_without(family: str) -> None:
    layer, call = layer_of(family, torch.bfloat16)
    expected = gradients(layer, torch.bfloat16, call)
    hidden = torch.ones(ROWS, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    whole = layer(hidden, *call.args, **call.kwargs)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    layer.compile(backend=backend, fullgraph=True)
    for skipped in ((), EXPECTED[family], (), EXPECTED[family]):
        assert differing(expected, gradients(layer, torch.bfloat16, call, skipped)) == []
        output = layer(hidden, *call.args, **call.kwargs)
        assert torch.equal(*(t[0] if isinstance(t, tuple) else t for t in (output, whole)))
    assert len(graphs) == 2

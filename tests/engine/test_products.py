"""Gradients that go straight to fp32 sums are those of autograd, for every layer and family."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.engine.products import Sum, SummingInto
from megatrain.models.skeleton import Skeleton
from tests.helpers.compare import distance
from tests.helpers.support import KINDS, VOCABULARY, tiny_config


def empty_sum(*shape: int) -> Sum:
    """Its memory holds nothing that may count."""
    return Sum(torch.full(shape, torch.nan), empty=True)


def gradients(output: Tensor, parameters: Sequence[Tensor], weight: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad((output * weight).sum(), parameters, allow_unused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_adds_its_weights_gradient_to_the_sum(dtype, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5, bias=bias).to(dtype), torch.randn(2, 3, 6).to(dtype).requires_grad_()
    into = empty_sum(5, 6)
    with SummingInto([layer.weight], [into]):
        outputs = [layer(x), layer(2 * x)]
    inputs = [x, *layer.parameters()]
    both_grads = [
        torch.autograd.grad(output.sum(), inputs, allow_unused=True) for output in outputs
    ]
    assert [grads[1] for grads in both_grads] == [None, None]
    grads = both_grads[1]
    expected = torch.autograd.grad(layer(2 * x).sum(), [x, *layer.parameters()])
    assert torch.equal(outputs[1], layer(2 * x))
    for ours, plain in zip((grads[0], *grads[2:]), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(ours, plain)
    both = torch.autograd.grad(layer(x).float().sum() + layer(2 * x).float().sum(), layer.weight)[0]
    assert distance(into.total, both) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_an_embedding_adds_the_rows_that_were_looked_up(padding):
    torch.manual_seed(0)
    table, weight = nn.Parameter(torch.randn(7, 4)), torch.randn(2, 3, 4)
    ids = torch.tensor([[1, 2, 2], [6, 1, 2]])
    into = empty_sum(7, 4)
    with SummingInto([table], [into]):
        output = functional.embedding(ids, table, padding)
    assert gradients(output, [table], weight) == [None]
    plain = functional.embedding(ids, table, padding)
    (expected,) = gradients(plain, [table], weight)
    assert expected is not None
    assert distance(into.total, expected) < 1e-6
    assert torch.equal(output, plain)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_an_embedding_with_a_rule_of_its_own_is_left_to_autograd(options):
    torch.manual_seed(0)
    layer = nn.Embedding(7, 4, **options)
    into = Sum(torch.zeros(7, 4), empty=True)
    with SummingInto([layer.weight], [into]):
        output = layer(torch.tensor([1, 2, 2]))
    assert gradients(output, [layer.weight], torch.ones(3, 4)) != [None]
    assert into.empty


@pytest.mark.parametrize("family", KINDS)
def test_every_familys_embedding_and_head_have_the_gradients_of_autograd(family):
    skeleton = Skeleton(tiny_config(family), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    parameters: list[nn.Parameter] = []
    for block in skeleton.anatomy.blocks:
        bound = skeleton.bind(block, torch.randn(block.layout.numel, generator=generator) * 0.2)
        if block in (skeleton.anatomy.embed, skeleton.anatomy.head):
            parameters += bound
    ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
    hidden = torch.randn(6, skeleton.anatomy.hidden_size, generator=generator)

    def run() -> list[Tensor | None]:
        ends = skeleton.embed({"input_ids": ids})[0], skeleton.head(hidden)
        weights = [
            torch.randn(end.shape, generator=torch.Generator().manual_seed(1)) for end in ends
        ]
        total = sum((end * weight).sum() for end, weight in zip(ends, weights, strict=True))
        assert isinstance(total, Tensor)
        return list(torch.autograd.grad(total, parameters, allow_unused=True))

    expected, sums = run(), [empty_sum(*p.shape) for p in parameters]
    with SummingInto(parameters, sums):
        rest = run()
    assert any(grad is None for grad in rest)  # the vocabulary's weights at least
    for into, grad, plain in zip(sums, rest, expected, strict=True):
        if grad is not None:
            into.add(grad) if into.empty else into.total.add_(grad)
        into.fill()
        assert distance(into.total, torch.zeros_like(into.total) if plain is None else plain) < 1e-6

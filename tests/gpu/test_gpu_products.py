"""On CUDA: sums of gradients, added by matmuls and as vectors, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatrain.engine.head import token_logprobs
from megatrain.engine.products import Sum, added_as_vectors
from tests.helpers.compare import distance


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("shape", [(64, 72), (1, 8), (1000, 1024)])
def test_a_gradient_added_as_vectors_has_the_bits_of_a_plain_addition(shape):
    total, gradient = random(*shape, dtype=torch.float32), random(*shape, seed=1)
    expected = total + gradient
    assert added_as_vectors(total, gradient)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_added_in_float32(dtype, empty):
    a, b = random(48, 512, dtype=dtype), random(512, 80, seed=1, dtype=dtype)
    total = random(48, 80, seed=2, dtype=torch.float32)
    expected = a.double() @ b.double() + (0 if empty else total.double())
    Sum(total, empty).add_product(a, b)
    assert distance(total, expected) < 1e-6  # no rounding to bf16 in between


@pytest.mark.parametrize("fused", [False, True])
def test_log_probabilities_and_their_gradient(fused):
    logits = random(96, 5003, dtype=torch.float32) * 3
    labels = torch.randint(5003, (96,), device="cuda")
    weights = random(96, seed=1, dtype=torch.float32)
    ours, plain = logits.bfloat16().requires_grad_(), logits.bfloat16().double().requires_grad_()
    logprobs = token_logprobs(ours, labels, fused)
    expected = -functional.cross_entropy(plain, labels, reduction="none")
    assert distance(logprobs, expected) < 1e-6
    (grad,) = torch.autograd.grad(logprobs, ours, weights)
    (reference,) = torch.autograd.grad(expected, plain, weights.double())
    assert distance(grad, reference) < 4e-3  # rounded once, to bf16

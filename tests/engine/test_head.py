"""The chunked head: its loss and gradients are cross-entropy's, and logits never exist for more
than a chunk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine import head
from megatrain.engine.head import Head, token_entropies, token_logprobs
from megatrain.engine.products import Sum, add_gradients
from megatrain.losses import Targets, find_targets, logit_rows, next_token
from megatrain.losses.sequences import TARGETS
from megatrain.planner.cost.footprint import LiveBytes
from megatrain.settings import Settings
from tests.helpers.compare import distance
from tests.helpers.support import engine_of, full_batches

VOCABULARY, HIDDEN = 31, 8


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Targets, Tensor]:
    """(hidden, weight of the head, targets, labels)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (1, 23), generator=generator)
    labels[0, 3:9] = -100
    hidden = torch.randn(23, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    return hidden, weight, find_targets(labels), labels


def expected_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden[:-1], weight).float()
    return functional.cross_entropy(logits, labels[0, 1:], reduction="sum")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("piece_rows", [1, 4, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_log_softmax(dtype, piece_rows, temperature, monkeypatch):
    monkeypatch.setattr(logit_rows, "FP32_TEMPORARY_BYTES", 4 * VOCABULARY * piece_rows)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(10, VOCABULARY, generator=generator) * 5).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (10,), generator=generator)
    weights = torch.randn(10, generator=generator)
    ours = token_logprobs(logits, labels, temperature=temperature)
    every = (logits.float() / temperature).log_softmax(-1)
    plain = every.gather(1, labels[:, None]).squeeze(1)
    entropies = token_entropies(logits.detach(), labels, temperature=temperature)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(1).detach())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-5)
    (grad,) = torch.autograd.grad((ours * weights).sum(), logits)
    (expected,) = torch.autograd.grad((plain * weights).sum(), logits)
    assert grad.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(grad, expected, rtol=rtol, atol=1e-6)


# what follows the product, and whether its result may be written over
TAILS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda x: x, True),
    # `unsqueeze` is no view that the table names
    "view": (lambda x: x.unsqueeze(0).view(1, *x.shape).squeeze(0), False),
    "scale": (lambda x: x * 0.5, True),
    "division": (lambda x: x / 3, True),
    "softcap": (lambda x: torch.tanh(x / 3) * 3, True),
    "tanh": (torch.tanh, False),  # its gradient is computed from its result
    "exp": (torch.exp, False),
    "softmax": (lambda x: x.softmax(-1), False),
}


def test_logits_are_written_over_only_where_no_gradient_needs_them():
    for tail in TAILS:
        hidden, weight, targets, _ = problem()
        weight.requires_grad_()
        after, consumed = TAILS[tail]
        leaf = hidden[targets.index].requires_grad_()
        logits = after(leaf @ weight.T)
        before = logits.detach().clone()
        grads = torch.autograd.grad(token_logprobs(logits, targets.labels).sum(), [leaf, weight])
        plain = after(leaf @ weight.T).log_softmax(-1).gather(1, targets.labels[:, None]).sum()
        for ours, expected in zip(grads, torch.autograd.grad(plain, [leaf, weight]), strict=True):
            assert distance(ours, expected) < 1e-6
        assert torch.equal(logits.detach(), before) != consumed


def test_of_a_chunks_logits_there_is_one_array(monkeypatch):
    rows, vocabulary = 64, 1 << 14
    monkeypatch.setattr(logit_rows, "FP32_TEMPORARY_BYTES", 4 * vocabulary)
    hidden, weight = torch.randn(rows, HIDDEN), torch.randn(vocabulary, HIDDEN, requires_grad=True)
    targets = Targets(torch.arange(rows), torch.arange(rows))
    total = Sum(torch.zeros_like(weight.detach()), empty=True)
    given = (hidden, targets, next_token, 1.0, [weight], [total])
    with LiveBytes() as live:
        Head(lambda x: x @ weight.T, rows).loss_and_gradients(*given)
        by_autograd, live.peak = live.peak, live.live
        Head(lambda x: functional.linear(x, weight), rows).loss_and_gradients(*given)
    logits, weights = rows * vocabulary * 4, weight.numel() * 4
    assert logits + weights < by_autograd < 1.2 * logits + weights
    assert logits < live.peak < 1.2 * logits


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
def test_fused_passes_agree_with_the_others():
    hidden, weight, targets, _ = problem(dtype=torch.bfloat16)
    results: tuple[list[Tensor], list[Tensor]] = [], []
    for fused in (False, True):
        leaf = hidden[targets.index].requires_grad_()
        for temperature in (1.0, 0.7, 1.3):
            logits = functional.linear(leaf, weight)
            entropies = token_entropies(logits.detach(), targets.labels, fused, temperature)
            logprobs = token_logprobs(logits, targets.labels, fused, temperature)
            found = logprobs.detach(), entropies, *torch.autograd.grad(logprobs.sum(), leaf)
            results[fused].extend(found)
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_alone_may_be_fused(monkeypatch, fused):
    compiled = Mock(side_effect=lambda function: function)
    monkeypatch.setattr(head, "compiled", compiled)
    settings = Settings(head_chunk_tokens=7, fused_loss=fused)
    with engine_of("llama", settings=settings) as engine:
        engine.train_step(full_batches(0, [(2, 8)]))
        assert not any(layer._compiled_call_impl for layer in engine.skeleton.layers)
    assert compiled.called is fused


def test_log_probabilities_of_large_logits_are_finite():
    size = 1e4
    logits = torch.tensor([[size, 0.0, -size]], requires_grad=True)
    value = token_logprobs(logits, torch.tensor([2]))
    assert value.tolist() == [-2 * size]
    (grad,) = torch.autograd.grad(value.sum(), logits)
    assert grad.tolist() == [[-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk):
    hidden, weight, targets, labels = problem()
    sums = torch.zeros_like(weight)
    weight.requires_grad_()
    rows: list[int] = []

    def project(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x @ weight.T

    head = Head(project, chunk)
    given = (hidden, targets, next_token, 0.25, [weight], [Sum(sums, empty=True)])
    total, grad_hidden = head.loss_and_gradients(*given)
    leaf = hidden.clone().requires_grad_()
    expected = expected_loss(leaf, weight, labels)
    grads = torch.autograd.grad(expected * 0.25, [leaf, weight])
    for found in (total, head.loss_sum(hidden, targets, next_token)):  # unscaled
        assert not found.loss[TARGETS].requires_grad
        assert float(found.loss[TARGETS]) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert distance(grad_hidden, grads[0]) < 1e-6
    assert distance(sums, grads[1]) < 1e-6
    assert max(rows) == min(chunk, len(targets))  # logits never exist for more
    # positions without a target are never projected
    assert sum(rows) == 2 * len(targets) < 2 * len(hidden)
    assert torch.all(grad_hidden[2:8] == 0)
    assert torch.all(grad_hidden[-1] == 0)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_weight_with_a_sum_gets_its_gradient_there_and_nothing_through_autograd(
    chunk, monkeypatch
):
    hidden, weight, targets, labels = problem()
    scale, total = (
        torch.ones(HIDDEN, requires_grad=True),
        Sum(torch.full_like(weight, torch.nan), empty=True),
    )
    weight.requires_grad_()
    scale_total = Sum(torch.zeros_like(scale), empty=True)
    added: list[list[Tensor | None]] = []

    def add(sums: Sequence[Sum], gradients: Sequence[Tensor | None]) -> None:
        added.append(list(gradients))
        add_gradients(sums, gradients)

    monkeypatch.setattr(head, "add_gradients", add)
    into = [scale, weight], [scale_total, total]
    end = Head(lambda x: functional.linear(x * scale, weight), chunk)
    end.loss_and_gradients(hidden, targets, next_token, 0.25, *into)
    assert all(of_scale is not None and of_weight is None for of_scale, of_weight in added)
    expected = torch.autograd.grad(
        expected_loss(hidden * scale, weight, labels) * 0.25, [scale, weight]
    )
    assert distance(scale_total.total.detach(), expected[0]) < 1e-6
    assert distance(total.total, expected[1]) < 1e-6

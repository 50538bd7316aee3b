"""The end of the model, a chunk of targets at a time: final norm, LM head, log-probabilities, loss, and back. Logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatrain.losses import Loss, Targets

FP32_TEMPORARY_BYTES = 256 << 20  # the softmax runs in fp32 on as many rows of logits as fit this


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[label] in fp32 from logits of any dtype, without an fp32 copy of all the logits.

    Saves the logits; the gradient (one-hot less softmax) is computed in fp32 and rounded once, to the logits' dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        result = torch.empty(len(labels), device=logits.device)
        for rows in pieces(logits):
            logprobs = torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32)
            result[rows] = logprobs.gather(1, labels[rows, None]).squeeze(1)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits, labels), (grad,) = ctx.saved_tensors, grads
        result = torch.empty_like(logits)
        for rows in pieces(logits):
            piece = torch.softmax(logits[rows], dim=-1, dtype=torch.float32).mul_(-grad[rows, None])
            result[rows] = piece.scatter_add_(1, labels[rows, None], grad[rows, None])
        return result, None


def pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows whose fp32 copy stays within FP32_TEMPORARY_BYTES."""
    step = max(1, FP32_TEMPORARY_BYTES // (4 * logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `labels` [n] under `logits` [n, vocab]; fp32 [n], differentiable in the logits."""
    return TokenLogprobs.apply(logits, labels)  # type: ignore[no-untyped-call, no-any-return]


Project = Callable[[torch.Tensor], torch.Tensor]  # hidden [n, hidden] -> logits [n, vocab]


def loss_sum(project: Project, hidden: torch.Tensor, targets: Targets, loss: Loss, chunk: int) -> torch.Tensor:
    """Sum of the loss over a micro-batch's targets, without gradients, from the last layer's output `hidden` [tokens, hidden]."""
    total = torch.zeros((), device=hidden.device)
    with torch.no_grad():
        for part in targets.chunks(chunk):
            total += loss(token_logprobs(project(hidden[part.index]), part.labels), part)[0]
    return total


def loss_and_gradients(
    project: Project,
    hidden: torch.Tensor,
    targets: Targets,
    loss: Loss,
    scale: float,
    chunk: int,
    parameters: list[torch.Tensor],
    add: Callable[[list[torch.Tensor | None]], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the loss, gradient of `scale` times it with respect to `hidden`), calling `add` with each chunk's parameter gradients."""
    total = torch.zeros((), device=hidden.device)
    grad_hidden = torch.zeros_like(hidden)
    for part in targets.chunks(chunk):
        rows = hidden[part.index].requires_grad_()
        with torch.enable_grad():
            value = loss(token_logprobs(project(rows), part.labels), part)[0]
            grads = torch.autograd.grad(value * scale, [rows, *parameters], allow_unused=True)
        total += value.detach()
        grad_hidden[part.index] = grads[0]
        add(list(grads[1:]))
    return total, grad_hidden

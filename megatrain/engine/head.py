"""The end of the model, a chunk of targets at a time: final norm, LM head, log-probabilities, loss, and back. Logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatrain.losses import Loss, Targets

FP32_TEMPORARY_BYTES = 256 << 20  # the softmax runs in fp32 on as many rows of logits as fit this


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[label] in fp32 from logits of any dtype, without an fp32 copy of the logits.

    Saves the logits and one fp32 number a row; the gradient (one-hot less softmax) comes back in the logits' dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        step = rows_per_piece(logits)
        normalizer = torch.cat([torch.logsumexp(piece.float(), dim=-1) for piece in logits.split(step)])
        ctx.save_for_backward(logits, labels, normalizer)
        return logits.gather(1, labels[:, None]).squeeze(1).float() - normalizer

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, normalizer = ctx.saved_tensors
        step, (grad,) = rows_per_piece(logits), grads
        result = torch.empty_like(logits)
        for start in range(0, len(labels), step):
            rows = slice(start, start + step)
            piece = logits[rows].float().sub_(normalizer[rows, None]).exp_().mul_(-grad[rows, None])
            result[rows] = piece.scatter_add_(1, labels[rows, None], grad[rows, None])
        return result, None


def rows_per_piece(logits: torch.Tensor) -> int:
    return max(1, FP32_TEMPORARY_BYTES // (4 * logits.shape[-1]))


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `labels` [n] under `logits` [n, vocab]; fp32 [n], differentiable in the logits."""
    return TokenLogprobs.apply(logits, labels)  # type: ignore[no-untyped-call, no-any-return]


Project = Callable[[torch.Tensor], torch.Tensor]  # hidden [n, hidden] -> logits [n, vocab]


def loss_sum(project: Project, hidden: torch.Tensor, targets: Targets, loss: Loss, chunk: int) -> torch.Tensor:
    """Sum of the loss over a micro-batch's targets, without gradients. `hidden` is the last layer's output, flattened to [tokens, hidden]."""
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

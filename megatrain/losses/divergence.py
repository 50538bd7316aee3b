"""The divergence of a model's next-token distributions from a teacher's, over both whole
vocabularies: generalised Jensen-Shannon (Agarwal et al., 2024), with names and defaults of TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ConfigError, DataError
from megatrain.losses.logit_rows import compiled, pieces
from megatrain.losses.targets import IGNORE, Targets

TEACHER = "token_teacher"  # a teacher's last hidden states at the targets of a micro-batch


class Distillation:
    """The mean divergence over all targets of a step.

    Micro-batches have the teacher's last hidden states [targets, hidden] (`token_teacher`), on the
    CPU; `project` makes its logits of them, a few targets at a time: neither's exist whole.

    Args:
        beta: 0: the forward divergence, of the model from the teacher as the teacher weighs
            tokens; 1: the reverse one, as the model weighs them; between: Jensen and Shannon's.
        temperature: that both sides' logits are divided by.
    """

    def __init__(self, beta: float = 1.0, temperature: float = 1.0) -> None:
        if not 0 <= beta <= 1:
            raise ConfigError(f"beta: must be 0 to 1, not {beta}")
        self.beta, self.temperature = beta, temperature
        self.teacher: Any = None  # the engine that is asked, where somebody has opened it
        self.project: Callable[[Tensor], Tensor] | None = None  # set while a teacher's head is held

    def denominator(self, batch: Mapping[str, Tensor]) -> float:
        return float((batch["labels"][:, 1:] != IGNORE).sum())

    def __call__(self, logprobs: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum(), {}  # what `values` found

    def values(self, logits: Tensor, targets: Targets, fused: bool) -> Tensor:
        """The divergence at each target, fp32 [n], from the model's logits [n, vocab]."""
        if self.project is None or targets.teacher is None:
            raise DataError(f"a micro-batch has no {TEACHER}, or no teacher's head is held")
        with torch.no_grad():
            theirs = self.project(targets.teacher.to(logits.device, non_blocking=True))
        return divergences(logits, theirs, self.beta, self.temperature, fused)


def divergences(
    logits: Tensor, theirs: Tensor, beta: float, temperature: float, fused: bool = False
) -> Tensor:
    """The divergence of each row, fp32 [n], differentiable at `logits` [n, vocab]. Where the
    teacher's vocabulary is padded to another width, the part that both have counts. fused: compile
    the passes over both, which takes a C compiler."""
    given = logits, theirs, beta, temperature, fused
    return _Divergences.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


class _Divergences(torch.autograd.Function):
    """Forward also computes the gradient, which is rounded once, to the logits' dtype, and written
    over the teacher's logits, which nobody else has."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, theirs: Tensor, beta: float, temperature: float, fused: bool
    ) -> Tensor:
        found = logits.new_empty(len(logits), dtype=torch.float32)
        width, grad = min(logits.shape[1], theirs.shape[1]), theirs
        if (theirs.shape, theirs.dtype) != (logits.shape, logits.dtype):
            grad = torch.zeros_like(logits)
            grad[:, :width] = theirs[:, :width]
        measure = compiled(divergence_) if fused else divergence_
        for rows in pieces(logits, fused):
            both = logits.detach()[rows, :width], grad[rows, :width]
            found[rows] = measure(*both, beta, temperature)
        ctx.save_for_backward(grad)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad.mul_(grads[0].unsqueeze(1).to(grad.dtype)), None, None, None, None


def divergence_(logits: Tensor, theirs: Tensor, beta: float, temperature: float) -> Tensor:
    """The divergence of each row, fp32 [n], of logits [n, vocab]; its gradient at them is written
    over the teacher's."""
    ours = (logits.float() / temperature).log_softmax(1)
    wanted = (theirs.float() / temperature).log_softmax(1)
    found, of_logits = divergence(ours, wanted, beta)
    theirs.copy_(of_logits / temperature)
    return found


def divergence(ours: Tensor, wanted: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(the divergence of each row, fp32 [n]; its gradient at the logits that `ours` are of), from
    both sides' log-probabilities, fp32 [n, vocab]."""
    p, q = ours.exp(), wanted.exp()
    if beta == 0:
        return (q * (wanted - ours)).sum(1), p - q
    if beta == 1:
        found, slope = (p * (ours - wanted)).sum(1), ours - wanted
    else:
        mixed = ((1 - beta) * p + beta * q).log()
        slope = (1 - beta) * (ours - mixed)
        found = beta * (q * (wanted - mixed)).sum(1) + (p * slope).sum(1)
    return found, p * (slope - (p * slope).sum(1, keepdim=True))

"""The divergence of a model's next-token distributions from a teacher's, generalised Jensen-Shannon
(Agarwal et al., 2024) with names and defaults of TRL: over both whole vocabularies, over the
teacher's likeliest tokens, or estimated from the tokens that the model drew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.errors import ConfigError, DataError
from megatrain.losses.logit_rows import compiled, pieces
from megatrain.losses.policy import Policy
from megatrain.losses.targets import IGNORE, Examples, Targets

# a teacher's last hidden states at the targets of a micro-batch, or its `likeliest` tokens there
TEACHER = "token_teacher"
TEACHER_LOGPS = "token_teacher_logps"  # its log-probability of each token
LEAST_LOGP = -1e4  # of an outcome that cannot be: differences are finite


class Distillation:
    """The mean divergence over all targets of a step.

    Micro-batches have the teacher's last hidden states [targets, hidden] (`token_teacher`), on the
    CPU; `project` makes its logits of them, a few targets at a time: neither's exist whole. With
    `teacher_top_k` they have its `likeliest` tokens instead, and both distributions are of these
    and of all others as one.

    Args:
        beta: 0: the forward divergence, of the model from the teacher as the teacher weighs
            tokens; 1: the reverse one, as the model weighs them; between: Jensen and Shannon's.
        temperature: that both sides' logits are divided by.
        teacher_top_k: of its tokens at each target that are known; None: all, by its logits.
    """

    def __init__(
        self, beta: float = 1.0, temperature: float = 1.0, teacher_top_k: int | None = None
    ) -> None:
        if not 0 <= beta <= 1:
            raise ConfigError(f"beta: must be 0 to 1, not {beta}")
        self.beta, self.temperature, self.top_k = beta, temperature, teacher_top_k
        self.teacher: Any = None  # the engine that is asked, where somebody has opened it
        self.project: Callable[[Tensor], Tensor] | None = None  # set while a teacher's head is held
        # with it micro-batches have `row_reference`: where in `kept` an example's targets begin
        self.reference = teacher_top_k is not None
        self.kept: Any = None
        self.width: int | None = None  # of the vocabulary that both have, if not the model's

    def denominator(self, batch: Mapping[str, Tensor]) -> float:
        return float((batch["labels"][:, 1:] != IGNORE).sum())

    def __call__(self, logprobs: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum(), {}  # what `values` found

    def values(self, logits: Tensor, targets: Targets, fused: bool) -> Tensor:
        """The divergence at each target, fp32 [n], from the model's logits [n, vocab]."""
        if targets.teacher is None or (self.project is None and self.top_k is None):
            raise DataError(f"a micro-batch has no {TEACHER}, or no teacher's head is held")
        theirs, ids = targets.teacher.to(logits.device, non_blocking=True), None
        if self.top_k is not None:
            ids, theirs = theirs[:, : self.top_k], theirs[:, self.top_k :].contiguous()
            theirs, logits = theirs.view(torch.float32), logits[:, : self.width]
        elif self.project is not None:
            with torch.no_grad():
                theirs = self.project(theirs)
        return divergences(logits, theirs, self.beta, self.temperature, ids, fused)


@dataclass(frozen=True)
class SampledDistillation(Policy):
    """The reverse divergence at the tokens that the model drew: the advantage of each is the
    teacher's log-probability of it (`token_teacher_logps`) less the model's own, and the loss
    estimates the mean divergence. Held-out rows, which others wrote, are evaluated by `whole`."""

    importance_sampling_correction: bool = False  # the weights that draw are those that learn
    whole: Distillation = field(default_factory=Distillation, compare=False)
    needs: ClassVar[tuple[str, ...]] = ()

    def advantages(self, logprobs: Tensor, examples: Examples) -> Tensor:
        return examples.of_tokens[TEACHER_LOGPS] - logprobs.detach()


def divergence_of(loss: Any) -> Distillation | None:
    """The divergence that a loss is, or that held-out rows are evaluated by; None of others."""
    found = loss.whole if isinstance(loss, SampledDistillation) else loss
    return found if isinstance(found, Distillation) else None


def likeliest(logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """The `top_k` likeliest tokens of each row of `logits` [n, vocab], int32 [n, 2 top_k + 1]:
    their ids, and as bits of fp32 their log-probabilities and that of all others together."""
    parts = []
    for rows in pieces(logits):
        logps = (logits[rows].float() / temperature).log_softmax(1)
        ids = logps.topk(top_k).indices
        found = _outcomes(logps, ids)[0].contiguous()
        parts.append(torch.cat([ids.int(), found.view(torch.int32)], 1))
    return torch.cat(parts)


def _outcomes(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the tokens `ids` [n, k] and of all others together, [n, k + 1]; each
    token's share of the latter, [n, vocab]), from fp32 logits [n, vocab]."""
    others = logits.scatter(1, ids, float("-inf"))
    whole = others.logsumexp(1, keepdim=True)
    found = torch.cat([logits.gather(1, ids), whole], 1).log_softmax(1)
    # without any others all are -inf, and so is the sum
    shares = (others - whole.clamp(min=torch.finfo(whole.dtype).min)).exp_()
    found[:, -1].clamp_(min=LEAST_LOGP)
    return found, shares


def divergences(
    logits: Tensor,
    theirs: Tensor,
    beta: float,
    temperature: float,
    ids: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """The divergence of each row, fp32 [n], differentiable at `logits` [n, vocab], from `theirs`,
    the teacher's, of which as wide a part counts as both have; or with `ids` [n, k] from its
    log-probabilities of these tokens and of all others together, fp32 [n, k + 1]. fused: compile
    the passes over whole distributions, which takes a C compiler."""
    given = logits, theirs, ids, beta, temperature, fused
    return _Divergences.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


class _Divergences(torch.autograd.Function):
    """Forward also computes the gradient, which is rounded once, to the logits' dtype, and written
    over the teacher's logits, which nobody else has."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        theirs: Tensor,
        ids: Tensor | None,
        beta: float,
        temperature: float,
        fused: bool,
    ) -> Tensor:
        found, logits = logits.new_empty(len(logits), dtype=torch.float32), logits.detach()
        if ids is not None:
            grad = torch.zeros_like(logits)
            for rows in pieces(logits):
                at = ids[rows].long()
                ours, of_logits = _outcomes(logits[rows].float() / temperature, at)
                found[rows], of_outcomes = divergence(ours, theirs[rows], beta)
                of_logits.mul_(of_outcomes[:, -1:]).scatter_(1, at, of_outcomes[:, :-1])
                grad[rows] = (of_logits / temperature).to(grad.dtype)
        else:
            width, grad = min(logits.shape[1], theirs.shape[1]), theirs
            if (theirs.shape, theirs.dtype) != (logits.shape, logits.dtype):
                grad = torch.zeros_like(logits)
                grad[:, :width] = theirs[:, :width]
            measure = compiled(divergence_) if fused else divergence_
            for rows in pieces(logits, fused):
                both = logits[rows, :width], grad[rows, :width]
                found[rows] = measure(*both, beta, temperature)
        ctx.save_for_backward(grad)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad.mul_(grads[0].unsqueeze(1).to(grad.dtype)), None, None, None, None, None


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
        mixed = torch.logaddexp(ours + math.log1p(-beta), wanted + math.log(beta))
        slope = (1 - beta) * (ours - mixed)
        found = beta * (q * (wanted - mixed)).sum(1) + (p * slope).sum(1)
    return found, p * (slope - (p * slope).sum(1, keepdim=True))

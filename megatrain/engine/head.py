"""The end of the model, a chunk of targets at a time: final norm, head, log-probabilities (or
scores), loss, and back.

Logits never exist whole, and a chunk's only once: their gradient is written over them. The softmax
runs in fp32: fused without an fp32 copy of the logits, else on a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.products import Sum, SummingInto, add_gradients
from megatrain.losses import Loss, Tally, Targets
from megatrain.losses.sequences import TARGETS

# The fp32 copy of the rows that an unfused softmax takes at a time: an L2 cache's worth.
FP32_TEMPORARY_BYTES = 32 << 20

# Autograd's nodes, by name. A product's gradient needs its factors, never its result.
VIEWS = {"AliasBackward0", "SqueezeBackward1", "UnsafeViewBackward0", "ViewBackward0"}
PRODUCTS = {"AddmmBackward0", "DivBackward0", "MmBackward0", "MulBackward0", "SummedLinearBackward"}

Project = Callable[[Tensor], Tensor]  # hidden [n, hidden] -> logits [n, vocab]
Values = Callable[[Tensor, Tensor, bool], Tensor]  # logits, labels [n], fused -> fp32 [n]


# -- log-probabilities -----------------------------------------------------------------------------


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[label] in fp32; its gradient is rounded once, to the logits' dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, consumed: bool, fused: bool) -> Tensor:
        statistics = logits.new_empty((3, len(labels), 1), dtype=torch.float32)
        measure = compiled(row_statistics) if fused else row_statistics
        for rows in pieces(logits, fused):
            statistics[:, rows] = measure(logits[rows].detach(), labels[rows, None])
        ctx.save_for_backward(logits, labels, statistics)
        ctx.consumed, ctx.fused = consumed, fused
        return statistics[2].squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, (top, total, logprobs) = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        result = logits.detach() if ctx.consumed else logits.detach().clone()
        write = compiled(scaled_softmax_) if ctx.fused else scaled_softmax_
        factor = -grad / total
        for part in pieces(logits, ctx.fused):
            write(result[part], top[part], factor[part])
        of_labels = -grad * logprobs.expm1()  # 1 - p of the label itself, without the cancellation
        rows = torch.arange(len(labels), device=labels.device)
        result[rows, labels] = of_labels.squeeze(1).to(result.dtype)
        return result, None, None, None


# why: decision 0086
def row_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """fp32 [3, n, 1]: each row's largest logit, its sum of exp(logit - largest), and the
    log-probability of its label in `labels` [n, 1]."""
    top = logits.amax(dim=1, keepdim=True).float()
    total = (logits - top).exp_().sum(dim=1, keepdim=True)
    return torch.stack([top, total, logits.gather(1, labels) - top - total.log()])


def scaled_softmax_(logits: Tensor, top: Tensor, factor: Tensor) -> None:
    """Write `factor` [n, 1] times exp(logits - top) over `logits` [n, vocab]."""
    torch.mul((logits - top).exp_(), factor, out=logits)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel, compiled at its first call, and for other numbers of rows."""
    # Variants are not timed against each other: to time one that writes over the logits, torch
    # would save these in pinned host RAM, up to 4 GiB that are never given back.
    return torch.compile(function, options={"triton.autotune_pointwise": False})


def pieces(logits: Tensor, fused: bool = False) -> Iterator[slice]:
    """Slices of rows whose fp32 copy fits FP32_TEMPORARY_BYTES; all rows, without one, if fused."""
    step = max(1, len(logits) if fused else FP32_TEMPORARY_BYTES // (4 * logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))


def token_logprobs(logits: Tensor, labels: Tensor, fused: bool = False) -> Tensor:
    """Log-probabilities of `labels` [n] under `logits` [n, vocab]: fp32 [n], differentiable.

    Logits that a matmul has just made are used up: backward writes their gradient over them.
    `fused` compiles the passes over them, which takes a C compiler.
    """
    consumed = not_needed(logits)
    return TokenLogprobs.apply(logits, labels, consumed, fused)  # type: ignore[no-untyped-call, no-any-return]


def first_scores(scores: Tensor, labels: Tensor, fused: bool = False) -> Tensor:
    """The first of a classifier's scores [n, labels]: fp32 [n], in place of `token_logprobs`."""
    return scores[:, 0].float()


def not_needed(logits: Tensor) -> bool:
    """True if no gradient is computed from the logits themselves, as a softcap's would be, and they
    are not the caller's own leaf."""
    node = logits.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in PRODUCTS


# -- the loss --------------------------------------------------------------------------------------


def tallied(loss: Tensor, metrics: Mapping[str, Tensor]) -> Tally[Tensor]:
    """The sums of a token-wise loss over targets."""
    return Tally({TARGETS: loss}, {name: (TARGETS, value) for name, value in metrics.items()})


@dataclass(frozen=True)
class Head:
    """The final norm and head, on a few targets at a time. Hidden states: [tokens, hidden].

    Attributes:
        chunk: number of targets whose logits exist at a time.
        fused: compile the passes over the logits.
    """

    project: Project
    chunk: int
    fused: bool = False

    def loss_sum(self, hidden: Tensor, targets: Targets, loss: Loss) -> Tally[Tensor]:
        """The loss over a micro-batch's targets without gradients."""
        total = tallied(torch.zeros((), device=hidden.device), {})
        with torch.no_grad():
            for part in targets.chunks(self.chunk):
                logits = self.project(hidden.index_select(0, part.index))
                total.add(tallied(*loss(token_logprobs(logits, part.labels, self.fused), part)))
                del logits  # or they would live until the next chunk's are there
        return total

    def target_values(
        self,
        hidden: Tensor,
        targets: Targets,
        values: Values = token_logprobs,
        *,
        greedy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets (or other `values`), fp32 [n], and, with `greedy`, True for
        each that is the likeliest token, bool [n]."""
        found = hidden.new_zeros(len(targets), dtype=torch.float32)
        likeliest = hidden.new_zeros(len(targets), dtype=torch.bool)
        start = 0
        with torch.no_grad():
            for part in targets.chunks(self.chunk):
                logits = self.project(hidden.index_select(0, part.index))
                place = slice(start, start := start + len(part))
                if greedy:
                    likeliest[place] = logits.argmax(1) == part.labels
                found[place] = values(logits, part.labels, self.fused)
                del logits  # or they would live until the next chunk's are there
        return found, likeliest

    def loss_and_gradients(
        self,
        hidden: Tensor,
        targets: Targets,
        loss: Loss,
        scale: float,
        parameters: Sequence[Tensor],
        sums: Sequence[Sum],
        values: Values = token_logprobs,
    ) -> tuple[Tally[Tensor], Tensor]:
        """The loss over a micro-batch's targets, and the gradient of `scale` times it at `hidden`.

        Args:
            parameters: of the head, a tied embedding's included.
            sums: accumulators of their gradients; linear layers add their weights' directly.
            values: what the loss is computed from.
        """
        total = tallied(torch.zeros((), device=hidden.device), {})
        grad_hidden = torch.zeros_like(hidden)
        for part in targets.chunks(self.chunk):
            rows = hidden.index_select(0, part.index).requires_grad_()
            with torch.enable_grad():
                with SummingInto(parameters, sums):
                    logits = self.project(rows)
                value, metrics = loss(values(logits, part.labels, self.fused), part)
                del logits  # or they would live until the next chunk's are there
                grads = torch.autograd.grad(value * scale, [rows, *parameters], allow_unused=True)
            total.add(tallied(value, metrics).detached())
            grad_hidden.index_copy_(0, part.index, grads[0])
            add_gradients(sums, grads[1:])
            del grads  # as large as the weights, if they were not summed directly
        return total, grad_hidden

"""The end of the model, a chunk of targets at a time: final norm, head, log-probabilities (or
scores), loss, and back.

Logits never exist whole, and a chunk's only once: their gradient is written over them. The softmax
runs in fp32: fused without an fp32 copy of the logits, else on a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.products import Sum, SummingInto, add_gradients
from megatrain.losses import Loss, Tally, Targets
from megatrain.losses.logit_rows import compiled, pieces
from megatrain.losses.sequences import TARGETS

# Autograd's nodes, by name. A product's gradient needs its factors, never its result.
VIEWS = {"AliasBackward0", "SqueezeBackward1", "UnsafeViewBackward0", "ViewBackward0"}
PRODUCTS = {"AddmmBackward0", "DivBackward0", "MmBackward0", "MulBackward0", "SummedLinearBackward"}

Project = Callable[[Tensor], Tensor]  # hidden [n, hidden] -> logits [n, vocab]
Values = Callable[[Tensor, Targets, bool], Tensor]  # logits, their targets, fused -> fp32 [n]


# -- log-probabilities -----------------------------------------------------------------------------


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[label] in fp32; its gradient is rounded once, to the logits' dtype."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, consumed: bool, fused: bool, temperature: float
    ) -> Tensor:
        statistics = logits.new_empty((3, len(labels), 1), dtype=torch.float32)
        measure = compiled(row_statistics) if fused else row_statistics
        for rows in pieces(logits, fused):
            statistics[:, rows] = measure(logits[rows].detach(), labels[rows, None], temperature)
        ctx.save_for_backward(logits, labels, statistics)
        ctx.consumed, ctx.fused, ctx.temperature = consumed, fused, temperature
        return statistics[2].squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, (top, total, logprobs) = ctx.saved_tensors
        grad = grads[0].unsqueeze(1) / ctx.temperature
        result = logits.detach() if ctx.consumed else logits.detach().clone()
        write = compiled(scaled_softmax_) if ctx.fused else scaled_softmax_
        factor = -grad / total
        for part in pieces(logits, ctx.fused):
            write(result[part], top[part], factor[part], ctx.temperature)
        of_labels = -grad * logprobs.expm1()  # 1 - p of the label itself, without the cancellation
        rows = torch.arange(len(labels), device=labels.device)
        result[rows, labels] = of_labels.squeeze(1).to(result.dtype)
        return result, None, None, None, None


# why: decision 0086
def row_statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """fp32 [3, n, 1]: each row's largest logit, its sum of exp((logit - largest) / temperature),
    and the log-probability of its label in `labels` [n, 1]."""
    top = logits.amax(dim=1, keepdim=True).float()
    total = cooled_(logits - top, temperature).exp_().sum(dim=1, keepdim=True)
    of_labels = cooled_(logits.gather(1, labels) - top, temperature)
    return torch.stack([top, total, of_labels - total.log()])


def scaled_softmax_(logits: Tensor, top: Tensor, factor: Tensor, temperature: float) -> None:
    """Write `factor` [n, 1] times exp((logits - top) / temperature) over `logits` [n, vocab]."""
    torch.mul(cooled_(logits - top, temperature).exp_(), factor, out=logits)


def cooled_(differences: Tensor, temperature: float) -> Tensor:
    """`differences` over the temperature, in place: most losses have none, and no further pass."""
    return differences if temperature == 1.0 else differences.div_(temperature)


def row_entropies(logits: Tensor, temperature: float) -> Tensor:
    """fp32 [n]: the entropy of each row's distribution, in nats."""
    probabilities = (logits.float() / temperature).softmax(dim=1)
    return -torch.xlogy(probabilities, probabilities).sum(dim=1)


def token_logprobs(
    logits: Tensor, labels: Tensor, fused: bool = False, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of `labels` [n] under `logits` [n, vocab] over the temperature: fp32 [n],
    differentiable.

    Logits that a matmul has just made are used up: backward writes their gradient over them.
    `fused` compiles the passes over them, which takes a C compiler.
    """
    consumed = not_needed(logits)
    given = logits, labels, consumed, fused, temperature
    return TokenLogprobs.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def token_entropies(
    logits: Tensor, labels: Tensor, fused: bool = False, temperature: float = 1.0
) -> Tensor:
    """Entropy of the distribution that `token_logprobs` takes each label's from: fp32 [n]."""
    measure = compiled(row_entropies) if fused else row_entropies
    return torch.cat([measure(logits[rows], temperature) for rows in pieces(logits, fused)])


def likeliest_tokens(logits: Tensor, labels: Tensor, fused: bool = False) -> Tensor:
    """1 for each of `labels` that is the likeliest token, else 0."""
    return (logits.argmax(1) == labels).float()


def first_scores(scores: Tensor, labels: Tensor, fused: bool = False) -> Tensor:
    """The first of a classifier's scores [n, labels]: fp32 [n], in place of `token_logprobs`."""
    return scores[:, 0].float()


def of_labels(measure: Callable[..., Tensor], **options: Any) -> Values:
    """The values that one of these functions finds for the labels of targets."""
    return lambda logits, targets, fused: measure(logits, targets.labels, fused, **options)


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

    def loss_sum(
        self, hidden: Tensor, targets: Targets, loss: Loss, values: Values | None = None
    ) -> Tally[Tensor]:
        """The loss over a micro-batch's targets without gradients. values: as in
        `loss_and_gradients`."""
        measure = values or of_labels(token_logprobs)
        total = tallied(torch.zeros((), device=hidden.device), {})
        with torch.no_grad():
            for part in targets.chunks(self.chunk):
                logits = self.project(hidden.index_select(0, part.index))
                total.add(tallied(*loss(measure(logits, part, self.fused), part)))
                del logits  # or they would live until the next chunk's are there
        return total

    def target_values(
        self, hidden: Tensor, targets: Targets, *values: Values
    ) -> tuple[Tensor, ...]:
        """Each of `values` of the targets, such as their log-probabilities: fp32 [n], without
        gradients."""
        found = tuple(hidden.new_zeros(len(targets), dtype=torch.float32) for _ in values)
        start = 0
        with torch.no_grad():
            for part in targets.chunks(self.chunk):
                logits = self.project(hidden.index_select(0, part.index))
                place = slice(start, start := start + len(part))
                for of_targets, value in zip(found, values, strict=True):
                    of_targets[place] = value(logits, part, self.fused)
                del logits  # or they would live until the next chunk's are there
        return found

    def loss_and_gradients(
        self,
        hidden: Tensor,
        targets: Targets,
        loss: Loss,
        scale: float,
        parameters: Sequence[Tensor],
        sums: Sequence[Sum],
        values: Values | None = None,
    ) -> tuple[Tally[Tensor], Tensor]:
        """The loss over a micro-batch's targets, and the gradient of `scale` times it at `hidden`.

        Args:
            parameters: of the head, a tied embedding's included.
            sums: accumulators of their gradients; linear layers add their weights' directly.
            values: what the loss is computed from; default: the labels' log-probabilities.
        """
        total = tallied(torch.zeros((), device=hidden.device), {})
        grad_hidden, measure = torch.zeros_like(hidden), values or of_labels(token_logprobs)
        for part in targets.chunks(self.chunk):
            rows = hidden.index_select(0, part.index).requires_grad_()
            with torch.enable_grad():
                with SummingInto(parameters, sums):
                    logits = self.project(rows)
                value, metrics = loss(measure(logits, part, self.fused), part)
                del logits  # or they would live until the next chunk's are there
                grads = torch.autograd.grad(value * scale, [rows, *parameters], allow_unused=True)
            total.add(tallied(value, metrics).detached())
            grad_hidden.index_copy_(0, part.index, grads[0])
            add_gradients(sums, grads[1:])
            del grads  # as large as the weights, if they were not summed directly
        return total, grad_hidden

"""The objective of a step: a loss and its denominators, so that micro-batches add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.engine.head import Values, first_scores, token_logprobs
from megatrain.losses import IGNORE, Examples, Loss, SequenceLoss, Tally
from megatrain.losses.tally import TARGETS
from megatrain.losses.targets import Answers, rows_of
from megatrain.losses.tokens import weighted

AnyLoss = Loss | SequenceLoss
T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: sum of losses over number of targets, of all micro-batches; 0 if there was no target.
        grad_norm: global L2 norm before clipping; None until `step` was called.
        skipped: no update was made, for a non-finite loss or gradient, or for lack of targets.
        stalls_s: seconds that the computation waited, by cause (wait_upload, wait_update,
            wait_download, wait_nvme, and of several ranks wait_exchange, of hosts wait_network).
        metrics: the loss's further metrics, means over the step.
        aux_loss, expert_load_max: as `engine.routing.Balance` has them; None where routers are not
            balanced.
    """

    loss: float
    target_tokens: int
    grad_norm: float | None = None
    skipped: bool = False
    stalls_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    aux_loss: float | None = None
    expert_load_max: float | None = None


@dataclass(frozen=True)
class EvalResult:
    """An evaluation.

    Attributes:
        loss: mean over all targets, or over whatever the loss is averaged over.
        metrics: the loss's further metrics, as means.
        sums, counts: what these are means of.
        answers: of a loss over a whole step, what it was computed from, on the CPU.
    """

    loss: float
    target_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    sums: Tally[float] = field(default_factory=Tally)
    counts: Mapping[str, float] = field(default_factory=dict)
    answers: Answers | None = None


@dataclass(frozen=True)
class Objective:
    """The loss of a step or an evaluation.

    Attributes:
        counts: of each unit of the loss, over all micro-batches.
        target_tokens: that are trained on; of a loss of scores those that have one.
    """

    loss: AnyLoss
    counts: Mapping[str, float]
    target_tokens: int

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to learn from."""
        return not any(self.counts.values())

    @property
    def of_sequences(self) -> SequenceLoss | None:
        """The loss, if it needs the log-probabilities of whole answers first."""
        return self.loss if isinstance(self.loss, SequenceLoss) else None

    @property
    def values(self) -> Values:
        """The function of the head's output and the targets from which the loss is computed."""
        return first_scores if of_scores(self.loss) else token_logprobs

    @property
    def whole_step(self) -> bool:
        """The loss needs all micro-batches of a step at once: a step is one group then."""
        return isinstance(self.loss, SequenceLoss) and self.loss.whole_step

    @property
    def of_tokens(self) -> tuple[Loss, float]:
        """The loss of the pass that has gradients, and what it is multiplied by."""
        if isinstance(self.loss, SequenceLoss):
            return weighted, 1.0
        return self.loss, 1.0 / self.counts[TARGETS]

    def parts(self, micro_batches: Sequence[T]) -> list[Sequence[T]]:
        """The micro-batches that the loss takes at a time: one, or all."""
        return [micro_batches] if self.whole_step else [[one] for one in micro_batches]

    def tally(self, total: Tensor, metrics: Mapping[str, Tensor]) -> Tally[Tensor]:
        """The sums of a token-wise loss as a Tally."""
        found = {name: (TARGETS, value) for name, value in metrics.items()}
        return Tally({TARGETS: total}, found).detached()

    def judge(self, values: Tensor, examples: Examples | None) -> Tally[Tensor]:
        """The sums of a loss over sequences, from `values` [n] of the targets of these examples."""
        assert self.of_sequences is not None and examples is not None
        return self.of_sequences(values, examples)

    def weigh(
        self, values: Sequence[Tensor], judge: Callable[[], Tally[Tensor]]
    ) -> tuple[Tally[Tensor], list[Tensor]]:
        """The sums that `judge` makes of these values, and the derivative of the step's loss at
        each of them."""
        leaves = [of_targets.requires_grad_() for of_targets in values]
        with torch.enable_grad():
            found = judge()
            shares = [s / self.counts[unit] for unit, s in found.loss.items() if self.counts[unit]]
            total = torch.stack(shares).sum()
            # a rank without micro-batches has none
            weights = torch.autograd.grad(total, leaves) if leaves else ()
        return found.detached(), list(weights)

    def mean_loss(self, found: Tally[Tensor] | Tally[float]) -> float:
        """The loss over all micro-batches. Waits for the device."""
        return found.mean_loss(self.counts)

    def metrics(self, found: Tally[Tensor] | Tally[float]) -> dict[str, float]:
        """Its further metrics, as means."""
        means = found.means(self.counts)
        return self.of_sequences.finish(means) if self.of_sequences else means

    def result(self, found: Tally[Tensor], answers: Answers | None = None) -> EvalResult:
        """The result of an evaluation. Waits for the device."""
        sums = found.numbers()
        mean, metrics = self.mean_loss(sums), self.metrics(sums)
        return EvalResult(mean, self.target_tokens, metrics, sums, self.counts, answers)


def joined(results: Sequence[EvalResult], loss: AnyLoss) -> EvalResult:
    """Several sweeps' results as one, equal to that of a single sweep."""
    sums, counts = Tally[float](), Counter[str]()
    for result in results:
        sums.add(result.sums)
        counts.update(result.counts)
    whole = Objective(loss, dict(counts), sum(result.target_tokens for result in results))
    if of_sweeps := [result.answers for result in results if result.answers is not None]:
        answers = Answers.joined(of_sweeps)
        return whole.result(whole.judge(answers.sums, answers.examples), answers)
    mean, metrics = whole.mean_loss(sums), whole.metrics(sums)
    return EvalResult(mean, whole.target_tokens, metrics, sums, whole.counts)


def of_scores(loss: AnyLoss) -> bool:
    """True for a loss of scores, which only a classifier's head gives."""
    return isinstance(loss, SequenceLoss) and loss.of_scores


def counted(loss: AnyLoss, batches: Sequence[Mapping[str, Tensor]]) -> Objective:
    """The objective of a loss over these micro-batches."""
    if not isinstance(loss, SequenceLoss):
        denominator = float(sum(loss.denominator(batch) for batch in batches))
        return Objective(loss, {TARGETS: denominator}, round(denominator))
    counts: Counter[str] = Counter()
    tokens = 0
    for batch in batches:
        counts.update(loss.counts(batch))
        if loss.of_scores:
            tokens += int(rows_of(batch).max()) + 1
        elif loss.trains(batch):
            tokens += int((batch["labels"][:, 1:] != IGNORE).sum())
    return Objective(loss, dict(counts), tokens)

"""What a step minimises: a loss, with what it is divided by, so that micro-batches add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.engine.head import Values, first_scores, token_logprobs
from megatrain.engine.results import EvalResult
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Examples, Loss, SequenceLoss, Tally
from megatrain.losses.tally import TARGETS
from megatrain.losses.targets import Answers, rows_of
from megatrain.losses.tokens import weighted
from megatrain.world import World

AnyLoss = Loss | SequenceLoss
T = TypeVar("T")


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
        """What the loss is computed from, of the head's output and the targets."""
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
        """What the loss is computed from at a time: one micro-batch, or all."""
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
        """What an evaluation has found. Waits for the device."""
        sums = found.numbers()
        mean, metrics = self.mean_loss(sums), self.metrics(sums)
        return EvalResult(mean, self.target_tokens, metrics, sums, self.counts, answers)

    def over_ranks(self, found: Tally[Tensor], world: World) -> Tally[Tensor]:
        """The sums of all ranks, added in their order. Waits for the device, unless it is alone."""
        if world.is_alone:
            return found
        total = Tally[Tensor]()
        loss = {unit: value.cpu() for unit, value in found.loss.items()}
        metrics = {name: (unit, value.cpu()) for name, (unit, value) in found.metrics.items()}
        every = world.every(Tally(loss, metrics))
        for each in every[:1] if self.whole_step else every:  # of a whole step each has all
            total.add(each)
        return total


def agreed(
    objective: Objective, world: World, batches: Sequence[Mapping[str, Tensor]]
) -> Objective:
    """The objective over all ranks' micro-batches, of which these are one's.

    Raises, where ranks share sequences:
        ConfigError: the loss is over sequences.
        DataError: some that share them were given others.
    """
    if world.is_alone:
        return objective
    counts, tokens, shared = Counter[str](), 0, world.pieces > 1
    if shared and objective.of_sequences is not None:
        raise ConfigError(
            f"context_parallel: {world.pieces} does not work with {type(objective.loss).__name__}, "
            "a loss over whole sequences; set 1"
        )
    outline = [(b["input_ids"].shape, int(b["input_ids"].sum())) for b in batches if shared]
    every = world.every((dict(objective.counts), objective.target_tokens, outline))
    firsts = [every[rank - rank % world.pieces] for rank in range(world.size)]
    if any(one[2] != first[2] for one, first in zip(every, firsts, strict=True)):
        raise DataError(
            "ranks that share sequences were given different micro-batches; give all of a "
            "World's team the same"
        )
    for others, targets, _ in every[:: world.pieces]:
        counts.update(others)
        tokens += targets
    return replace(objective, counts=dict(counts), target_tokens=tokens)


def joined(results: Sequence[EvalResult], loss: AnyLoss) -> EvalResult:
    """One result of several sweeps: as if it had been one."""
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

"""Losses over whole answers: of the log-probabilities of all their tokens together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.losses.tally import Tally
from megatrain.losses.targets import IGNORE, Examples, rows_of

REFERENCE = "row_reference"  # log-probability of each example under the reference model


class SequenceLoss(ABC):
    """A loss that needs all tokens of an answer, or of several, before any gradient is known.

    The head runs twice: without gradients for the log-probabilities, and once more with the
    derivative of the loss at each of them. Between the two it sees nothing but those numbers. With
    `of_scores` they are scores, which only a classifier's head gives.
    """

    of_pairs: ClassVar[bool] = True  # example 2k is chosen, 2k + 1 rejected
    of_scores: ClassVar[bool] = False  # of a reward model: one for each example, at its last token
    reference: ClassVar[bool] = False  # micro-batches have `row_reference`
    prompts: ClassVar[bool] = False  # prompts of chosen answers are targets, too
    needs: ClassVar[tuple[str, ...]] = ()  # what else micro-batches say of each example

    @property
    def whole_step(self) -> bool:
        """It is computed from all micro-batches of a step at once, of all ranks, not from each by
        itself. It sees each answer as one target then, with the sum over its tokens."""
        return False

    def trains(self, batch: Mapping[str, Tensor]) -> bool:
        """False for a micro-batch that only has its log-probabilities computed."""
        return True

    @abstractmethod
    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Count the units of a micro-batch, such as {"pairs": 4}. Sums are divided by the
        counts of the whole step."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        """Sums from the log-probabilities [n] of the targets of these examples, or from the
        scores [examples]."""

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, from those that are means."""
        return means


@dataclass(frozen=True)
class Sides:
    """The answers of pairs, example 2k chosen over example 2k + 1.

    sums: fp32 [examples]: log-probability of each answer.
    """

    sums: Tensor
    examples: Examples

    @property
    def chosen(self) -> Tensor:
        return self.sums[0::2]

    @property
    def rejected(self) -> Tensor:
        return self.sums[1::2]

    @cached_property
    def means(self) -> Sides:
        """The same for the mean over each answer's tokens."""
        return Sides(self.sums / self.examples.sizes.clamp(min=1), self.examples)

    @cached_property
    def reference(self) -> Sides:
        """The same of the reference model."""
        return Sides(self.examples.given[REFERENCE].to(self.sums.dtype), self.examples)

    @cached_property
    def over_reference(self) -> Sides:
        """The same for the log-ratio to the reference model."""
        return Sides(self.sums - self.reference.sums, self.examples)


def sides_of(logprobs: Tensor, examples: Examples) -> Sides:
    return Sides(examples.sums(logprobs), examples)


def of_chosen(logprobs: Tensor, examples: Examples) -> Tensor:
    """Sum of the log-probabilities of all targets of chosen examples."""
    return torch.where(examples.of_target % 2 == 0, logprobs, 0.0).sum()


def pair_counts(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Pairs of a micro-batch, and targets of its chosen examples."""
    rows, targets = rows_of(batch), batch["labels"][:, 1:] != IGNORE
    of_chosen = targets & (rows[:, 1:] % 2 == 0)
    return {"pairs": float((int(rows.max()) + 1) // 2), "chosen_targets": float(of_chosen.sum())}


def pair_metrics(sides: Sides, scores: Sides, beta: float) -> dict[str, tuple[str, Tensor]]:
    """TRL's metrics of pairs. scores: what rewards are `beta` times."""
    rewards = beta * scores.chosen.detach(), beta * scores.rejected.detach()
    found = {
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/accuracies": (rewards[0] > rewards[1]).float(),
        "rewards/margins": rewards[0] - rewards[1],
        "logps/chosen": sides.chosen,
        "logps/rejected": sides.rejected,
    }
    return {name: ("pairs", value.sum()) for name, value in found.items()}

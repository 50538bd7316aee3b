"""Losses over whole answers: of the log-probabilities of all their tokens together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from megatrain.losses.targets import IGNORE, Examples, rows_of

TARGETS = "targets"  # what a token-wise loss is averaged over
# Units of metrics that are the largest or smallest value of a step, not sums: how two values are
# combined, tensors without waiting for their device.
EXTREMES = {"max": (torch.maximum, max), "min": (torch.minimum, min)}


Scalar = TypeVar("Scalar", Tensor, float)


@dataclass
class Tally(Generic[Scalar]):
    """Sums over micro-batches, scalars on the device or numbers; what they are divided by is known
    apart.

    Attributes:
        loss: by unit (pairs, targets, ...): the loss of a step is the sum of these, each over the
            number of its unit in the step.
        metrics: by name: (unit, sum), or with a unit of EXTREMES (unit, value).
    """

    loss: dict[str, Scalar] = field(default_factory=dict)
    metrics: dict[str, tuple[str, Scalar]] = field(default_factory=dict)

    def add(self, other: Tally[Scalar]) -> None:
        """Add the sums of another micro-batch or sweep."""
        for unit, value in other.loss.items():
            self.loss[unit] = self.loss[unit] + value if unit in self.loss else value
        for name, (unit, value) in other.metrics.items():
            if name in self.metrics:
                value = combined(unit, self.metrics[name][1], value)
            self.metrics[name] = unit, value

    def numbers(self) -> Tally[float]:
        """The same as numbers. Waits for the device."""
        return self._each(float)

    def detached(self: Tally[Tensor]) -> Tally[Tensor]:
        """The same without graphs."""
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Any], Any]) -> Tally[Any]:
        loss = {unit: change(value) for unit, value in self.loss.items()}
        metrics = {name: (unit, change(value)) for name, (unit, value) in self.metrics.items()}
        return Tally(loss, metrics)

    def mean_loss(self, counts: Mapping[str, float]) -> float:
        """The loss over so many of each unit. Waits for the device."""
        sums = ((unit, float(value)) for unit, value in self.loss.items())
        return sum(value / counts[unit] for unit, value in sums if counts.get(unit))

    def means(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Each metric over the number of its unit; none where there is none of that unit."""
        return {
            name: float(value) / (1 if unit in EXTREMES else counts[unit])
            for name, (unit, value) in self.metrics.items()
            if unit in EXTREMES or counts.get(unit)
        }


def combined(unit: str, one: Any, other: Any) -> Any:
    """The values of two micro-batches as one."""
    if unit not in EXTREMES:
        return one + other
    of_tensors, of_numbers = EXTREMES[unit]
    return of_tensors(one, other) if isinstance(one, Tensor) else of_numbers(one, other)


REFERENCE = "row_reference"  # log-probability of each example under the reference model
ENTROPY = "token_entropy"  # of `Examples.of_tokens`, if the loss asks for it


class SequenceLoss(ABC):
    """A loss that needs all tokens of an answer, or of several, before any gradient is known. The
    head runs twice: without gradients for the log-probabilities, and once more with the derivative
    of the loss at each of them. Between the two it sees nothing but those numbers. With `of_scores`
    they are scores, which only a classifier's head gives."""

    of_pairs: ClassVar[bool] = True  # example 2k is chosen, 2k + 1 rejected
    of_scores: ClassVar[bool] = False  # of a reward model: one for each example, at its last token
    reference: ClassVar[bool] = False  # micro-batches have `row_reference`
    prompts: ClassVar[bool] = False  # prompts of chosen answers are targets, too
    entropies: ClassVar[bool] = False  # the entropy of the distribution at each target is wanted
    temperature: float = 1.0  # which logits are divided by
    needs: ClassVar[tuple[str, ...]] = ()  # what else micro-batches say of each example

    @property
    def whole_step(self) -> bool:
        """It is computed from all micro-batches of a step at once, of all ranks, not from each by
        itself. It sees each answer as one target then, with the sum over its tokens."""
        return False

    def trains(self, batch: Mapping[str, Tensor]) -> bool:
        """False for a micro-batch that only has its log-probabilities computed."""
        return True

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Count the units of a micro-batch: by default its pairs, and targets of its chosen
        examples. Sums are divided by the counts of the whole step."""
        rows, targets = rows_of(batch), batch["labels"][:, 1:] != IGNORE
        of_chosen = targets & (rows[:, 1:] % 2 == 0)
        return {
            "pairs": float((int(rows.max()) + 1) // 2),
            "chosen_targets": float(of_chosen.sum()),
        }

    @abstractmethod
    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        """Sums from the log-probabilities [n] of the targets of these examples, or from the
        scores [examples]."""

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, from those that are means."""
        return means


@dataclass(frozen=True)
class Sides:
    """The answers of pairs, example 2k chosen over example 2k + 1. sums: fp32 [examples]:
    log-probability of each answer."""

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

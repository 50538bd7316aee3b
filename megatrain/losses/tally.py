"""Sums of a loss and its metrics, each by what it is averaged over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

TARGETS = "targets"  # what a token-wise loss is averaged over


Scalar = TypeVar("Scalar", Tensor, float)


@dataclass
class Tally(Generic[Scalar]):
    """Sums over micro-batches, scalars on the device or numbers; what they are divided by is known
    apart.

    Attributes:
        loss: by unit (pairs, targets, ...): the loss of a step is the sum of these, each over the
            number of its unit in the step.
        metrics: by name: (unit, sum).
    """

    loss: dict[str, Scalar] = field(default_factory=dict)
    metrics: dict[str, tuple[str, Scalar]] = field(default_factory=dict)

    def add(self, other: Tally[Scalar]) -> None:
        """Add the sums of another micro-batch or sweep."""
        for unit, value in other.loss.items():
            self.loss[unit] = self.loss[unit] + value if unit in self.loss else value
        for name, (unit, value) in other.metrics.items():
            before = self.metrics.get(name)
            self.metrics[name] = unit, value if before is None else before[1] + value

    def numbers(self) -> Tally[float]:
        """The same as numbers. Waits for the device."""
        loss = {unit: float(value) for unit, value in self.loss.items()}
        found = {name: (unit, float(value)) for name, (unit, value) in self.metrics.items()}
        return Tally(loss, found)

    def detached(self: Tally[Tensor]) -> Tally[Tensor]:
        """The same without graphs."""
        loss = {unit: value.detach() for unit, value in self.loss.items()}
        found = {name: (unit, value.detach()) for name, (unit, value) in self.metrics.items()}
        return Tally(loss, found)

    def mean_loss(self, counts: Mapping[str, float]) -> float:
        """The loss over so many of each unit. Waits for the device."""
        sums = ((unit, float(value)) for unit, value in self.loss.items())
        return sum(value / counts[unit] for unit, value in sums if counts.get(unit))

    def means(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Each metric over the number of its unit; none where there is none of that unit."""
        return {
            name: float(value) / counts[unit]
            for name, (unit, value) in self.metrics.items()
            if counts.get(unit)
        }

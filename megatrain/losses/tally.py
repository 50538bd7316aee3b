"""Sums of a loss and its metrics, each by what it is averaged over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

TARGETS = "targets"  # what a token-wise loss is averaged over


@dataclass
class Tally:
    """Sums over micro-batches, scalars on the device; what they are divided by is known apart.

    Attributes:
        loss: by unit (pairs, targets, ...): the loss of a step is the sum of these, each over the
            number of its unit in the step.
        metrics: by name: (unit, sum).
    """

    loss: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[str, Tensor]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the sums of another micro-batch, without their graphs."""
        for unit, value in other.loss.items():
            found = value.detach()
            self.loss[unit] = self.loss[unit] + found if unit in self.loss else found
        for name, (unit, value) in other.metrics.items():
            before = self.metrics.get(name)
            found = value.detach()
            self.metrics[name] = unit, found if before is None else before[1] + found

    def mean_loss(self, counts: Mapping[str, float]) -> float:
        """The loss over so many of each unit. Waits for the device."""
        sums = ((unit, float(value)) for unit, value in self.loss.items())
        return sum(value / counts[unit] for unit, value in sums if counts[unit])

    def means(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Each metric over the number of its unit; none where there is none of that unit."""
        return {
            name: float(value) / counts[unit]
            for name, (unit, value) in self.metrics.items()
            if counts[unit]
        }

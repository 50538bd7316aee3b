"""What a plan says of the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

WORTH_NAMING = 0.05  # share of a phase's time: it is bound by what it waits for longer than that


@dataclass(frozen=True)
class Timing:
    """A steady step, predicted. Seconds unless said otherwise.

    Attributes:
        phases: update (resident blocks, on the device), forward, head, backward, second backward;
            they add up to the step.
        waits: of the computation: upload, update, download, nvme, exchange or network.
        bound_by: of each phase, where most of its time goes: compute, or one of the waits.
        tokens_per_s: of the data, without padding, on all ranks together.
        tflops: 6 x counted parameters (planner/cost/shape.py) x these, in TFLOP/s of each rank.
        reference_s: of a forward alone over as many tokens, which all rows that the run takes have
            before the first step where a loss refers to the model as it begins; 0: none does.
    """

    seconds: float
    phases: dict[str, float]
    waits: dict[str, float]
    bound_by: dict[str, str]
    tokens_per_s: float
    tflops: float
    reference_s: float = 0.0

    def waits_most_for(self, wait: str) -> bool:
        """True if no other wait takes longer than this one, which is worth naming."""
        seconds = self.waits[wait]
        return seconds == max(self.waits.values()) and seconds > WORTH_NAMING * self.seconds

    @property
    def busy(self) -> float:
        """Share of the step in which the device computes."""
        return 1 - sum(self.waits.values()) / self.seconds

"""Learning-rate schedules: the rate of each update as a plain function of its number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to a peak rate, which is held or decays. decay: maps its progress (0 to 1) to
    the factor that is left (1 to 0); None: held. at_end: decays in a last share of the steps."""

    decay: Callable[[float], float] | None
    at_end: bool = False

    def __call__(
        self,
        step: int,
        *,
        base: float,
        total_steps: int,
        warmup_steps: int,
        min_ratio: float = 0.0,
        decay_share: float = 0.1,
    ) -> float:
        """The rate of update `step`.

        Args:
            step: counts from 0. Update i of a warm-up of w, from 1, has i/w of the peak rate, a
                step sooner than in transformers.
            base: the peak rate.
            min_ratio: the share of `base` (0 to 1) that the decay ends at.
            decay_share: the share of `total_steps` in which an `at_end` schedule decays; a long
                warm-up shortens it.
        """
        start = warmup_steps
        if self.at_end:
            start = max(start, total_steps - round(decay_share * total_steps))
        if self.decay is None or step < start:
            return base * (min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0)
        progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
        return base * (min_ratio + (1.0 - min_ratio) * self.decay(progress))


def _line(progress: float) -> float:
    return 1.0 - progress


# "constant", "linear" and "cosine" (Loshchilov and Hutter, 2017, arXiv:1608.03983) equal
# transformers' after the warm-up. "wsd": warm-up, stable, decay (Hu et al., 2024,
# arXiv:2404.06395).
SCHEDULES = {
    "constant": Schedule(None),
    "linear": Schedule(_line),
    "cosine": Schedule(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress))),
    "wsd": Schedule(_line, at_end=True),
}


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Number of warm-up steps, which may be more than all. warmup: below 1 a share of
    `total_steps`, rounded up as in transformers, else a number of steps. Raises ConfigError."""
    if not 0 <= warmup < math.inf:
        raise ConfigError(
            f"train.warmup: {warmup!r} is out of range; give a share below 1 or a number of steps"
        )
    if warmup < 1:
        return math.ceil(warmup * total_steps)
    if warmup != int(warmup):
        raise ConfigError(
            f"train.warmup: {warmup!r} is neither a share (below 1) nor a whole number of steps"
        )
    return int(warmup)

"""Learning-rate schedules: the rate of each update as a plain function of its number.

All have one signature and return the rate of update `step`, which counts from 0: so with a warm-up the first update
has rate 0, as in transformers, whose linear and cosine schedules these equal. `base` is the peak rate, `min_ratio` what is left
of it at the end as a share (0 to 1). `decay_share` is the share of all steps in which WSD decays.
"""

from __future__ import annotations

import math
from typing import Protocol

from megatrain.errors import ConfigError


class Schedule(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        step: int,
        *,
        base: float,
        total_steps: int,
        warmup_steps: int,
        min_ratio: float = 0.0,
        decay_share: float = 0.1,
    ) -> float: ...


def constant(
    step: int,
    *,
    base: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_share: float = 0.1,
) -> float:
    """Warm-up, then `base`."""
    return base * warmup_factor(step, warmup_steps)


def linear(
    step: int,
    *,
    base: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_share: float = 0.1,
) -> float:
    """Warm-up, then a straight line to `min_ratio * base` at `total_steps`."""
    if step < warmup_steps:
        return base * warmup_factor(step, warmup_steps)
    return base * above_floor(1.0 - progress(step, warmup_steps, total_steps), min_ratio)


def cosine(
    step: int,
    *,
    base: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_share: float = 0.1,
) -> float:
    """Warm-up, then half a cosine wave to `min_ratio * base` at `total_steps` (Loshchilov and Hutter, 2017, arXiv:1608.03983)."""
    if step < warmup_steps:
        return base * warmup_factor(step, warmup_steps)
    return base * above_floor(
        0.5 * (1.0 + math.cos(math.pi * progress(step, warmup_steps, total_steps))), min_ratio
    )


def wsd(
    step: int,
    *,
    base: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float = 0.0,
    decay_share: float = 0.1,
) -> float:
    """Warm-up, stable at `base`, then a straight line to `min_ratio * base` (Hu et al., 2024, arXiv:2404.06395)."""
    decay_from = max(
        warmup_steps, total_steps - round(decay_share * total_steps)
    )  # a long warm-up shortens the decay
    if step < decay_from:
        return base * warmup_factor(step, warmup_steps)
    return base * above_floor(1.0 - progress(step, decay_from, total_steps), min_ratio)


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
}


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Number of warm-up steps: `warmup` below 1 is a share of `total_steps` (rounded up, as transformers does), else a number of steps.

    Raises ConfigError if it is negative or neither a share nor whole. More warm-up than steps is allowed: the peak is not reached then.
    """
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


def warmup_factor(step: int, warmup_steps: int) -> float:
    """0 at step 0, growing evenly to 1 at `warmup_steps`, then 1."""
    return min(1.0, step / max(1, warmup_steps)) if warmup_steps else 1.0


def progress(step: int, start: int, stop: int) -> float:
    """How far `step` is from `start` (0) to `stop` (1), kept between them."""
    return min(1.0, max(0.0, (step - start) / max(1, stop - start)))


def above_floor(factor: float, min_ratio: float) -> float:
    """`factor` (0 to 1) mapped onto `min_ratio` to 1."""
    return min_ratio + (1.0 - min_ratio) * factor

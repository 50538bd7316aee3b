"""Advantages of answers from their rewards, as TRL 1.16's GRPOTrainer has them, in float64.

Sources: DeepSeekMath (arXiv:2402.03300) for a group's baseline, Dr. GRPO (2503.20783) for
`scale_rewards="none"`, GDPO (2601.05242) for "normalize_then_sum".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EPSILON = 1e-4  # added to deviations
ROUNDING = 1e-12  # how far apart rewards may be, relative to the largest, and still be equal


@dataclass(frozen=True)
class Advantages:
    """The worth of each answer beside the others.

    Attributes:
        values: float64 [answers]; 0 for an answer that no function judged.
        rewards: float64 [answers], the weighted sum over functions; nan where none judged.
        without_signal: bool [answers], true where the advantage is 0 because the group's rewards
            are equal, or because no function judged the answer.
        metrics: TRL's, of all answers.
    """

    values: Array
    rewards: Array
    without_signal: npt.NDArray[np.bool_]
    metrics: dict[str, float]


def advantages(
    of_functions: Array,
    names: Sequence[str],
    weights: Sequence[float] | None,
    answers: int,
    *,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
) -> Advantages:
    """Advantages of groups of `answers`, one after the other.

    of_functions: float64 [answers of all groups, functions], nan where a function gave None.
    scale_rewards: "group", "batch" or "none".
    """
    unjudged = np.isnan(of_functions).all(1)
    weigh = np.ones(len(names)) if weights is None else np.array(weights)

    def summed(values: Array) -> Array:
        found: Array = np.where(unjudged, np.nan, np.nansum(values * weigh, 1))
        return found

    rewards = compared = summed(of_functions)
    groups = rewards.reshape(-1, answers)
    means, deviations = _mean(groups), _deviation(groups)
    deviation = np.repeat(deviations, answers)
    if aggregation == "sum_then_normalize":
        if scale_rewards == "batch":
            deviation = np.full_like(rewards, _deviation(rewards))
        values = rewards - np.repeat(means, answers)
        if scale_rewards != "none":
            values = values / (deviation + EPSILON)
    else:
        by_group = of_functions.reshape(-1, answers, len(names)).swapaxes(1, 2)
        scaled = by_group - _mean(by_group)[..., None]
        scaled = scaled / (_deviation(by_group)[..., None] + EPSILON)
        compared = summed(scaled.swapaxes(1, 2).reshape(of_functions.shape))
        deviation = np.full_like(rewards, _deviation(compared))
        values = (compared - _mean(compared)) / (deviation + EPSILON)
    values = np.nan_to_num(values, nan=0.0)
    silent = unjudged | _equal(compared.reshape(-1, answers))
    values[silent] = 0.0  # a rounding error divided by EPSILON is no signal
    return Advantages(
        values,
        rewards,
        silent,
        _metrics(of_functions, names, rewards, deviation),
    )


def _metrics(
    of_functions: Array, names: Sequence[str], rewards: Array, deviation: Array
) -> dict[str, float]:
    found = {"reward": float(_mean(rewards)), "reward_std": float(_deviation(rewards))}
    for name, column in zip(names, of_functions.T, strict=True):
        found[f"rewards/{name}/mean"] = float(_mean(column))
        found[f"rewards/{name}/std"] = float(_deviation(column))
    found["frac_reward_zero_std"] = float(np.isclose(deviation, 0).mean())
    return found


def _equal(groups: Array) -> npt.NDArray[np.bool_]:
    """[answers]: whether what is judged of the group [groups, answers] is equal."""
    judged = ~np.isnan(groups)
    highest = np.max(groups, 1, initial=-np.inf, where=judged)
    lowest = np.min(groups, 1, initial=np.inf, where=judged)
    largest = np.max(np.abs(groups), 1, initial=1.0, where=judged)
    return np.repeat(highest - lowest <= ROUNDING * largest, groups.shape[1])


def _divided(above: Array, below: npt.NDArray[np.int64]) -> Array:
    """nan where there is nothing to divide by."""
    found: Array = above / np.where(below > 0, below, np.nan)
    return found


def _mean(values: Array) -> Array:
    """Over the last axis, without nan; nan where there is nothing else."""
    return _divided(np.nansum(values, -1), np.asarray((~np.isnan(values)).sum(-1)))


def _deviation(values: Array) -> Array:
    """The unbiased standard deviation over the last axis, without nan; nan of fewer than two, but 0
    where the axis has one."""
    if values.shape[-1] == 1:
        return np.zeros(values.shape[:-1])
    squares = np.nansum((values - _mean(values)[..., None]) ** 2, -1)
    return np.sqrt(_divided(squares, np.asarray((~np.isnan(values)).sum(-1)) - 1))

"""Advantages of answers from their rewards, as TRL 1.16's GRPOTrainer has them, in float64.

Sources: DeepSeekMath (arXiv:2402.03300) for a group's baseline, Dr. GRPO (2503.20783) for
`scale_rewards="none"`, GDPO (2601.05242) for "normalize_then_sum".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    multi_objective_aggregation: str = "sum_then_normalize",
    **_: Any,
) -> Advantages:
    """Advantages of groups of `answers`, one after the other.

    of_functions: float64 [answers of all groups, functions], nan where a function gave None.
    scale_rewards: "group", "batch" or "none".
    """
    rewards = compared = _summed(of_functions, of_functions, weights)
    groups = rewards.reshape(-1, answers)
    means, deviations = _mean(groups), _deviation(groups)
    deviation = np.repeat(deviations, answers)
    if multi_objective_aggregation == "sum_then_normalize":
        if scale_rewards == "batch":
            deviation = np.full_like(rewards, _deviation(rewards))
        values = rewards - np.repeat(means, answers)
        if scale_rewards != "none":
            values = values / (deviation + EPSILON)
    else:
        by_group = of_functions.reshape(-1, answers, len(names)).swapaxes(1, 2)
        scaled = by_group - _mean(by_group)[..., None]
        scaled = scaled / (_deviation(by_group)[..., None] + EPSILON)
        scaled = scaled.swapaxes(1, 2).reshape(of_functions.shape)
        compared = _summed(scaled, of_functions, weights)
        deviation = np.full_like(rewards, _deviation(compared))
        values = (compared - _mean(compared)) / (deviation + EPSILON)
    return _judged(values, compared, answers, of_functions, names, rewards, deviation)


def leave_one_out(
    of_functions: Array,
    names: Sequence[str],
    weights: Sequence[float] | None,
    answers: int,
    *,
    normalize_advantages: bool = False,
    reward_clip_range: Sequence[float] | None = None,
    beta: float = 0.0,
    divergences: Array | None = None,
    **_: Any,
) -> Advantages:
    """The same by RLOOTrainer: each reward less the mean of the group's others. Rewards are less
    `beta` times an answer's divergence from the reference, float64 [answers]."""
    rewards = _summed(of_functions, of_functions, weights)
    low, high = reward_clip_range or (-np.inf, np.inf)
    clipped: Array = np.clip(rewards, low, high)
    if divergences is not None:
        clipped = clipped - beta * divergences
    groups = clipped.reshape(-1, answers)
    others = np.nansum(groups, 1, keepdims=True) - groups
    count = (~np.isnan(groups)).sum(1, keepdims=True) - 1
    values = (groups - others / np.where(count > 0, count, np.nan)).reshape(-1)
    if normalize_advantages:
        values = (values - _mean(values)) / (_deviation(values) + EPSILON)
    deviation = np.repeat(_deviation(groups), answers)
    silent = None if normalize_advantages else clipped
    return _judged(values, silent, answers, of_functions, names, rewards, deviation)


# Each takes all keys of its method's section.
OF_METHODS: dict[str, Callable[..., Advantages]] = {"grpo": advantages, "rloo": leave_one_out}


def _summed(values: Array, of_functions: Array, weights: Sequence[float] | None) -> Array:
    """[answers]: the weighted sum over functions, nan where none judged."""
    weigh = np.ones(values.shape[1]) if weights is None else np.array(weights)
    unjudged = np.isnan(of_functions).all(1)
    found: Array = np.where(unjudged, np.nan, np.nansum(values * weigh, 1))
    return found


def _judged(
    values: Array,
    compared: Array | None,
    answers: int,
    of_functions: Array,
    names: Sequence[str],
    rewards: Array,
    deviation: Array,
) -> Advantages:
    """compared: what has no signal where it is equal in a group; None: anything has."""
    values = np.nan_to_num(values, nan=0.0)
    silent: Any = np.isnan(of_functions).all(1)
    if compared is not None:
        silent |= _equal(compared.reshape(-1, answers))
    values[silent] = 0.0  # a rounding error divided by EPSILON is no signal
    metrics = {"reward": float(_mean(rewards)), "reward_std": float(_deviation(rewards))}
    for name, column in zip(names, of_functions.T, strict=True):
        metrics[f"rewards/{name}/mean"] = float(_mean(column))
        metrics[f"rewards/{name}/std"] = float(_deviation(column))
    metrics["frac_reward_zero_std"] = float(np.isclose(deviation, 0).mean())
    return Advantages(values, rewards, silent, metrics)


def _equal(groups: Array) -> npt.NDArray[np.bool_]:
    """[answers]: whether what is judged of the group [groups, answers] is equal."""
    judged: Any = np.ma.masked_invalid(groups)
    spread, largest = judged.max(1) - judged.min(1), np.maximum(abs(judged).max(1), 1.0)
    return np.repeat(np.ma.filled(spread <= ROUNDING * largest, True), groups.shape[1])


def _mean(values: Array) -> Array:
    """Over the last axis, without nan; nan where there is nothing else."""
    found: Array = np.ma.filled(np.ma.masked_invalid(values).mean(-1), np.nan)
    return found


def _deviation(values: Array) -> Array:
    """The unbiased standard deviation over the last axis, without nan; nan of fewer than two, but 0
    where the axis has one."""
    if values.shape[-1] == 1:
        return np.zeros(values.shape[:-1])
    found: Array = np.ma.filled(np.ma.masked_invalid(values).std(-1, ddof=1), np.nan)
    return found

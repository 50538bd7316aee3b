"""Choice of the best evaluation, and the patience with which a run waits for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatrain.config import Config
from megatrain.config.sections import EVAL_LOSS
from megatrain.errors import ConfigError

Figures = dict[str, float]  # of an evaluation, as metrics.jsonl names them


def greater_is_better(config: Config) -> bool:
    """Direction of `checkpoint.metric`."""
    checkpoint = config.checkpoint
    if checkpoint.greater_is_better != "auto":
        return checkpoint.greater_is_better
    return not checkpoint.metric.endswith("loss")


def check_metric(config: Config, found: Figures | None) -> None:
    """Raise ConfigError if the first evaluation lacks the figure by which the best is chosen."""
    metric = config.checkpoint.metric
    if metric != EVAL_LOSS and metric not in (found or {}):
        known = ", ".join(found or ["none"])
        raise ConfigError(
            f"{config.where('checkpoint.metric')}: evaluations of this run have no {metric}; "
            f"they have {known}"
        )


def is_better(config: Config, found: Figures | None, best: Mapping[str, Any]) -> bool:
    """True for an evaluation that beats `best`: the metric's value by its name, empty at first.

    The evaluation before the first step does not become `best`: no checkpoint has its weights.
    """
    metric = config.checkpoint.metric
    value = (found or {}).get(metric)
    if value is None or not math.isfinite(value):
        return False
    before: float | None = best.get(metric)
    if before is None:
        return True
    return value > before if greater_is_better(config) else value < before


def out_of_patience(config: Config, waited: int) -> bool:
    """True if `waited` evaluations in a row without a better one end the run."""
    patience = config.checkpoint.patience
    return patience is not None and waited >= patience

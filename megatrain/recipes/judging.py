"""Which evaluation is the best, and when a run has waited long enough for a better one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.config.evaluating import EVAL_LOSS
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.recipes.loop import Run

logger = logging.getLogger("megatrain")

Figures = dict[str, float]  # of an evaluation, as metrics.jsonl names them


def greater_is_better(config: Config, of_tasks: Mapping[str, bool]) -> bool:
    """Whether more of `checkpoint.metric` is better. of_tasks: what tasks say of their figures."""
    checkpoint = config.checkpoint
    if checkpoint.greater_is_better != "auto":
        return checkpoint.greater_is_better
    # a filter's name may follow that of the metric
    alike = [name for name in of_tasks if f"{checkpoint.metric}_".startswith(f"{name}_")]
    if alike:
        return of_tasks[max(alike, key=len)]
    return not checkpoint.metric.endswith("loss")


def check_metric(run: Run, found: Figures | None) -> None:
    """Raise ConfigError if the first evaluation lacks the figure by which the best is chosen."""
    metric = run.config.checkpoint.metric
    if metric != EVAL_LOSS and metric not in (found or {}):
        known = ", ".join(found or ["none"])
        raise ConfigError(
            f"{run.config.where('checkpoint.metric')}: evaluations of this run have no {metric}; "
            f"they have {known}"
        )


def better(run: Run, found: Figures | None) -> bool:
    """Whether an evaluation is the best so far: then the step is saved, and `best` points to it.

    That of the weights that a run begins with does not count: they lie elsewhere.
    """
    metric = run.config.checkpoint.metric
    value: float | None = (found or {}).get(metric)
    if value is None or not math.isfinite(value):
        return False
    before: float | None = run.best.get(metric)
    if before is None:
        return True
    return value > before if run.greater_is_better else value < before


def out_of_patience(run: Run, found: Figures | None) -> bool:
    """Count evaluations that were not better; say so when they are as many as may be."""
    if run.config.checkpoint.metric not in (found or {}):
        return False
    run.waited = 0 if better(run, found) else run.waited + 1
    if not without_patience(run):
        return False
    logger.info(
        f"step {run.step}: the last {run.waited} evaluations were not better than step "
        f"{run.best.get('step')}; training ends (checkpoint.patience)"
    )
    return True


def without_patience(run: Run) -> bool:
    """Whether evaluations were no better so often that training ends, or has ended before."""
    patience = run.config.checkpoint.patience
    return patience is not None and run.waited >= patience

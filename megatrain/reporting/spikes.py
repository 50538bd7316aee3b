"""Losses and gradient norms far above those of recent steps: a sign of a bad batch or rate.

The rule: more than `TIMES` the median of the last `WINDOW` steps that had targets, and more than
`TIMES_HIGH` what nine in ten of them reach; none is looked for before `ENOUGH` such steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

WINDOW = 64
ENOUGH = 16
TIMES = {"loss": 2.0, "grad_norm": 10.0}
TIMES_HIGH = 1.5
WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}


class Spikes:
    """Compares each step with those before it, resumed ones included."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """rows: of `metrics.jsonl`, up to the step that the run goes on from."""
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in TIMES}
        for row in rows:
            if row.get("target_tokens"):
                self.look(row["loss"], row["grad_norm"])

    def look(self, loss: float | None, grad_norm: float | None) -> list[str]:
        """What is far above the recent median, in words; the step then counts among the recent.

        None, NaN and infinities are no spikes: such a step is skipped.
        """
        found = []
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if value is None or not math.isfinite(value):
                continue
            recent = self._recent[name]
            if len(recent) >= ENOUGH:
                median, high = statistics.median(recent), sorted(recent)[9 * len(recent) // 10]
                if value > max(TIMES[name] * median, TIMES_HIGH * high):
                    found.append(f"{WORDS[name]} {value:.4g} is far above the median {median:.4g}")
            recent.append(value)
        return found

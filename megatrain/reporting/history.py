"""A run's `metrics.jsonl` for its report, thinned while it is read: memory and page do not grow."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatrain.reporting.metrics import RECENT_STEPS, StepTime, each_metric

BUCKETS = 350  # of a line, before neighbours are merged: a chart is some hundred pixels wide
MEANS = 60  # of a line, at least
NAMED = 12  # skipped steps
# Fields that are no figure of a step's own, or are summed up.
NOT_DRAWN = {"step", "tokens", "target_tokens", "epoch", "step_s", "energy_j"}
NOT_DRAWN |= {"eval_target_tokens", "eval_s", "skipped", "spike"}
SUMMED = ("tokens", "step_s", "energy_j")

Row = dict[str, Any]
Point = tuple[Any, ...]  # (step, value, what goes with it)
VALUE = itemgetter(1)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring points: the smallest and the largest value, the sum and the count."""

    low: Point
    high: Point
    total: float
    count: int

    def joined(self, other: Bucket) -> Bucket:
        low, high = min(self.low, other.low, key=VALUE), max(self.high, other.high, key=VALUE)
        return Bucket(low, high, self.total + other.total, self.count + other.count)


class Line:
    """Points in the order of steps: all while they are few, else the extremes of each bucket."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._size = 1  # points of a full bucket
        self._buckets: list[Bucket] = []
        self._ends: list[Point] = []  # the first and the last point

    def add(self, step: int, value: float, *also: object) -> None:
        """also: kept with the value."""
        point = (step, value, *also)
        self._ends = [*self._ends[:1], point]
        new, buckets = Bucket(point, point, value, 1), self._buckets
        if buckets and buckets[-1].count < self._size:
            buckets[-1] = buckets[-1].joined(new)
        else:
            buckets.append(new)
        if len(buckets) == 2 * self._most and buckets[-1].count == self._size:
            pairs = zip(buckets[::2], buckets[1::2], strict=True)
            self._buckets = [left.joined(right) for left, right in pairs]
            self._size *= 2

    def points(self) -> list[Point]:
        kept = [point for bucket in self._buckets for point in (bucket.low, bucket.high)]
        by_step = {point[0]: point for point in [*kept, *self._ends]}
        return [by_step[step] for step in sorted(by_step)]

    def trend(self) -> tuple[int, list[Point]]:
        """(points of each mean, the means at their middle steps); none of a short line."""
        full = [bucket for bucket in self._buckets if bucket.count == self._size]
        each = len(full) // MEANS
        if each < 2:
            return 0, []
        means = []
        for at in range(len(full) % each, len(full), each):
            total = sum(bucket.total for bucket in full[at : at + each])
            means.append((full[at + each // 2].low[0], total / (each * self._size)))
        return each * self._size, means


class History:
    """The figures of a run, row by row. buckets: of a line."""

    def __init__(self, rows: Iterable[Row] = (), buckets: int = BUCKETS) -> None:
        self.lines: dict[str, Line] = defaultdict(lambda: Line(buckets))
        self.shares = Line(buckets)  # of a step's time: (step, computing, all by name)
        self.totals: dict[str, Any] = defaultdict(int)
        self.time: dict[str, float] = defaultdict(float)  # seconds by name, as in StepTime
        self.recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.step = 0
        self.skipped: list[int] = []  # the first ones
        self.newest: Row = {}  # step's row
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take in a line of metrics.jsonl; steps come in order."""
        step = self.step = row["step"]
        for name, value in row.items():
            if name not in NOT_DRAWN and isinstance(value, float | int):
                self.lines[name].add(step, value)
        if "step_s" not in row:
            return
        self.newest = row
        self.recent_s.append(row["step_s"])
        for name in SUMMED:
            if row.get(name) is not None:  # energy of which nothing is known is not 0
                self.totals[name] += row[name]
        for name, seconds in (row.get("time") or {}).items():
            self.time[name] += seconds
        if shares := row.get("shares"):
            self.shares.add(step, shares.get("compute", 0.0), shares)
        if row.get("skipped"):
            self.totals["skipped"] += 1
            self.skipped = [*self.skipped, step][:NAMED]
        if row.get("spike") and row.get("loss") is not None:
            self.lines["spike"].add(step, row["loss"])

    @property
    def median_s(self) -> float | None:
        """Median time of the latest steps."""
        return statistics.median(self.recent_s) if self.recent_s else None

    @property
    def step_time(self) -> StepTime:
        """Time of all steps together."""
        return StepTime(**{name: self.time.get(name, 0.0) for name in vars(StepTime())})

    def values(self, name: str) -> list[float]:
        """Values of a line, as far as they are kept."""
        return [point[1] for point in self.lines[name].points()] if name in self.lines else []


def read_history(run_dir: Path, buckets: int = BUCKETS) -> History:
    """Read the history of a run folder. Raises StorageError."""
    return History(each_metric(run_dir), buckets)

"""What a report draws of `metrics.jsonl`: figures over steps, thinned while they are read, so that
a run of any length takes the same memory and page."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatrain.reporting.metrics import RECENT_STEPS, StepTime, each_metric, read_metrics

BUCKETS = 350  # of a line, before neighbours are merged: a chart is some hundred pixels wide
MEANS = 60  # of a line, at least
NAMED = 12  # skipped steps
# Fields that are no figure of a step's own, or are summed up.
NOT_DRAWN = {"step", "tokens", "target_tokens", "epoch", "step_s", "energy_j"}
NOT_DRAWN |= {"eval_target_tokens", "eval_s", "skipped", "spike"}
SUMMED = ("tokens", "step_s", "energy_j")

Row = dict[str, Any]
Point = tuple[Any, ...]  # (step, value, what goes with it)


class Line:
    """Points in the order of steps. Every one is kept until there are many; then the smallest and
    the largest of each bucket of neighbours, and the first and the last."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._buckets: list[list[Point]] = []
        self._sums: list[float] = []  # of their values, also of those that are not kept
        self._size = 1  # points of a bucket
        self._newest: list[Point] = []  # of the bucket that is being filled
        self._first: Point = ()
        self._last: Point = ()

    def add(self, step: int, value: float, *also: object) -> None:
        """also: what goes with the value, and is kept where it is."""
        self._last = point = (step, value, *also)
        self._first = self._first or point
        self._newest.append(point)
        if len(self._newest) < self._size:
            return
        self._buckets.append(extremes(self._newest))
        self._sums.append(sum(point[1] for point in self._newest))
        self._newest = []
        if len(self._buckets) == 2 * self._most:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [extremes([*left, *right]) for left, right in pairs]
            self._sums = [sum(self._sums[at : at + 2]) for at in range(0, len(self._sums), 2)]
            self._size *= 2

    def points(self) -> list[Point]:
        kept = [point for bucket in self._buckets for point in bucket]
        kept += extremes(self._newest) if self._newest else []
        kept += [self._first, self._last] if self._first else []
        return sorted({point[0]: point for point in kept}.values(), key=itemgetter(0))

    def trend(self) -> tuple[int, list[Point]]:
        """(values of each, means of neighbours at the middle ones' step); a short line has none."""
        each = len(self._sums) // MEANS
        if each < 2:
            return 0, []
        begins = range(len(self._sums) % each, len(self._sums), each)
        middles = (self._buckets[at + each // 2][0][0] for at in begins)
        means = (sum(self._sums[at : at + each]) / (each * self._size) for at in begins)
        return each * self._size, [*zip(middles, means, strict=True)]


def extremes(points: list[Point]) -> list[Point]:
    """The smallest and the largest, in order."""
    if len(points) == 1:
        return points
    low, high = min(points, key=itemgetter(1)), max(points, key=itemgetter(1))
    return [low, high] if low[0] < high[0] else [high, low] if low[0] > high[0] else [low]


class History:
    """The figures of a run, row by row. buckets: of a line."""

    def __init__(self, rows: Iterable[Row] = (), buckets: int = BUCKETS) -> None:
        self._most = buckets
        self.lines: dict[str, Line] = {}
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
        """A line of metrics.jsonl; of a step that comes after all steps so far."""
        step = self.step = row["step"]
        for name, value in row.items():
            if name not in NOT_DRAWN and isinstance(value, float | int):
                self._add(name, step, value)
        if "step_s" not in row:
            return
        self.newest = row
        self.recent_s.append(row["step_s"])
        for name in SUMMED:
            if row.get(name) is not None:
                self.totals[name] += row[name]
        for name, seconds in (row.get("time") or {}).items():
            self.time[name] += seconds
        if shares := row.get("shares"):
            self.shares.add(step, shares.get("compute", 0.0), shares)
        if row.get("skipped"):
            self.totals["skipped"] += 1
            self.skipped = [*self.skipped, step][:NAMED]
        if row.get("spike") and row.get("loss") is not None:
            self._add("spike", step, row["loss"])

    def _add(self, name: str, step: int, value: float) -> None:
        if name not in self.lines:
            self.lines[name] = Line(self._most)
        self.lines[name].add(step, value)

    @property
    def median_s(self) -> float | None:
        """Of the latest steps."""
        return statistics.median(self.recent_s) if self.recent_s else None

    @property
    def step_time(self) -> StepTime:
        """All steps together."""
        return StepTime(**{name: self.time.get(name, 0.0) for name in vars(StepTime())})

    def values(self, name: str) -> list[float]:
        """Of a line, as far as they are kept."""
        return [point[1] for point in self.lines[name].points()] if name in self.lines else []


def read_history(run_dir: Path, buckets: int = BUCKETS) -> History:
    """The history of a run folder. Raises StorageError.

    Steps that a file has twice, as one that a crash left or that was put together does, count as
    they were taken last.
    """
    try:
        return History(_in_order(each_metric(run_dir)), buckets)
    except _OutOfOrderError:
        return History(_last_taken(read_metrics(run_dir)), buckets)


class _OutOfOrderError(Exception):
    pass


def _place(row: Row) -> tuple[int, bool]:
    return row["step"], "step_s" not in row  # a step's evaluations come after it


def _in_order(rows: Iterable[Row]) -> Iterator[Row]:
    before = (-1, False)
    for row in rows:
        place = _place(row)
        if place < before or (place == before and not place[1]):
            raise _OutOfOrderError
        before = place
        yield row


def _last_taken(rows: Iterable[Row]) -> list[Row]:
    kept: list[Row] = []
    for row in rows:
        place = _place(row)
        while kept and (_place(kept[-1]) > place or (_place(kept[-1]) == place and not place[1])):
            kept.pop()
        kept.append(row)
    return kept

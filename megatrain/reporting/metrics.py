"""`metrics.jsonl` of a run, an object for each step and evaluation; spikes; `samples.jsonl`."""

from __future__ import annotations

import json
import math
import os
import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from megatrain.errors import logger, system_errors

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
# Not through a link that somebody else may have put there.
NO_FIGURES: Mapping[str, float] = {}
APPENDED = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
RECENT_STEPS = 20  # behind rates, time left and advice: steady enough to read, and soon to notice
SHARE_DIGITS = 4
Row = dict[str, Any]  # a line


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's seconds. They add up to the step: what is hidden is not counted."""

    compute: float = 0.0  # blocks being computed, and everything not named below
    wait_upload: float = 0.0  # compute stood still for weights on their way to the GPU
    wait_update: float = 0.0  # an upload stood still for the optimizer on the host
    wait_download: float = 0.0  # compute stood still for a gradient staging buffer
    wait_nvme: float = 0.0  # compute, or the update that it waited for, stood still for NVMe
    wait_exchange: float = 0.0  # compute stood still for other ranks' shares of weights or sums
    wait_network: float = 0.0  # the same of other hosts': weights, and sums on both ways
    data: float = 0.0  # the loop stood still for its next rows
    rollout: float = 0.0  # the model wrote answers
    reward: float = 0.0  # the loop stood still for the rewards of the last of them

    @classmethod
    def of(cls, step_s: float, waits_s: Mapping[str, float]) -> StepTime:
        """A step of `step_s` seconds with these waits (by the names above); the rest computes."""
        return cls(compute=max(0.0, step_s - sum(waits_s.values())), **waits_s)

    def __add__(self, other: StepTime) -> StepTime:
        names = (field.name for field in fields(self))
        return StepTime(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def total_s(self) -> float:
        return sum(float(seconds) for seconds in asdict(self).values())

    def shares(self) -> dict[str, float]:
        """Each part over the whole, 0 to 1; that of `compute` is how busy the device is."""
        whole = self.total_s or 1.0
        return {name: part / whole for name, part in asdict(self).items()}


class SteadyTime:
    """The latest steps' times; a process's first, which compiles, counts until there is another."""

    def __init__(self) -> None:
        self._times: deque[StepTime] = deque(maxlen=RECENT_STEPS)
        self._added = 0

    def add(self, time: StepTime) -> None:
        self._added += 1
        if self._added == 2:
            self._times.clear()
        self._times.append(time)

    @property
    def total(self) -> StepTime:
        return sum(self._times, StepTime())

    @property
    def median_s(self) -> float | None:
        """Seconds of the median step; None before the first."""
        return statistics.median(time.total_s for time in self._times) if self._times else None


@dataclass(frozen=True)
class StepMetrics:
    """A line of `metrics.jsonl`: the fields are its keys, in this order; shares follow `time`."""

    step: int  # optimizer steps so far, this one included
    loss: float  # mean over the step's target tokens
    metrics: Mapping[str, float]  # the loss's further ones; keys of their own in the line
    # the routers' balancing loss, without its coefficient; None where they are not balanced
    aux_loss: float | None
    expert_load_max: float | None  # the most chosen expert's share over the mean, in any layer
    grad_norm: float | None  # global, before clipping; None where none was computed
    lr: float
    tokens: int  # real tokens: padding never counts
    target_tokens: int
    epoch: float
    step_s: float
    tokens_per_s: float
    tflops: float  # 6 x active parameters x tokens / step time, of each GPU
    mfu: float | None  # matmuls and causal attention over the GPU's peak; None: peak unknown
    gpu_peak_bytes: int | None  # as the driver sees it; None without a GPU
    host_bytes: int  # peak resident memory of all processes
    skipped: bool  # no update was made: a non-finite norm, or no targets
    spike: bool  # loss or norm far above recent ones (`Spikes`)
    energy_j: float | None  # of GPU and host, of the parts that are known
    slowest_rank: int | None  # the one that computed longest; None, and no key, where all are one
    time: StepTime
    advice: str  # one sentence: the setting most worth changing, or that there is none

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in json_able(asdict(self)).items():
            values |= value if name == "metrics" else {name: value}
        advice = values.pop("advice")
        if self.slowest_rank is None:
            del values["slowest_rank"]
        shares = {name: round(share, SHARE_DIGITS) for name, share in self.time.shares().items()}
        return {**values, "shares": shares, "advice": advice}


def json_able(value: Any) -> Any:
    """Paths as text, and NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: json_able(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends to `metrics.jsonl` of a run folder; on a full disk lines wait for the next one. Every
    line reaches the operating system before the call returns: a killed process loses none."""

    def __init__(self, path: Path) -> None:
        """Open, keeping what is there. Raises StorageError. `also`: functions that get a line."""
        self.path, self.also = path, tuple[Callable[[Row], object], ...]()
        with system_errors(self.path, "write it"):
            self._file = os.fdopen(os.open(self.path, APPENDED, 0o600), "ab", buffering=0)
        self._waiting = b""

    def __exit__(self, *_: object) -> None:
        if self._write_waiting() is not None:
            missing = self._waiting.count(b"\n")
            logger.error(f"{self.path}: lacks its last {missing} lines, for want of space")
        self._file.close()

    def write_step(self, metrics: StepMetrics) -> None:
        self._write(metrics.to_dict())

    def write_eval(
        self,
        step: int,
        eval_loss: float | None,
        eval_target_tokens: int,
        eval_s: float,
        figures: Mapping[str, float] = NO_FIGURES,
    ) -> None:
        """An evaluation after `step` updates. eval_loss: None if nothing is held out."""
        loss = {"eval_loss": eval_loss, "eval_target_tokens": eval_target_tokens}
        found = {**({} if eval_loss is None else loss), **figures, "eval_s": eval_s}
        self._write(json_able({"step": step, **found}))

    def _write(self, row: Row) -> None:
        for other in self.also:
            other(row)
        waited = bool(self._waiting)
        self._waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        error = self._write_waiting()
        if error is not None and not waited:
            reason = f"{self.path}: cannot be written ({error.strerror})"
            logger.error(f"{reason}; free space: training goes on, and its lines wait")

    def _write_waiting(self) -> OSError | None:
        """The error that left some of it unwritten; None: all is written."""
        try:
            while self._waiting:  # short of space, a part of it is written without an error
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None


def read_metrics(run_dir: str | Path) -> Iterator[Row]:
    """The lines of a run's `metrics.jsonl` in order, without broken ones. Raises StorageError."""
    path = Path(run_dir) / METRICS_FILE
    with system_errors(path, "read it", "look whether the run's folder is still there"):
        yield from (row for row, _ in _lines(path) if row is not None)


def held_out_losses(run_dir: str | Path) -> dict[str, Any]:
    """The first and the latest held-out loss of the whole run, by any of its processes."""
    losses = [row["eval_loss"] for row in read_metrics(run_dir) if "eval_loss" in row]
    return {
        "eval_loss_before": losses[0] if losses else None,
        "eval_loss_after": losses[-1] if len(losses) > 1 else None,
    }


def cut_back(path: Path, step: int) -> None:
    """Drop what a file has after `step`, and a torn last line: a resumed run writes it again.
    Damaged lines further up stay, with a warning. Raises StorageError."""
    kept, end, damaged, lost = 0, 0, [], []
    with system_errors(path, "cut it back", "remove it"):
        for number, (row, size) in enumerate(_lines(path), 1):
            end += size
            if row is None:
                damaged.append(number)
            elif row["step"] <= step:
                kept, lost = end, list(damaged)
        os.truncate(path, kept)
    for number in lost:
        logger.warning(f"{path}:{number}: is damaged and stays as it is")


def _lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """(object, bytes) of each line; the object is None if the line is broken."""
    with path.open("rb") as file:
        yield from ((_parsed(line), len(line)) for line in file)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        # others write NaN for what is no number; we read and write it as null
        row = json_able(json.loads(line)) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


# -- spikes ----------------------------------------------------------------------------------------

WINDOW = 64
ENOUGH = 16
TIMES = {"loss": 2.0, "grad_norm": 10.0}
TIMES_HIGH = 1.5
WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}


class Spikes:
    """Losses and gradient norms far above those of recent steps: a sign of a bad batch or rate. The
    rule: more than `TIMES` the median of the last `WINDOW` steps with targets, and more than
    `TIMES_HIGH` the 90th percentile; none is looked for before `ENOUGH` such steps."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """rows: of `metrics.jsonl`, up to the step that the run goes on from."""
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in TIMES}
        for row in rows:
            if row.get("target_tokens"):
                self.look(row["loss"], row["grad_norm"])

    def look(self, loss: float | None, grad_norm: float | None) -> list[str]:
        """Name what is far above the recent median, but for what is None or not finite."""
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


# -- answers to prompts, samples.jsonl -------------------------------------------------------------


def write_samples(folder: Path, step: int, answers: list[dict[str, Any]]) -> None:
    """Append answers to the samples of a run folder. That they cannot be written is logged."""
    if not answers:
        return
    lines = (json.dumps({"step": step, **answer}, ensure_ascii=False) for answer in answers)
    text, path = "".join(f"{line}\n" for line in lines), folder / SAMPLES_FILE
    try:
        with os.fdopen(os.open(path, APPENDED, 0o600), "ab") as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        logger.error(f"{path}: cannot be written ({error.strerror}); training goes on")


# -- figures over steps, for the report ------------------------------------------------------------

BUCKETS = 350  # of a line: a chart is some hundred pixels wide
MEANS = 60  # of a trend, at least
NAMED = 12  # skipped steps
# Fields that are no figure of a step's own, or are summed up.
NOT_DRAWN = {"step", "tokens", "target_tokens", "epoch", "step_s", "energy_j"}
NOT_DRAWN |= {"eval_target_tokens", "eval_s", "skipped", "spike"}
SUMMED = ("tokens", "step_s", "energy_j")

Point = tuple[int, float]


class Line:
    """Values over steps, 16 bytes each; thinned when they are drawn."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def points(self) -> list[Point]:
        """All points while they are few, else the ends and the extremes of neighbours."""
        count, value = len(self.steps), self.values.__getitem__
        kept: Iterable[int] = range(count)
        if count > 2 * BUCKETS:
            bounds = [at * count // BUCKETS for at in range(BUCKETS + 1)]
            parts = [range(*pair) for pair in pairwise(bounds)]
            extremes = {found(part, key=value) for part in parts for found in (min, max)}
            kept = sorted({0, count - 1} | extremes)
        return [(self.steps[at], self.values[at]) for at in kept]

    def sampled(self) -> list[Point]:
        """Points at steps that other lines of the same steps are sampled at, too."""
        every = -(-len(self.steps) // (2 * BUCKETS)) or 1
        return [*zip(self.steps[::every], self.values[::every], strict=True)]

    def trend(self) -> tuple[int, list[Point]]:
        """(points of each mean, the means at their middle steps); none of a short line."""
        count = len(self.steps)
        each = count // MEANS
        if count <= 2 * BUCKETS:
            return 0, []
        starts = range(count % each, count, each)
        means = [(self.steps[at + each // 2], fmean(self.values[at : at + each])) for at in starts]
        return each, means


class History:
    """The figures of a run, row by row."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.lines: dict[str, Line] = defaultdict(Line)
        self.shares: dict[str, Line] = defaultdict(Line)  # of a step's time, all at the same steps
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
            for name in vars(StepTime()):
                self.shares[name].add(step, shares.get(name, 0.0))
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

    def values(self, name: str) -> Sequence[float]:
        return self.lines[name].values if name in self.lines else ()

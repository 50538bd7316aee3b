"""How much of the processors this run has, and how much other processes take from it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from megatrain.machine.launcher import started_by

RECENT_READINGS = 20
CONTENDED = 0.9  # share of all cores that are busy from which one process slows another
WORTH_NAMING = 0.1  # share of all cores that others take
NAMED = 3  # of the other processes, those that use most
LOOKED_UP_EVERY_S = 30.0  # who they are: it takes milliseconds

Processes = dict[tuple[int, str], float]  # processor seconds by id and name


@dataclass(frozen=True)
class Reading:
    """Seconds since some beginning: wall time, busy cores in all, and those of this run."""

    wall: float
    busy: float
    own: float


@dataclass(frozen=True)
class Load:
    """Busy cores on average: all that this run may use, and those of other processes."""

    cores: int
    busy: float = 0.0
    others: float = 0.0
    names: tuple[str, ...] = ()  # of the others, those that use most first; empty: not known

    @property
    def shared(self) -> bool:
        """Whether others use a share of the cores that is worth naming."""
        return self.others >= WORTH_NAMING * self.cores

    @property
    def contended(self) -> bool:
        """Whether others leave too little for this run."""
        return self.shared and self.busy >= CONTENDED * self.cores

    @property
    def words(self) -> str:
        who = f" ({', '.join(self.names)})" if self.names else ""
        return f"other processes use {self.others:.1f} of {self.cores} cores{who}"


def cores() -> list[int]:
    """The logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def read_processors() -> Reading:
    """Of the processors that this process may use."""
    every, own = psutil.cpu_times(percpu=True), psutil.Process().cpu_times()
    mine = [every[number] for number in cores() if number < len(every)]
    busy = sum(each.user + each.system + getattr(each, "nice", 0.0) for each in mine)
    spent = own.user + own.system + own.children_user + own.children_system
    return Reading(time.monotonic(), busy, spent)


def read_processes() -> Processes:
    """Processor seconds of every other process that can be seen, but not of our children, nor of
    other ranks that a launcher has started beside this one."""
    own = psutil.Process()
    launched = started_by(os.environ)[1] > 1
    first = (own.parent() if launched else None) or own
    ours = {own.pid, first.pid, *(child.pid for child in first.children(recursive=True))}
    found: Processes = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        spent = process.info["cpu_times"]
        if process.pid not in ours and spent is not None:
            found[process.pid, process.info["name"] or "?"] = spent.user + spent.system
    return found


@dataclass
class LoadMeter:
    """The load while the latest steps ran. One reading a step; who the others are only if asked."""

    processors: Callable[[], Reading] = read_processors
    processes: Callable[[], Processes] = read_processes
    count: int = field(default_factory=lambda: len(cores()))
    _readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=RECENT_READINGS))
    _seen: tuple[float, Processes] | None = None  # when, and who had used how much until then
    _names: tuple[str, ...] = ()

    def read(self) -> Load:
        """The load since the oldest of the latest readings; none at the first."""
        now = self.processors()
        self._readings.append(now)
        then = self._readings[0]
        wall = now.wall - then.wall
        if wall <= 0:
            return Load(self.count)
        busy = (now.busy - then.busy) / wall
        others = max(0.0, busy - (now.own - then.own) / wall)
        load = Load(self.count, busy, others)
        if not load.contended:
            self._seen, self._names = None, ()
            return load
        return Load(self.count, busy, others, self._look_up(now.wall))

    def _look_up(self, now: float) -> tuple[str, ...]:
        """Names of the processes that used most since the last look; at the first look of none."""
        if self._seen is not None and now - self._seen[0] < LOOKED_UP_EVERY_S and self._names:
            return self._names
        found = self.processes()
        if self._seen is not None:
            since, before = self._seen
            used = {key: spent - before.get(key, 0.0) for key, spent in found.items()}
            busiest = sorted(used, key=lambda key: -used[key])[:NAMED]
            least = WORTH_NAMING * (now - since)
            self._names = tuple(
                f"{name} {used[number, name] / (now - since):.1f}"
                for number, name in busiest
                if used[number, name] >= least
            )
        self._seen = now, found
        return self._names

"""Timing of a piece of work: the median of several timings, after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

Work = Callable[[], object]


class Times(Protocol):
    """A function that times a piece of work."""

    def seconds(self, work: Work) -> float:
        """Median duration of one call of `work`."""


MOST_SAMPLES = 7
FEWEST_SAMPLES = 3  # where one takes long


@dataclass(frozen=True)
class Clock:
    """Times work on `device`: by CUDA's events, as calls only enqueue there, else by the wall."""

    device: torch.device
    sample_s: float = 0.02  # work is repeated until a sample takes about this long
    budget_s: float = 0.25  # of all samples, unless the fewest take longer

    def seconds(self, work: Work) -> float:
        """Median duration of one call of `work`."""
        work()  # compiles, allocates, wakes the clocks
        once = self._elapsed(work, 1)
        calls = max(1, round(self.sample_s / max(1e-7, once)))
        samples = [once] if calls == 1 else []
        while len(samples) < FEWEST_SAMPLES or (
            len(samples) < MOST_SAMPLES and sum(samples) < self.budget_s
        ):
            samples.append(self._elapsed(work, calls))
        return median(samples) / calls

    def seconds_if_possible(self, work: Work) -> float | None:
        """The same, or None where this device or this PyTorch lacks the operation."""
        try:
            return self.seconds(work)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError):
            return None

    def _elapsed(self, work: Work, calls: int) -> float:
        return (self._on_cuda if self.device.type == "cuda" else on_the_wall)(work, calls)

    def _on_cuda(self, work: Work, calls: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        for _ in range(calls):
            work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000


def on_the_wall(work: Work, calls: int) -> float:
    """Seconds that `calls` calls take this thread."""
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - started

"""The clock warms up, repeats short work, stops early with long work, and takes the median."""

import time

import pytest
import torch

from megatrain.measure import transfers
from megatrain.measure.transfers import Clock

CPU = torch.device("cpu")


class Work:
    """Takes the given seconds, call by call, on a clock of its own; the last figure repeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *durations: float) -> None:
        self.now = 0.0
        self.calls = 0
        self.durations = durations
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self) -> None:
        self.now += self.durations[min(self.calls, len(self.durations) - 1)]
        self.calls += 1


def test_neither_the_warm_up_nor_a_slow_or_fast_sample_counts(monkeypatch):
    for durations in ((100.0, 0.5), (0.0, 0.5, 9.0, 0.5, 0.1)):
        assert Clock(CPU).seconds(Work(monkeypatch, *durations)) == 0.5


def test_long_work_is_done_no_more_often_than_a_median_needs(monkeypatch):
    work = Work(monkeypatch, 5.0)
    assert Clock(CPU).seconds(work) == 5.0
    assert work.calls == 1 + transfers.FEWEST_SAMPLES


def test_short_work_is_repeated_within_a_sample(monkeypatch):
    work = Work(monkeypatch, 1e-4)
    assert Clock(CPU, sample_s=0.02).seconds(work) == pytest.approx(1e-4)
    assert work.calls == 2 + transfers.MOST_SAMPLES * 200


def test_work_that_cannot_be_done_takes_no_time():
    def missing() -> None:
        raise NotImplementedError("no such kernel")

    def exhausted() -> None:
        raise torch.OutOfMemoryError("full")

    assert Clock(CPU).seconds_if_possible(missing) is None
    with pytest.raises(torch.OutOfMemoryError):
        Clock(CPU).seconds_if_possible(exhausted)

"""Lanes run jobs in order, events carry errors, and waiting is accounted by cause."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatrain.engine.streams import Compute, Event, Lane

CPU = torch.device("cpu")


class Broken(Exception):
    """The error that a job raises."""


def fail(_: Event) -> None:
    raise Broken("the disk is on fire")


@pytest.fixture
def lane():
    lane = Lane("test")
    yield lane
    lane.close()


def test_jobs_run_in_order_on_one_thread_that_is_not_the_caller_s(lane):
    done: list[tuple[int, int]] = []
    events = [
        lane.submit(lambda _, number=number: done.append((number, threading.get_ident())))
        for number in range(50)
    ]
    events[-1].wait_host()
    assert [number for number, _ in done] == list(range(50))
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] != threading.get_ident()


def test_a_job_can_wait_for_an_event_of_another_lane(lane):
    seen: list[str] = []
    other, release = Lane("other"), threading.Event()

    def slow(_: Event) -> None:
        release.wait()
        seen.append("first")

    def dependent(_: Event) -> None:
        lane.wait(first)
        seen.append("second")

    first, second = other.submit(slow), lane.submit(dependent)
    release.set()
    second.wait_host()
    other.close()
    assert seen == ["first", "second"]


@pytest.mark.parametrize("wait", [Event.wait_host, Event.synchronize])
def test_an_error_is_raised_where_its_result_is_awaited_and_again_each_time(lane, wait):
    event = lane.submit(fail)
    for _ in range(2):
        with pytest.raises(Broken, match="on fire"):
            wait(event)


def test_after_an_error_no_later_job_runs_and_all_fail_with_it(lane):
    ran: list[int] = []
    good = lane.submit(lambda _: None)
    lane.submit(fail)
    later = lane.submit(lambda _: ran.append(1))
    good.wait_host()
    with pytest.raises(Broken):
        later.wait_host()
    assert ran == []


def test_an_error_travels_through_a_lane_that_waits_for_it(lane):
    other = Lane("other")
    broken = other.submit(fail)
    dependent = lane.submit(lambda _: lane.wait(broken))
    with pytest.raises(Broken):
        Compute(CPU).wait(dependent, "upload")
    other.close()


def test_close_finishes_what_is_queued():
    done: list[int] = []
    lane = Lane("test")
    lane.delay = lambda: time.sleep(0.001)
    for _ in range(20):
        lane.submit(lambda _: done.append(len(done)))
    lane.close()
    assert done == list(range(20))
    assert not lane._thread.is_alive()


class SlowEvent(Event):
    """Completes `seconds` of a pretended clock after someone waits for it."""

    def __init__(
        self, clock: list[float], seconds: float, update_s: float = 0.0, nvme_s: float = 0.0
    ) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.waited = {"nvme": nvme_s, "update": update_s}

    def wait_host(self) -> None:
        self.clock[0] += self.seconds
        self.seconds = 0.0


def test_stalls_are_attributed_to_their_cause_and_to_the_update_within(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("megatrain.engine.streams.time.perf_counter", lambda: clock[0])
    compute = Compute(CPU)
    compute.wait(SlowEvent(clock, 5.0, update_s=3.0), "upload")
    # the update was nearly over when this wait began
    compute.wait(SlowEvent(clock, 1.0, update_s=3.0), "upload")
    compute.wait(SlowEvent(clock, 4.0), "download")
    compute.wait(SlowEvent(clock, 6.0, update_s=1.0, nvme_s=2.0), "upload")
    compute.wait(compute.record(), "upload")  # complete: no stall
    assert compute.take_stalls() == {
        "wait_nvme": 2.0,
        "wait_update": 5.0,
        "wait_upload": 5.0,
        "wait_download": 4.0,
    }
    assert compute.take_stalls() == {}


class Mark:
    """Stands for a CUDA event: its time is that of the clock when it is recorded."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.is_over = clock, True

    def query(self) -> bool:
        return self.is_over

    def record(self, _: object) -> None:
        self.at = self.clock[0]

    def elapsed_time(self, later: Mark) -> float:
        return (later.at - self.at) * 1000


def test_a_stall_on_cuda_that_is_not_over_is_told_the_next_time(monkeypatch):
    clock, made = [0.0], []

    def mark(timed: bool = False) -> Mark:
        made.append(Mark(clock))
        return made[-1]

    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr("megatrain.engine.streams._cuda_event", mark)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    compute = Compute(torch.device("cuda", 0))
    for seconds in (5.0, 2.0):
        compute.wait(event := SlowEvent(clock, seconds), "upload")
        event.cuda = object()
    made[-1].is_over = False
    assert compute.take_stalls()["wait_upload"] == 5.0
    made[-1].is_over = True
    assert compute.take_stalls()["wait_upload"] == 2.0
    assert compute.take_stalls() == {}

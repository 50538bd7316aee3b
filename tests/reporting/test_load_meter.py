"""Other processes' load on the machine, by injected meters, and the advice that knows of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatrain.reporting.advice import advise
from megatrain.reporting.meters import Load, LoadMeter, Reading, read_processes, read_processors
from tests.reporting.test_advice import COMPUTING, CPU, H200, NOTHING, UPDATING, asked

COMPILING = {(7, "cargo"): 1.5, (8, "python"): 0.3, (9, "sshd"): 0.01}  # cores


def meter(own: float, others: float, count: int = 2) -> LoadMeter:
    """Of a machine on which this run and others use so many cores, in readings 40 s apart."""

    def readings() -> Iterator[Reading]:
        for number in range(100):
            wall = 40.0 * number
            yield Reading(wall, wall * (own + others), wall * own)

    def looks() -> Iterator[dict[tuple[int, str], float]]:
        for number in range(100):
            yield {key: 40.0 * number * used for key, used in COMPILING.items()}

    processors, processes = readings(), looks()
    return LoadMeter(lambda: next(processors), lambda: next(processes), count)


def test_others_that_hold_the_cores_are_counted_and_named():
    found = meter(0.2, 1.8)
    first, second, third = (found.read() for _ in range(3))
    assert not first.contended
    assert second.words == "other processes use 1.8 of 2 cores"
    assert third.words == "other processes use 1.8 of 2 cores (cargo 1.5, python 0.3)"


def test_load_counts_where_nothing_is_left():
    for own, others, count, contended in [
        (0.2, 1.8, 2, True),
        (1.0, 0.9, 2, True),
        (2.0, 0.0, 2, False),  # it is this run
        (1.9, 0.1, 2, False),  # a tenth of a core is not worth a word
        (0.5, 0.5, 2, False),  # a core is free
        (2.0, 30.0, 64, False),
        (2.0, 60.0, 64, True),
    ]:
        found = meter(own, others, count)
        found.read()
        assert found.read().contended is contended


def test_names_are_looked_up_only_where_they_are_told():
    found = meter(1.0, 0.0)
    found.processes = lambda: pytest.fail("nobody asked")
    for _ in range(3):
        found.read()


TAKEN = Load(2, 2.0, 1.8, ("cargo 1.5",))


def test_the_advice_knows_of_it():
    for time, facts, load, words in [
        (COMPUTING, asked(**CPU), TAKEN, "other processes use 1.8 of 2 cores (cargo 1.5): stop th"),
        (UPDATING, H200, TAKEN, "other processes use 1.8 of 2 cores"),
        (COMPUTING, H200, TAKEN, NOTHING),  # the GPU computes, whatever the cores do
        (COMPUTING, asked(**CPU), Load(2, 2.0, 0.0), NOTHING),
        (UPDATING, H200, None, "raise train.tokens_per_step"),
    ]:
        assert advise(time, facts, 0.4, load).startswith(words)


def test_other_ranks_are_no_strangers():
    for ranks, seen in [("1", True), ("2", False)]:
        code = (
            "import sys; from megatrain.reporting.meters import read_processes as r; "
            "print(any(pid == int(sys.argv[1]) for pid, _ in r()))"
        )
        with subprocess.Popen(["sleep", "30"]) as beside:
            words = [sys.executable, "-c", code, str(beside.pid)]
            environ = os.environ | {"WORLD_SIZE": ranks}
            found = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
            beside.kill()
        assert found.stdout.strip() == str(seen)


def test_the_real_meters_count_what_this_process_does():
    before = read_processors()
    while read_processors().own - before.own < 0.05:
        sum(range(10_000))
    after = read_processors()
    assert after.wall - before.wall >= 0.02
    assert after.busy >= before.busy
    assert all(spent >= 0 for spent in read_processes().values())

"""Processes that tokenise: none is left behind, and what goes wrong in one is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatrain.data import forking, workers
from megatrain.errors import DataError, MegaTrainError
from tests.commands import children_of


@pytest.fixture(autouse=True)
def from_the_first_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ALONE_BATCHES", 0)


def slowly(batches: Iterable[int]) -> Iterator[int]:
    for batch in batches:
        time.sleep(0.05)
        yield batch


def endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def test_no_process_is_left_when_the_work_is_given_up():
    before = children_of(os.getpid())

    def give_up() -> None:
        with workers.Team(slowly, 2) as team:
            for done in team.map(endless()):
                assert len(children_of(os.getpid())) == len(before) + 2
                if done == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give_up()
    assert children_of(os.getpid()) == before


def test_a_process_that_is_killed_is_an_error_of_one_sentence():
    before = set(children_of(os.getpid()))

    def lose_one() -> None:
        with workers.Team(slowly, 2) as team:
            for _ in team.map(endless()):
                os.kill(min(set(children_of(os.getpid())) - before), signal.SIGKILL)

    with pytest.raises(MegaTrainError, match=r"ended from outside.*set data\.processes: 1"):
        lose_one()
    assert set(children_of(os.getpid())) == before


def test_processes_end_with_a_parent_that_is_killed_and_heed_no_signal(tmp_path):
    said = tmp_path / "children"
    parent = os.fork()
    if parent == 0:
        try:
            with workers.Team(slowly, 2) as team:
                for done in team.map(endless()):
                    if done == 5:
                        said.write_text(" ".join(map(str, children_of(os.getpid()))))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while not said.exists() or len(said.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = [int(word) for word in said.read_text().split()]
    for child in children:
        for number in forking.IGNORED:
            os.kill(child, number)
    time.sleep(0.1)
    assert set(children_of(parent)) == set(children)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}/cwd").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failing(batches: Iterable[int]) -> Iterator[int]:
    for batch in batches:
        if batch == 3:
            raise DataError("the fourth")
        yield batch


def test_an_error_comes_in_its_turn():
    done = list[int]()
    with workers.Team(failing, 2) as team:
        assert list(team.map(range(3))) == [0, 1, 2]
        with pytest.raises(DataError, match="the fourth"):
            done.extend(team.map(range(3, 10)))
        assert list(team.map(range(3))) == [0, 1, 2]
    assert done == []

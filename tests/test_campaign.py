"""Campaigns: what is lost is counted and named, and a case can be tried again."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import pytest

from benchmarks.campaign import __main__ as campaign
from benchmarks.campaign import calls, project, trials
from benchmarks.campaign.children import Ended, in_child
from benchmarks.campaign.damage import DamagedCheckpoints, damage, files_in
from benchmarks.campaign.fuzz import Configs, Models, Rows
from benchmarks.campaign.project import put_back
from benchmarks.campaign.saves import contents
from megatrain.errors import StorageError


class Stub(trials.Trial):
    """A trial whose cases do what they are told."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.actions = {str(number): action for number, action in enumerate(actions)}

    def cases(self, seed: int):
        return iter(self.actions)

    def attempt(self, case: str) -> int:
        self.actions[case]()
        return 3


def fail() -> None:
    raise AssertionError("bits differ")


@pytest.mark.slow
def test_what_is_lost_is_counted_and_named(monkeypatch, capsys):
    monkeypatch.setattr(trials, "LIMIT_S", 2.0)
    stub = Stub(
        lambda: None,
        fail,
        lambda: os.kill(os.getpid(), signal.SIGKILL),  # as the kernel does
        lambda: time.sleep(60),
        lambda: 1 / 0,
    )
    found = trials.tally("a part", stub, seed=7, seconds=60)
    assert (found.tried, found.lost, found.survived, found.of) == (3 + 4, 4, 3, 7)
    cases = {failure["case"]: failure["reason"] for failure in found.failures}
    assert cases.keys() == {"1", "2", "3", "4"}
    assert (cases["1"], cases["3"]) == ("bits differ", "it hung")
    assert "ZeroDivisionError" in cases["4"]
    assert "a part: case 1 is lost: bits differ" in capsys.readouterr().out


@pytest.mark.parametrize(("cases", "code"), [(1, 0), (0, 1)])
def test_a_part_that_tried_nothing_fails_a_campaign(monkeypatch, tmp_path, cases, code):
    monkeypatch.setattr(campaign, "ENVIRONMENT", {})
    monkeypatch.setattr(project, "warm", lambda folder: None)
    parts = {"a part": (lambda folder: Stub(*[lambda: None] * cases), 1)}
    monkeypatch.setattr(campaign, "parts", lambda: parts)
    monkeypatch.setattr(sys, "argv", ["campaign", "--json", str(tmp_path / "found.json")])
    for name in ("HF_HOME", "MEGATRAIN_CACHE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back in the end
    assert campaign.main() == code
    assert json.loads((tmp_path / "found.json").read_text())["parts"][0]["tried"] == 3 * cases


def test_time_ends_a_part():
    found = trials.tally("a part", Stub(*[lambda: time.sleep(0.01)] * 999), 0, seconds=0.1)
    assert 0 < found.tried < 999
    assert found.of is None


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended(None, "step 3"), "it hung: step 3"),
        (Ended(-11, ""), "exit code -11"),
        (Ended(1, "error: unexpected KeyError"), "exit code 1: error: unexpected KeyError"),
        (Ended(0, "Traceback (most recent call last):\n"), "Traceback"),
        (Ended(3, "error: \x1b[2Jno rows"), r"\\x1b"),
    ],
)
def test_a_command_that_does_not_end_in_a_sentence_is_lost(ended, words):
    with pytest.raises(AssertionError, match=words):
        trials.check_told(ended)


def test_a_command_that_ends_in_a_sentence_is_not_lost():
    trials.check_told(Ended(3, "error: rows.jsonl:2: no text\n"))


def test_a_child_ends_as_a_command_does():
    def refuse() -> None:
        raise StorageError("full")

    assert in_child(refuse).code == StorageError.exit_code
    assert in_child(lambda: os.write(1, b"said") and 0) == Ended(0, "said")
    assert in_child(lambda: time.sleep(60), limit_s=0.05).code is None


def test_calls_are_counted_below_a_folder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()

    def write() -> None:
        calls.watch(lambda number, name: seen.append((number, name)), within=inside)
        (outside / "a").write_text("a")
        with (inside / "b").open("w") as file:
            os.fsync(file.fileno())
        (inside / "b").unlink()
        sys.stdout.write(repr(seen))

    seen: list[tuple[int, str]] = []
    assert in_child(write).words == "[(1, 'open'), (2, 'fsync'), (3, 'unlink')]"


def test_damage_is_drawn_from_the_case(tmp_path):
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    found = []
    for case in [*"abcdefghijklmnop"] * 2:
        for path in (file, other):
            path.write_text(f'{{"{path.name}": 12345}}')
        kind = damage(file, files_in(tmp_path), random.Random(case))
        found.append((kind, file.read_bytes() if file.is_file() else None))
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
    assert found[:16] == found[16:]
    assert len(set(found[:16])) > 8


def test_corruptions_of_checkpoints(tmp_path):
    trial = DamagedCheckpoints(tmp_path)
    assert trials.run_case(trial, "0-1").code == 0
    trial.bits[0] = "other"
    lost = trials.run_case(trial, "0-1")
    assert (lost.code, "wrong bits of step 1" in lost.words) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Rows, Models, Configs])
def test_odd_input_is_drawn_from_the_case(tmp_path, kind):
    trial, drawn = kind(tmp_path), []
    for _ in range(2):
        put_back(trial.copy, trial.project)
        drawn.append((trial.odd(random.Random("0-1")), contents(trial.project)))
    assert drawn[0] == drawn[1]


def test_odd_input_is_given_to_a_command(tmp_path):
    ended = trials.run_case(Configs(tmp_path), "0-1")
    assert ended.code == 0, ended.words

"""`train --restarts N`: a run whose process dies comes back by itself, unless that is no use."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from megatrain.recipes.ranks import launch
from tests.helpers.commands import environment, steps_of, wait_for
from tests.helpers.ranks import Started
from tests.recipes.same_run import same_run
from tests.recipes.test_rank_runs import train, trained_to

pytestmark = pytest.mark.slow
# A rank that does something before a step, and counts its starts.
RANK = """
import os, signal, sys, time
from megatrain import cli
from megatrain.recipes import loop
with open("starts", "a") as file:
    starts = file.write("x") and file.tell()
made, rank = loop.train_step, os.environ.get("RANK", "0")
def train_step(run, *given):
    if {when}:
        run.saving and run.saving.written.result()
        {what}
    made(run, *given)
loop.train_step = train_step
sys.exit(cli.main(sys.argv[1:]))
"""
DIES, FAILS = "os.kill(os.getpid(), signal.SIGKILL)", "raise RuntimeError('bad luck')"


@pytest.fixture
def rank(monkeypatch):
    """rank("run.step == 7", DIES): what those that are started do."""

    def write(when: str, what: str) -> None:
        text = RANK.format(when=when, what=what)
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", text))
        monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])

    return write


def starts() -> int:
    return Path("starts").stat().st_size


def test_a_run_that_is_killed_comes_back_to_the_same_bits(rank, megatrain, finished_project):
    """Before its first checkpoint, and after it."""
    rank("(starts, run.step) in ((1, 3), (2, 7))", DIES)
    said = megatrain("train cfg.yaml --restarts 2 precision=float32").err
    assert said.count("error: the run was killed by SIGKILL") == 2
    again = "the run failed after step {}; starting it again from its {} (restart {} of 2)"
    for values in ((3, "beginning", 1), (7, "newest checkpoint", 2)):
        assert again.format(*values) in said
    same_run(Path("run"), finished_project / "run")
    assert starts() == 3


def test_so_do_two_ranks_of_which_one_fails(rank, megatrain, project, monkeypatch):
    assert Started(2, train("output=whole")).wait() == [0, 0]
    monkeypatch.setattr(launch, "ranks_for", lambda _: 2)
    rank("starts <= 2 and rank == '1' and run.step == 7", FAILS)
    said = megatrain(f"{train()} --restarts 1").err
    assert "unexpected RuntimeError: bad luck" in said
    assert "the run failed after step 7; starting it again from its newest checkpoint" in said
    same_run(Path("run"), Path("whole"))
    assert starts() == 4


@pytest.mark.parametrize(
    ("most", "what", "times", "reason"),
    [
        (9, DIES, "3 times without getting past", "the run was killed by SIGKILL"),
        (1, FAILS, "again, after", "the run ended with exit code 1, as is said above"),
    ],
)
def test_a_run_that_always_fails_at_a_step_stays_down(rank, megatrain, most, what, times, reason):
    rank("run.step == 6", what)
    said = megatrain(f"train cfg.yaml --restarts {most}", code=1).err
    assert f"error: the run failed {times} step 6 and stays down: {reason}; remove the" in said
    assert "(exit code 1), then go on with `megatrain resume run`" in said
    assert starts() == min(3, most + 1)
    rank("False", "pass")
    megatrain(f"resume run --restarts {most}")
    assert steps_of(Path("run"))[-1]["step"] == 10


def test_a_refusal_is_none(rank, megatrain, copied):
    rank("False", "pass")
    assert "run holds a run already" in megatrain("train cfg.yaml --restarts 3", code=2).err
    assert not Path("starts").exists()
    both = "resume run --restarts 1 --checkpoint checkpoint-5"
    assert "remove it or --checkpoint" in megatrain(both, code=2).err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_that_is_asked_to_stop_stops(rank, megatrain, project, number, code):
    rank("True", "time.sleep(0.1)")

    def send() -> None:
        wait_for(lambda: trained_to(2))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    said = megatrain("train cfg.yaml --restarts 3 train.max_steps=1000", code=code).err
    thread.join()
    assert f"stopped by {number.name}" in said and "again" not in said
    assert starts() == 1


def test_under_another_launcher_it_is_refused(megatrain, monkeypatch):
    for name, value in launch.environment_of(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    said = megatrain("train cfg.yaml --restarts 1", code=2).err
    assert "let that one start all again, as `torchrun --max-restarts` does" in said


def test_a_run_whose_launcher_is_killed_is_saved(forker, project):
    keys = ("train.max_steps=100000", "checkpoint.every=null", "train.eval_every=null")
    launcher = forker.start("train", "cfg.yaml", "--restarts", "1", *keys)
    wait_for(lambda: trained_to(2))
    os.kill(launcher, signal.SIGKILL)
    assert forker.wait() == -signal.SIGKILL
    wait_for(lambda: "the run is saved" in (project / "run/train.log").read_text())

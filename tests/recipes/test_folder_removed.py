"""A run folder that is removed while its run goes on is written anew at the next save; that of a
run which never began is removed once all ranks have found it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatrain.heartbeat import may_end_here
from megatrain.recipes import loop
from megatrain.recipes.state import Run
from megatrain.reporting.progress import logging_to
from megatrain.storage.run_folder import run_lock
from tests.commands import metrics_of, steps_of
from tests.ranks import Started
from tests.recipes.same_run import same_run
from tests.recipes.test_rank_runs import SOON_S, looked_after_often, train

__all__ = ["looked_after_often"]  # a fixture


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """after_step(7, action): calls it once that step is done."""

    def patch(step: int, action: Callable[[], Any]) -> None:
        original = loop.train_step

        def train_step(run: Run, *rest: Any) -> None:
            original(run, *rest)
            if run.step == step:
                action()

        monkeypatch.setattr(loop, "train_step", train_step)

    return patch


@pytest.mark.slow
@pytest.mark.parametrize(("how", "step"), [("moved", 3), ("replaced", 7)])
def test_the_run_goes_on_and_its_folder_is_whole(
    megatrain, project, finished_project, after_step, step, how
):
    folder = project / "run"

    def act() -> None:
        folder.rename(project / "away")
        if how == "replaced":
            folder.mkdir(0o700)

    after_step(step, act)
    done = megatrain("train cfg.yaml")
    warning = "warning: run: was removed or replaced while the run goes on; it is written anew"
    assert done.err.count(warning) == 1
    same_run(folder, finished_project / "run")
    files = {path.name for path in (finished_project / "run").iterdir()}
    lost = {"checkpoint-5", "proven"} if step == 7 else set()
    assert {path.name for path in folder.iterdir()} == files - lost
    assert "saved run/checkpoint-10" in (folder / "train.log").read_text()
    assert "nothing is left to train" in megatrain("resume run").err


def test_a_folder_that_another_run_has_taken_is_left_to_it(megatrain, project, after_step):
    with ExitStack() as stack:

        def take() -> None:
            shutil.rmtree(project / "run")
            stack.enter_context(run_lock(project / "run"))

        after_step(3, take)
        done = megatrain("train cfg.yaml", code=7)
    assert "error: step 5 is not saved, training goes on: run: in use by another" in done.err
    assert [path.name for path in (project / "run").glob("checkpoint*")] == []


def test_a_removed_file_of_metrics_comes_back_with_the_folder(megatrain, project, after_step):
    def remove() -> None:
        for name in (".lock", "metrics.jsonl"):
            Path("run", name).unlink()

    after_step(7, remove)
    megatrain("train cfg.yaml")
    assert [row["step"] for row in steps_of(project / "run")] == list(range(1, 11))
    assert len(metrics_of(project / "run")) == 13


@pytest.mark.slow
def test_it_is_removed_once_all_ranks_have_found_it(project):
    """The first one is stopped while the other is about to open its log there."""

    def first(rank: int) -> None:
        def late(*given: Any) -> Any:
            until = time.monotonic() + rank
            while Path("run").exists() and time.monotonic() < until:
                time.sleep(0.001)
            return logging_to(*given)

        def stopped(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            may_end_here()

        pytest.MonkeyPatch().setattr("megatrain.recipes.session.logging_to", late)
        if rank == 0:
            pytest.MonkeyPatch().setattr("megatrain.recipes.run.get_ready", stopped)

    started = Started(2, train(), first=first)
    assert started.wait(SOON_S) == [75, 75], started.said()
    assert not Path("run").exists()

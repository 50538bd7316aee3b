"""A run whose folder is removed or replaced ends at its next save, and writes nothing there; the
folder of a run which never began is removed once all ranks have found it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.heartbeat import may_end_here
from megatrain.recipes import loop
from megatrain.recipes.state import Run
from megatrain.reporting.progress import logging_to
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


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_run_whose_folder_is_gone_ends_and_goes_on_where_it_is(
    megatrain, project, finished_project, after_step, how
):
    folder = project / "run"

    def act() -> None:
        if (project / "away").exists():
            return
        folder.rename(project / "away")
        if how == "replaced":
            folder.mkdir(0o700)

    after_step(7, act)
    done = megatrain("train cfg.yaml", code=7)
    assert "error: run: was removed or replaced while the run goes on; nothing is saved" in done.err
    assert not [*folder.glob("checkpoint*")]
    megatrain("resume away")
    same_run(project / "away", finished_project / "run")


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

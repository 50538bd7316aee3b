"""The best evaluation is saved wherever it falls, and patience ends a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.recipes import loop
from megatrain.recipes.loop import is_better
from megatrain.recipes.state import Run
from megatrain.storage.manifest import read_manifest
from tests.commands import steps_of

LOSSES = [6.0, 5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.1, 3.3, 3.4, 3.6]  # after steps 0, 1, 2, ...
CONFIG = (
    *("train.eval_every=1", "checkpoint.every=4", "checkpoint.keep=1"),
    "train.tokens_per_step=64",  # a step is only something to evaluate after
)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """scripted(stop=3): evaluations give LOSSES, and the figures of `more`; SIGTERM comes in the
    evaluation after step 3."""

    def script(stop: int | None = None, more: dict[str, float] | None = None) -> None:
        def evaluate(run: Run, _: Any) -> dict[str, float]:
            if run.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = LOSSES[run.step]
            run.writer.write_eval(run.step, loss, 9, 0.1)
            return {"eval_loss": loss, **(more or {})}

        monkeypatch.setattr(loop, "evaluate", evaluate)

    return script


def best_of(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """(where `best` points, what the last checkpoint knows of it)."""
    state = json.loads((run_dir / "last" / "state.json").read_text())["state"]
    return os.readlink(run_dir / "best"), state["best"]


def test_which_way_is_better():
    for metric, given, greater in (
        ("eval_loss", "auto", False),
        ("eval_loss", True, True),
        ("eval_rewards/accuracies", "auto", True),
    ):
        keys = {"metric": metric, "greater_is_better": given}
        config = load_config({"model": "m", "data": {"train": "d"}, "checkpoint": keys})
        assert is_better(config, {metric: 2.0}, {metric: 1.0}) == greater


def test_a_better_evaluation_saves(megatrain, project, scripted):
    scripted()
    done = megatrain("train cfg.yaml train.max_steps=7", *CONFIG)
    assert best_of(project / "run") == ("checkpoint-4", {"step": 4, "eval_loss": 3.0})
    assert "saved run/checkpoint-2" in done.err
    assert "saved run/checkpoint-3" not in done.err
    where = "6.0000 before, 3.1000 after, best 3.0000 at step 4 in run/checkpoint-4"
    assert where in done.out
    assert (project / "run" / "checkpoint-4").is_dir(), "whatever `keep` is"


@pytest.mark.parametrize(("patience", "end"), [(1, 3), (4, 8)])
def test_patience_ends_a_run(megatrain, project, scripted, patience, end):
    scripted()
    done = megatrain("train cfg.yaml", *CONFIG, f"checkpoint.patience={patience}")
    words = f"step {end}: the last {patience} evaluations were not better than step "
    assert words in done.err
    assert steps_of(project / "run")[-1]["step"] == end
    assert best_of(project / "run")[0] == ("checkpoint-2" if patience == 1 else "checkpoint-4")
    assert (project / "run" / "final").is_dir()
    again = megatrain("resume run")
    assert "nothing is left to train" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
def test_a_resume_in_between_counts_on(megatrain, project, scripted, stop):
    scripted(stop)
    megatrain("train cfg.yaml", *CONFIG, "checkpoint.patience=4", code=75)
    scripted()
    megatrain("resume run")
    assert steps_of(project / "run")[-1]["step"] == 8
    assert best_of(project / "run") == ("checkpoint-4", {"step": 4, "eval_loss": 3.0})


def test_where_patience_ended_a_run_it_stays_ended_without_its_final(megatrain, project, scripted):
    scripted()
    megatrain("train cfg.yaml", *CONFIG, "checkpoint.patience=2")
    shutil.rmtree(project / "run" / "final")
    megatrain("resume run")
    assert steps_of(project / "run")[-1]["step"] == 6
    assert read_manifest(project / "run" / "final").step == 6


def test_another_figure_begins_anew(megatrain, project, scripted):
    """The best so far was so by another figure, which cannot be compared."""
    scripted(stop=5)
    megatrain("train cfg.yaml", *CONFIG, code=75)
    assert best_of(project / "run") == ("checkpoint-4", {"step": 4, "eval_loss": 3.0})
    scripted(more={"eval_quiz_acc": 0.5})
    done = megatrain("resume run checkpoint.metric=eval_quiz_acc --json")
    assert best_of(project / "run") == ("checkpoint-6", {"step": 6, "eval_quiz_acc": 0.5})
    assert (done.json["best_metric"], done.json["best_value"]) == ("eval_quiz_acc", 0.5)


def test_patience_without_held_out_rows_is_refused(megatrain, project):
    done = megatrain("train cfg.yaml data.eval=null checkpoint.patience=2", code=2)
    assert "checkpoint.patience: counts evaluations of held-out rows; set data.eval" in done.err

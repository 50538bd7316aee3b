"""The best evaluation is saved wherever it falls, and patience ends a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatrain.config import load_config
from megatrain.engine.gradients import Gradients
from megatrain.recipes import loop
from megatrain.recipes.loop import is_better
from megatrain.recipes.state import Run
from megatrain.storage.manifest import read_manifest
from tests.helpers.commands import evaluations_of, steps_of
from tests.helpers.files import flip
from tests.recipes.same_run import same_run

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


def test_where_the_best_checkpoint_is_gone_another_is_the_best(megatrain, project, scripted):
    scripted(stop=5)
    megatrain("train cfg.yaml", *CONFIG, code=75)
    shutil.rmtree(project / "run" / "checkpoint-4")
    scripted()
    megatrain("resume run train.max_steps=7")
    assert best_of(project / "run") == ("checkpoint-7", {"step": 7, "eval_loss": 3.1})


def test_patience_without_held_out_rows_is_refused(megatrain, project):
    done = megatrain("train cfg.yaml data.eval=null checkpoint.patience=2", code=2)
    assert "checkpoint.patience: is of evaluations of held-out rows; set data.eval" in done.err


# -- divergence ------------------------------------------------------------------------------------

LAST = "train.max_steps=9"
COMMAND = re.compile(r": megatrain (.*)$", re.MULTILINE)


def printed_command(said: str) -> str:
    (command,) = COMMAND.findall(said)
    return str(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "keep"), [("precision=bfloat16", 1), ("train.max_grad_norm=null", 3)]
)
def test_the_printed_way_back_leads_to_the_end(megatrain, project, absurd_from_step_4, how, keep):
    config = (LAST, "checkpoint.every=1", f"checkpoint.keep={keep}", how)
    lost = megatrain("train cfg.yaml", *config, code=6)
    assert "go back to checkpoint-3, the newest that a finite step followed" in lost.err
    absurd_from_step_4.undo()
    command = printed_command(lost.err)
    assert command == "resume run --checkpoint checkpoint-3 train.learning_rate=0.001"
    done = megatrain(*[command], "--json")
    assert done.json["eval_loss_after"] < done.json["eval_loss_before"]
    assert [row["step"] for row in steps_of(project / "run")] == list(range(1, 10))
    assert not any(row["skipped"] for row in steps_of(project / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1", "null"])
def test_where_no_checkpoint_is_good_the_way_back_is_the_beginning(megatrain, project, every):
    rates = ("train.learning_rate=1e20", "train.warmup=0")
    lost = megatrain(
        "train cfg.yaml", LAST, *rates, f"checkpoint.every={every}", "data.eval=2", code=6
    )
    assert "no checkpoint was followed by a finite step: start again with a lower" in lost.err
    *command, rate = shlex.split(printed_command(lost.err))
    assert rate == "train.learning_rate=1e+19"
    again = megatrain(
        shlex.join(command), "train.learning_rate=1e-3", "train.max_steps=2", "--json"
    )
    assert again.json["steps"] == 2
    assert (project / "run-2" / "final").is_dir()


@pytest.mark.slow
def test_a_spike_in_a_gradient_is_said_counted_and_its_batch_kept(megatrain, project, monkeypatch):
    original, calls = Gradients.norm, iter(range(1, 999))
    monkeypatch.setattr(
        Gradients, "norm", lambda *given: original(*given) * (99 if next(calls) == 19 else 1)
    )
    done = megatrain("train cfg.yaml train.max_steps=20 --json")
    assert re.search(
        r"warning: step 19: the gradient norm \S+ is far above the median \S+ \(the batch is in "
        r"run/spike-19\.safetensors\)",
        done.err,
    )
    assert done.json["spikes"] == 1
    assert [row["step"] for row in steps_of(project / "run") if row["spike"]] == [19]
    batch = load_file(project / "run" / "spike-19.safetensors")
    assert sum(int((t != -100).sum()) for name, t in batch.items() if "labels" in name)


@pytest.mark.slow
def test_a_model_that_does_not_compute_is_refused_before_its_first_step(megatrain, project):
    broken = Path(shutil.copytree(project / "model", project / "broken")) / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"rms_norm_eps": float("nan")}))
    done = megatrain("train cfg.yaml model=broken", code=6)
    assert "the held-out loss before the first step is nan: the model's weights or sett" in done.err
    assert steps_of(project / "run") == []
    assert evaluations_of(project / "run")[0]["eval_loss"] is None


# -- another checkpoint than the newest ------------------------------------------------------------


@pytest.mark.parametrize("name", ["5", "proven"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(
    megatrain, finished_project, copied, name, monkeypatch
):
    seen: list[set[str]] = []
    original = loop.train_step

    def noted(*given: object) -> None:
        seen.append({path.name for path in copied.glob("checkpoint-*")})
        original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", noted)
    done = megatrain("resume run --checkpoint", name)
    assert "resuming from run/checkpoint-5" in done.err
    assert seen == [{"checkpoint-5", "checkpoint-10"}] * 5, "until the next save"
    same_run(copied, finished_project / "run")


def test_what_was_abandoned_goes_with_the_next_save(megatrain, copied):
    """Once: the new save of that step stays."""
    line = "resume run --checkpoint 5 checkpoint.every=2 checkpoint.keep=9 train.max_steps=12"
    megatrain(line)
    steps = {path.name for path in copied.glob("checkpoint-*")}
    assert steps == {f"checkpoint-{step}" for step in (5, 6, 8, 10, 12)}


def test_a_name_without_a_checkpoint_is_refused(megatrain, copied):
    done = megatrain("resume run --checkpoint 7", code=2)
    assert "run: has no checkpoint 7; there is checkpoint-5, checkpoint-10, last, best" in done.err


def test_no_other_is_taken_for_one_that_is_named(megatrain, copied):
    flip(copied / "checkpoint-5" / "optimizer" / "block-00001.safetensors")
    done = megatrain("resume run --checkpoint 5", code=7)
    assert "checkpoint-5/optimizer/block-00001.safetensors: does not match its" in done.err
    assert (copied / "checkpoint-10").is_dir()

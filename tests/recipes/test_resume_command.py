"""`megatrain resume`: where it goes on, what may change, and that two halves are one run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatrain.config import Config, load_config
from megatrain.config.resuming import FLAGGED, REFUSED, flatten
from megatrain.errors import MegaTrainError
from megatrain.machine import hardware
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.recipes import setup as clock
from megatrain.storage.checkpoint import find_resumable
from megatrain.storage.manifest import read_manifest
from megatrain.storage.run_folder import find_checkpoint, run_lock
from tests.helpers.commands import (
    chat_rows,
    evaluations_of,
    files_of,
    steps_of,
    write_jsonl,
)
from tests.helpers.files import flip
from tests.recipes.conftest import cut_back
from tests.recipes.same_run import same_run


def test_five_steps_and_five_more_are_ten(megatrain, finished_project, killed):
    done = megatrain("resume run")
    assert "resuming from run/checkpoint-5" in done.err
    same_run(killed, finished_project / "run")


def test_so_they_are_in_bfloat16_in_groups_and_clipped(megatrain, project, stop_after):
    options = ["precision=bfloat16", "train.max_grad_norm=0.1"]
    options += ["train.groups=2", "optimizer.weight_decay=0.1"]
    megatrain("train cfg.yaml", *options, "output=whole")
    stop_after(3)
    megatrain("train cfg.yaml", *options, "output=halves", code=75)
    megatrain("resume halves")
    same_run(project / "whole", project / "halves")


def test_the_summary_is_about_the_whole_run_where_it_says_so(megatrain, copied):
    first = evaluations_of(copied)[0]["eval_loss"]
    cut_back(copied)
    summary = megatrain("resume run --json").json
    assert summary["eval_loss_before"] == first
    assert summary["eval_loss_after"] == evaluations_of(copied)[-1]["eval_loss"]
    assert summary["steps"] == 5
    assert summary["tokens"] == sum(row["tokens"] for row in steps_of(copied)[5:])


def test_a_finished_run_is_left_as_it_is(megatrain, copied):
    before = files_of(copied)
    done = megatrain("resume run")
    assert "nothing is left to train; to go on, set a higher train.epochs or train.max" in done.err
    assert "0 steps" not in done.out
    assert files_of(copied) == before


@pytest.mark.parametrize("how", ["stopped at step 12", "killed before its first step"])
def test_a_longer_run_that_was_interrupted_is_not_taken_for_finished(
    megatrain, copied, stop_after, how
):
    if how == "stopped at step 12":
        stop_after(12)
        megatrain("resume run train.max_steps=14", code=75)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatrain.recipes.run.fit", Mock(side_effect=MegaTrainError("killed")))
            assert "killed" in megatrain("resume run train.max_steps=14", code=1).err
    assert read_manifest(copied / "final").step == 10, "the model of the first end stays"
    assert find_checkpoint(copied) == copied / ("checkpoint-12" if "12" in how else "final")
    megatrain("resume run")
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 15))
    assert read_manifest(copied / "final").step == 14


def test_a_full_final_is_resumed_from_when_nothing_else_is_left(megatrain, project):
    megatrain("train cfg.yaml checkpoint.final=full train.max_steps=1")
    shutil.rmtree(project / "run" / "checkpoint-1")
    done = megatrain("resume run train.max_steps=2")
    assert "resuming from run/final" in done.err
    assert read_manifest(project / "run" / "final").step == 2
    assert find_resumable(project / "run").path == project / "run" / "checkpoint-2"


def test_a_final_with_the_model_alone_is_a_new_beginning(megatrain, copied):
    for name in ("checkpoint-5", "checkpoint-10"):
        shutil.rmtree(copied / name)
    done = megatrain("resume run train.max_steps=12", code=7)
    assert "output=run-2, or from the trained model, with model=run/final" in done.err
    megatrain("train run/config.yaml output=run-2 model=run/final train.max_steps=1")


def test_other_rows_are_refused_and_change_no_file(megatrain, killed, monkeypatch):
    """And that before anything large is loaded."""
    write_jsonl(killed.parent / "others.jsonl", chat_rows(61))
    before = files_of(killed)
    for override in ("data.eval=9", "data.train=others.jsonl", "train.seq_len=27"):
        with monkeypatch.context() as patch:
            patch.setattr(
                "megatrain.engine.engine.Engine.open_plan", Mock(side_effect=AssertionError)
            )
            done = megatrain("resume run", override, code=3)
        assert "rows are not those of the checkpoint: the data, the tokenizer or how " in done.err
        assert "bring back what was changed, or start a new run" in done.err
        assert files_of(killed) == before, override
    megatrain("resume run")


def test_a_finished_run_goes_on_when_it_is_given_more_steps(megatrain, copied):
    done = megatrain("resume run train.max_steps=12")
    changed = "warning: train.max_steps changed from 10 to 12: the schedule is stretched to the new"
    assert changed in done.err
    assert "train.max_steps changed" in (copied / "train.log").read_text()
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 13))
    assert read_manifest(copied / "final").step == 12


@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    megatrain, finished_project, copied, finished
):
    """Before anything is read of a finished run; of another one, when it is read."""
    flip(copied / "checkpoint-10" / "model.safetensors")
    if finished:
        flip(copied / "final" / "model.safetensors")
    else:
        shutil.rmtree(copied / "final")
    done = megatrain("resume run")
    assert done.err.count("warning: run/checkpoint-10/model.safetensors: ") == 1
    assert "resuming from run/checkpoint-5" in done.err
    assert "checkpoint-10/model.safetensors" in (copied / "train.log").read_text()
    same_run(copied, finished_project / "run")


def test_without_an_intact_checkpoint_the_way_out_is_named(megatrain, copied):
    for folder in ("checkpoint-5", "checkpoint-10", "final"):
        (copied / folder / "MANIFEST.json").write_text("{")
    done = megatrain("resume run", code=7)
    assert "run: has no intact checkpoint to go on from; start again: megatrain train " in done.err
    assert done.err.count("warning: ") == 3


@pytest.mark.parametrize("folder", ["empty", "run/checkpoint-5"])
def test_a_folder_that_is_no_run_is_refused(megatrain, copied, folder):
    (copied.parent / folder).mkdir(exist_ok=True)
    done = megatrain("resume", folder, code=2)
    assert done.err.startswith(f"error: {folder}: is not a run folder (no config.yaml)")


def test_a_run_that_goes_on_elsewhere_is_not_resumed(megatrain, copied):
    with run_lock(copied):
        done = megatrain("resume run train.max_steps=12", code=2)
    assert done.err.startswith("error: run: in use by another run (process ")


def test_a_run_folder_may_be_moved(megatrain, copied, finished_project):
    cut_back(copied)
    moved = copied.rename(copied.parent / "elsewhere")
    assert "resuming in elsewhere (the run was started in " in megatrain("resume elsewhere").err
    assert not copied.exists()
    same_run(moved, finished_project / "run")


def test_so_may_model_and_rows(megatrain, project, finished_project, stop_after):
    """Both are beside the run, unlike those of a copied one."""
    stop_after(4)
    megatrain("train cfg.yaml", code=75)
    (project / "model").rename(project / "base")
    (project / "rows.jsonl").rename(project / "data.jsonl")
    done = megatrain("resume run model=base data.train=data.jsonl")
    there = [str(project / name) for name in ("model", "base")]
    changed = "model.path changed from '{}' to '{}': configuration, tokenizer and weights are the"
    assert changed.format(*there) in done.err
    assert f"{there[0]}: is no longer there; the checkpoint describes the model" in done.err
    same_run(project / "run", finished_project / "run")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed=1", "train.seed: cannot change from 0 to 1 in a resumed run, since the order"),
        ("method=orpo", "line: method: cannot change from 'sft' to 'orpo' in a resumed run"),
        ("output=other", "output: cannot change from 'run' to 'other' in a resumed run, since a"),
        ("precision=float32", "precision: cannot change from 'bfloat16' to 'float32' in a resumed"),
        ("train.max_stepz=3", "did you mean max_steps?"),
    ],
)
def test_what_cannot_change_is_refused(megatrain, project, trained_once, override, words):
    begun = trained_once("precision=bfloat16", "train.max_steps=1")
    shutil.copytree(begun / "run", project / "run", symlinks=True)
    assert words in megatrain("resume run", override, code=2).err


def test_what_changes_nothing_may_change_freely(megatrain, killed, finished_project):
    free = ("train.log_every=5", "memory.host=20GiB", "threads=2", "sample_prompt=hi")
    done = megatrain("resume run checkpoint.keep=1", *free)
    assert "warning" not in done.err
    same_run(killed, finished_project / "run")


def test_what_the_planner_chose_stays_chosen(megatrain, project, monkeypatch):
    """More memory, or another machine, at the second start would choose larger micro-batches, and
    so another order of sums."""
    monkeypatch.setitem(AUTO_MICRO_BATCH_TOKENS, "cpu", 64)
    megatrain("train cfg.yaml output=whole")
    cut_back(Path(shutil.copytree(project / "whole", project / "halves", symlinks=True)))
    monkeypatch.setitem(AUTO_MICRO_BATCH_TOKENS, "cpu", 2048)
    megatrain("resume halves")
    assert load_config("halves/config.resolved.yaml").train.micro_batch_tokens == 64
    same_run(project / "whole", project / "halves")
    done = megatrain("resume halves train.micro_batch_tokens=auto")
    assert "micro_batch_tokens changed from 64 to 'auto'" in done.err


def test_a_loss_that_is_compiled_alone_stays_so(megatrain, project, monkeypatch):
    compiled = Mock(side_effect=lambda function: function)
    monkeypatch.setattr("megatrain.engine.head.compiled", compiled)
    megatrain("train cfg.yaml compile=loss train.max_steps=1")
    assert load_config("run/config.resolved.yaml").compile == "loss"
    assert compiled.called
    compiled.reset_mock()
    megatrain("resume run train.max_steps=2")
    assert compiled.called
    compiled.reset_mock()
    done = megatrain("resume run train.max_steps=3 compile=false")
    assert "compile changed from 'loss' to False" in done.err
    assert not compiled.called


def test_gradients_may_be_computed_twice_from_a_break_on_and_groups_and_graphs_give_way(
    megatrain, finished_project, killed
):
    assert load_config("run/config.resolved.yaml").train.retained == 2
    done = megatrain("resume run memory.second_backward=true")
    assert "layers computed twice" in done.err
    same_run(killed, finished_project / "run")


def test_a_resumed_run_needs_no_room_for_what_it_has(megatrain, killed, monkeypatch):
    """Its own checkpoints fill the disk; they make room for the next ones."""
    need = json.loads((killed / "plan.json").read_text())["totals"]["disk"]["need"]
    monkeypatch.setattr(hardware, "disk_free", lambda _: need - 400_000)
    megatrain("plan cfg.yaml output=other", code=4)
    megatrain("resume run")


# -- the table -----------------------------------------------------------------------------------

FREE = {
    "hang_timeout",
    "track",
    *(
        f"checkpoint.{key}"
        for key in ("every", "keep", "final", "patience", "push_to", "push_every")
    ),
    "on_end",
    *("checkpoint.metric", "checkpoint.greater_is_better"),
    *(f"eval.{key}" for key in ("prompts", "max_new_tokens")),
    *(f"train.{key}" for key in ("eval_every", "eval_rows", "log_every")),
    *(f"memory.{key}" for key in ("gpu", "host", "nvme", "nvme_size", "nvme_blocks")),
    *(f"memory.{key}" for key in ("resident", "offload_activations", "second_backward")),
    "memory.transport",
    "memory.replicated",
    *(f"economy.{key}" for key in ("price_per_hour", "price_per_kwh", "currency")),
    *(f"economy.{key}" for key in ("gpu_power_w", "host_power_w")),
    *("threads", "device", "sample_prompt"),
}


CONFIG = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
KEYS = set(flatten(CONFIG.model_dump(mode="json")))


def test_every_row_of_the_table_is_a_key():
    sections = {key.rpartition(".")[0] for key in KEYS}
    assert set(REFUSED) | set(FLAGGED) <= KEYS | sections


def test_every_key_is_refused_flagged_or_free():
    def listed(key: str) -> bool:
        return any(key == row or key.startswith(row + ".") for row in [*REFUSED, *FLAGGED])

    assert {key for key in KEYS if not listed(key)} == FREE


# -- a day later -----------------------------------------------------------------------------------

FIRST, SECOND = date(2026, 11, 23), date(2026, 11, 24)
AtDay = Callable[[date], None]


def clock_at(day: date) -> Mock:
    return Mock(**{"now.return_value.astimezone.return_value.date.return_value": day})


@pytest.fixture
def at_day(project: Path, monkeypatch: pytest.MonkeyPatch) -> AtDay:
    """at_day(day): it is another day, and nothing is cached. The model's template says the date."""
    model = project / "model"
    source = model.resolve()
    model.unlink()
    shutil.copytree(source, model)
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y, %H:%M') }}\n" + template.read_text())

    def go(day: date) -> None:
        monkeypatch.setattr(clock, "datetime", clock_at(day))
        monkeypatch.setenv("MEGATRAIN_CACHE", str(project / f"cache-{day}"))

    return go


@pytest.mark.slow
def test_a_run_that_goes_on_a_day_later_has_equal_bits(megatrain, project, at_day):
    at_day(FIRST)
    megatrain("train cfg.yaml output=whole")
    cut_back(Path(shutil.copytree(project / "whole", project / "halves", symlinks=True)))
    at_day(SECOND)
    megatrain("resume halves")
    same_run(project / "whole", project / "halves")
    assert load_config("whole/config.yaml").data.date == "auto", "as it was asked for"
    for run in ("whole", "halves"):
        assert load_config(f"{run}/config.resolved.yaml").data.date == "2026-11-23"
    at_day(date(2026, 11, 25))
    loss = evaluations_of(project / "halves")[-1]["eval_loss"]
    assert megatrain("eval halves --json").json["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_a_new_run_is_told_its_own_day_or_the_one_that_is_set(megatrain, at_day, monkeypatch):
    at_day(FIRST)
    assert "23 Nov 2026, 00:00" in megatrain("data cfg.yaml --rows 1").out
    monkeypatch.setattr(clock, "datetime", clock_at(SECOND))  # rows of before are cached
    assert "24 Nov 2026, 00:00" in megatrain("data cfg.yaml --rows 1").out
    assert "26 Jul 2024, 00:00" in megatrain("data cfg.yaml --rows 1 data.date=2024-07-26").out


@pytest.mark.parametrize("day", ["2026-02-30", "20261123", "today", "5"])
def test_other_texts_are_no_dates(megatrain, day):
    words = "data.date: must be a date such as 2026-11-23, or auto, not "
    assert words in megatrain("data cfg.yaml", f"data.date={day}", code=2).err

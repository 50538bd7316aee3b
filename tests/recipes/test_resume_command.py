"""`megatrain resume`: where it goes on, what may change, and that ten steps are five, a stop, and five more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config, load_config
from megatrain.config.resuming import FLAGGED, REFUSED, check_changes, flatten
from megatrain.errors import MegaTrainError
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.recipes import loop
from megatrain.storage.manifest import read_manifest
from megatrain.storage.run_folder import RunLock
from tests.commands import Command, chat_rows, evaluations_of, steps_of, write_jsonl
from tests.recipes.same_run import same_run


def cut_back(run_dir: Path) -> None:
    """Leave of a finished run what a kill after step 7 leaves."""
    for name in ("final", "checkpoint-10"):
        (run_dir / name).rename(run_dir.parent / f"lost-{name}")
    for name in ("last", "best"):
        (run_dir / name).unlink()
    (run_dir / "last").symlink_to("checkpoint-5")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:9]) + '{"step": 8, "lo')


def test_five_steps_and_five_more_are_ten(
    megatrain: Command, finished_project: Path, copied: Path
) -> None:
    cut_back(copied)
    done = megatrain("resume", "run")
    assert done.code == 0, done.err
    assert "resuming from run/checkpoint-5" in done.err
    same_run(copied, finished_project / "run")


@pytest.mark.parametrize(("precision", "clipping"), [("bfloat16", "0.1"), ("float32", "null")])
def test_so_they_are_in_every_precision(
    megatrain: Command, project: Path, precision: str, clipping: str, stop_after: Any
) -> None:
    options = (
        f"precision={precision}",
        f"train.max_grad_norm={clipping}",
        "optimizer.weight_decay=0.1",
        "train.groups=2",
    )
    assert megatrain("train", "cfg.yaml", *options, "output=whole").code == 0
    stop_after(3)
    assert megatrain("train", "cfg.yaml", *options, "output=halves").code == 75
    stop_after(8)
    assert megatrain("resume", "halves").code == 75
    assert megatrain("resume", "halves").code == 0
    same_run(project / "whole", project / "halves")


def test_the_summary_is_about_the_whole_run_where_it_says_so(
    megatrain: Command, copied: Path
) -> None:
    first = evaluations_of(copied)[0]["eval_loss"]
    cut_back(copied)
    summary = megatrain("resume", "run", "--json").json
    assert summary["eval_loss_before"] == first
    assert summary["eval_loss_after"] == evaluations_of(copied)[-1]["eval_loss"]
    assert (summary["steps"], summary["tokens"]) == (
        5,
        sum(row["tokens"] for row in steps_of(copied)[5:]),
    )


def test_a_finished_run_is_left_as_it_is(megatrain: Command, copied: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in copied.rglob("*")
        if path.name not in (".lock", "train.log")
    }
    done = megatrain("resume", "run")
    assert done.code == 0
    assert (
        "run is finished, nothing is left to train; to go on, set a higher train.epochs or train.max_steps"
        in done.err
    )
    assert "0 steps" not in done.out
    assert before == {path: path.stat().st_mtime_ns for path in before}


def killed(*_: Any) -> Any:
    raise MegaTrainError("killed")


@pytest.mark.parametrize(
    "lost", [(), ("checkpoint-5", "checkpoint-10")], ids=["checkpoints", "final alone"]
)
@pytest.mark.parametrize("how", ["stopped at step 12", "killed before its first step"])
def test_a_longer_run_that_was_interrupted_is_not_taken_for_finished(
    megatrain: Command, copied: Path, stop_after: Any, how: str, lost: tuple[str, ...]
) -> None:
    for name in lost:
        shutil.rmtree(copied / name)
    if how == "stopped at step 12":
        stop_after(12)
        assert megatrain("resume", "run", "train.max_steps=14").code == 75
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatrain.recipes.run.fit", killed)
            assert "killed" in megatrain("resume", "run", "train.max_steps=14").err
    assert not (copied / "final").exists()
    done = megatrain("resume", "run")
    assert done.code == 0, done.err
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 15))
    assert read_manifest(copied / "final").step == 14


def test_a_resume_that_is_refused_changes_no_file(
    megatrain: Command, project: Path, copied: Path
) -> None:
    cut_back(copied)
    write_jsonl(project / "other.jsonl", chat_rows(30))
    before = {
        path: path.read_bytes()
        for path in copied.iterdir()
        if path.is_file() and path.name not in (".lock", "train.log")
    }
    refused = megatrain("resume", "run", "data.train=other.jsonl")
    assert refused.code == 3, refused.err
    assert "not those of the checkpoint" in refused.err
    assert before == {path: path.read_bytes() for path in before}
    assert megatrain("resume", "run").code == 0


def test_a_finished_run_goes_on_when_it_is_given_more_steps(
    megatrain: Command, copied: Path
) -> None:
    done = megatrain("resume", "run", "train.max_steps=12")
    assert done.code == 0
    assert (
        "warning: train.max_steps changed from 10 to 12: the schedule is stretched to the new length"
        in done.err
    )
    assert "train.max_steps changed" in (copied / "train.log").read_text()
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 13))
    assert json.loads((copied / "final" / "state.json").read_text())["step"] == 12


def test_given_fewer_steps_than_it_has_it_ends_where_it_is(
    megatrain: Command, copied: Path
) -> None:
    assert megatrain("resume", "run", "train.max_steps=7").code == 0
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 11))


def damage(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-7] ^= 1
    weights.unlink()  # `final` is hard links
    weights.write_bytes(data)


@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    megatrain: Command, finished_project: Path, copied: Path, finished: bool
) -> None:
    """Before anything is read of a finished run; of another one, when it is read."""
    damage(copied / "checkpoint-10" / "model.safetensors")
    if finished:
        damage(copied / "final" / "model.safetensors")
    else:
        shutil.rmtree(copied / "final")
    done = megatrain("resume", "run")
    assert done.code == 0, done.err
    assert done.err.count("warning: run/checkpoint-10/model.safetensors: ") == 1
    assert "resuming from run/checkpoint-5" in done.err
    assert "checkpoint-10/model.safetensors" in (copied / "train.log").read_text()
    same_run(copied, finished_project / "run")


def test_a_longer_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    megatrain: Command, copied: Path
) -> None:
    for folder in ("checkpoint-10", "final"):
        damage(copied / folder / "model.safetensors")
    done = megatrain("resume", "run", "train.max_steps=12")
    assert done.code == 0, done.err
    assert "resuming from run/checkpoint-5" in done.err
    assert [row["step"] for row in steps_of(copied)] == list(range(1, 13))
    assert read_manifest(copied / "final").step == 12


def test_without_an_intact_checkpoint_the_way_out_is_named(
    megatrain: Command, copied: Path
) -> None:
    for folder in ("checkpoint-5", "checkpoint-10", "final"):
        (copied / folder / "MANIFEST.json").write_text("{")
    done = megatrain("resume", "run")
    assert done.code == 7
    assert done.err.endswith(
        "run: has no intact checkpoint to go on from; start again: megatrain train run/config.yaml\n"
    )
    assert done.err.count("warning: ") == 3


@pytest.mark.parametrize("folder", ["empty", "run/checkpoint-5"])
def test_a_folder_that_is_no_run_is_refused(megatrain: Command, copied: Path, folder: str) -> None:
    (copied.parent / folder).mkdir(exist_ok=True)
    done = megatrain("resume", folder)
    assert done.code == 2
    assert done.err.startswith(f"error: {folder}: is not a run folder (no config.yaml)")


def test_a_run_that_goes_on_elsewhere_is_not_resumed(megatrain: Command, copied: Path) -> None:
    with RunLock(copied):
        done = megatrain("resume", "run", "train.max_steps=12")
    assert done.code == 2
    assert done.err.startswith("error: run: in use by another run (process ")


def test_a_run_folder_may_be_moved(
    megatrain: Command, copied: Path, finished_project: Path
) -> None:
    cut_back(copied)
    moved = copied.rename(copied.parent / "elsewhere")
    done = megatrain("resume", "elsewhere")
    assert done.code == 0, done.err
    assert not copied.exists()
    same_run(moved, finished_project / "run")


def test_so_may_model_and_rows(megatrain: Command, copied: Path, finished_project: Path) -> None:
    cut_back(copied)
    (copied.parent / "model").rename(copied.parent / "base")
    (copied.parent / "rows.jsonl").rename(copied.parent / "data.jsonl")
    done = megatrain("resume", "run", "model=base", "data.train=data.jsonl")
    assert done.code == 0, done.err
    assert (
        "warning: model.path changed from 'model' to 'base': configuration and tokenizer are read from there"
        in done.err
    )
    same_run(copied, finished_project / "run")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "train.seed=1",
            "command line: train.seed: cannot change from 0 to 1 in a resumed run, since the order of the rows follows from it",
        ),
        ("method=pretrain", "data.train_on"),
        (
            "output=other",
            "command line: output: cannot change from 'run' to 'other' in a resumed run, since a run stays in its folder",
        ),
        (
            "precision=float32",
            "command line: precision: cannot change from 'bfloat16' to 'float32' in a resumed run",
        ),
        ("train.max_stepz=3", "did you mean max_steps?"),
    ],
)
def test_what_cannot_change_is_refused(
    megatrain: Command, project: Path, override: str, words: str
) -> None:
    assert megatrain("train", "cfg.yaml", "precision=bfloat16", "train.max_steps=1").code == 0
    done = megatrain("resume", "run", override)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(("optimizer", "code"), [("adamw", 0), ("adafactor", 2)])
def test_a_run_from_before_adafactor_was_removed(
    megatrain: Command, copied: Path, optimizer: str, code: int
) -> None:
    """Every run's folder named its keys. A run of its own is refused with what to use instead, any other goes on."""
    for name, value in (
        ("config.yaml", "auto"),
        ("config.resolved.yaml", "auto" if optimizer == "adamw" else "-0.8"),
    ):
        text = (copied / name).read_text()
        assert text.count("  name: adamw\n") == 1
        (copied / name).write_text(
            text.replace(
                "  name: adamw\n",
                f"  name: {optimizer}\n  beta2_decay: {value}\n  clip_threshold: {value}\n",
            )
        )
    cut_back(copied)
    done = megatrain("resume", "run")
    assert done.code == code, done.err
    if code:
        assert (
            "optimizer.name: adafactor is no longer offered: use Lion (optimizer.name: lion), or AdamW with int8 moments"
            in done.err
        )


@pytest.mark.parametrize("override", ["data.eval=9", "data.train=others.jsonl", "train.seq_len=27"])
def test_other_rows_are_refused(megatrain: Command, copied: Path, override: str) -> None:
    write_jsonl(copied.parent / "others.jsonl", chat_rows(61))
    cut_back(copied)
    done = megatrain("resume", "run", override)
    assert done.code == 3
    assert (
        "the training rows are not those of the checkpoint: the data, the tokenizer or how rows are cut has changed"
        in done.err
    )


def test_what_changes_nothing_may_change_freely(
    megatrain: Command, copied: Path, finished_project: Path
) -> None:
    cut_back(copied)
    done = megatrain(
        "resume",
        "run",
        "train.log_every=5",
        "memory.host=20GiB",
        "threads=2",
        "checkpoint.keep=1",
        "sample_prompt=hi",
    )
    assert done.code == 0, done.err
    assert "warning" not in done.err
    same_run(copied, finished_project / "run")


def test_what_the_planner_chose_stays_chosen(
    megatrain: Command, project: Path, stop_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory, or another machine, at the second start would choose larger micro-batches, and so another order of sums."""
    monkeypatch.setitem(AUTO_MICRO_BATCH_TOKENS, "cpu", 64)
    assert megatrain("train", "cfg.yaml", "output=whole").code == 0
    stop_after(4)
    assert megatrain("train", "cfg.yaml", "output=halves").code == 75
    monkeypatch.setitem(AUTO_MICRO_BATCH_TOKENS, "cpu", 2048)
    assert megatrain("resume", "halves").code == 0
    assert load_config("halves/config.resolved.yaml").train.micro_batch_tokens == 64
    same_run(project / "whole", project / "halves")
    assert (
        "micro_batch_tokens changed from 64 to 'auto'"
        in megatrain("resume", "halves", "train.micro_batch_tokens=auto").err
    )


def test_graphs_that_the_planner_sent_to_host_RAM_stay_where_nothing_is_to_be_sent(
    megatrain: Command, project: Path, finished_project: Path, stop_after: Any
) -> None:
    stop_after(4)
    assert megatrain("train", "cfg.yaml").code == 75
    resolved = project / "run" / "config.resolved.yaml"
    text = resolved.read_text()
    assert "offload_activations: false" in text and "retained_on_host: 0" in text
    sent = text.replace("offload_activations: false", "offload_activations: true").replace(
        "retained_on_host: 0", "retained_on_host: 1"
    )
    resolved.write_text(sent)
    done = megatrain("resume", "run", "memory.offload_activations=false")
    assert done.code == 0, done.err
    same_run(project / "run", finished_project / "run")


def test_gradients_may_be_computed_twice_from_a_break_on_and_groups_and_graphs_give_way(
    megatrain: Command, project: Path, finished_project: Path, stop_after: Any
) -> None:
    stop_after(4)
    assert megatrain("train", "cfg.yaml").code == 75
    assert load_config("run/config.resolved.yaml").train.retained == 2
    done = megatrain("resume", "run", "memory.second_backward=true")
    assert done.code == 0, done.err
    assert "gradients computed twice" in done.err
    same_run(project / "run", finished_project / "run")


def test_a_resumed_run_needs_no_room_for_what_it_has(
    megatrain: Command, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checkpoints fill the disk; they make room for the next ones."""
    from megatrain.machine import hardware

    cut_back(copied)
    need = json.loads((copied / "plan.json").read_text())["totals"]["disk"]["need"]
    monkeypatch.setattr(hardware, "disk_free", lambda _: need - 400_000)
    assert megatrain("plan", "cfg.yaml", "output=other").code == 4
    assert megatrain("resume", "run").code == 0


# -- the table ----------------------------------------------------------------------------------------------------------------------

FREE = {
    "train.eval_every", "train.eval_rows", "train.log_every", "checkpoint.every", "checkpoint.keep", "memory.gpu", "memory.host",
    "memory.nvme", "memory.nvme_size", "memory.nvme_blocks", "memory.nvme_arrays",
    "memory.resident", "memory.offload_activations", "memory.second_backward", "threads", "device", "sample_prompt",
    "economy.price_per_hour", "economy.price_per_kwh", "economy.currency", "economy.gpu_power_w", "economy.host_power_w",
}  # fmt: skip


def all_keys() -> set[str]:
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
    return set(flatten(config.model_dump(mode="json")))


def test_every_row_of_the_table_is_a_key() -> None:
    keys = all_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    assert set(REFUSED) | set(FLAGGED) <= keys | sections


def test_every_key_is_refused_flagged_or_free() -> None:
    def listed(key: str) -> bool:
        return any(key == row or key.startswith(row + ".") for row in [*REFUSED, *FLAGGED])

    assert {key for key in all_keys() if not listed(key)} == FREE


def test_places_are_no_changes() -> None:
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
    assert check_changes(config, config.with_places({"model": "x.yaml:1: model"})) == []


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """stop_after(5): SIGTERM arrives during step 5."""
    import os
    import signal

    original = loop.train_step
    at: list[int] = []

    def train_step(run: loop.Run, *rest: Any, **named: Any) -> None:
        original(run, *rest, **named)
        if at and run.step == at[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", train_step)
    return lambda step: at.__setitem__(slice(None), [step])

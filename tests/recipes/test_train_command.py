"""`megatrain train`, as a user types it: what it leaves in the run folder, and what it says."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain as mt
from megatrain.config import load_config
from megatrain.config.resuming import with_absolute_paths
from megatrain.data.files import decoded
from megatrain.heartbeat import total
from megatrain.recipes import loop
from megatrain.recipes.doctor import find_machine
from megatrain.recipes.model import read_model
from megatrain.recipes.run import plan_and_loader
from megatrain.recipes.setup import open_rows, resolve_run
from megatrain.storage.run_folder import checkpoints
from tests.helpers.commands import (
    chat_rows,
    conversation,
    evaluations_of,
    files_of,
    metrics_of,
    steps_of,
    write_jsonl,
)

STEP_KEYS = """step loss aux_loss expert_load_max grad_norm lr tokens target_tokens epoch step_s
tokens_per_s tflops mfu gpu_peak_bytes host_bytes skipped spike energy_j time shares advice"""
TIME_KEYS = """compute wait_upload wait_update wait_download wait_nvme wait_exchange wait_network
data rollout reward"""
FILES = """config.yaml config.resolved.yaml plan.json env.json metrics.jsonl train.log report.html
checkpoint-5 checkpoint-10 last best proven final .lock"""


def test_the_run_folder_is_as_promised(finished):
    assert {path.name for path in finished.iterdir()} == set(FILES.split())
    assert os.readlink(finished / "last") == "checkpoint-10"
    assert oct(finished.stat().st_mode)[-3:] == "700"
    assert json.loads((finished / "plan.json").read_text())["fits"] is True
    assert json.loads((finished / "env.json").read_text())["packages"]["torch"] == version("torch")


def test_metrics_have_exactly_the_promised_keys(finished):
    for row in steps_of(finished):
        assert list(row) == STEP_KEYS.split()
        assert list(row["time"]) == list(row["shares"]) == TIME_KEYS.split()
        assert len(row["advice"]) > 20
        assert sum(row["time"].values()) == pytest.approx(row["step_s"])
    assert [row["step"] for row in steps_of(finished)] == list(range(1, 11))


def test_evaluations_come_before_the_first_step_and_at_the_end(finished):
    order = [("eval_loss" in row, row["step"]) for row in metrics_of(finished)]
    assert (order[0], order[-1]) == ((True, 0), (True, 10))
    evaluations = evaluations_of(finished)
    assert [row["step"] for row in evaluations] == [0, 5, 10]
    keys = ["step", "eval_loss", "eval_target_tokens", "eval_s"]
    assert all(list(row) == keys for row in evaluations)
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 1


def test_the_configs_read_back(finished):
    asked = load_config(finished / "config.yaml")
    assert asked == with_absolute_paths(load_config("cfg.yaml"))
    assert asked.model.path == str(finished.parent / "model")
    assert {asked.train.micro_batch_tokens, asked.precision, asked.compile} == {"auto"}
    found = load_config(finished / "config.resolved.yaml")
    assert (found.train.micro_batch_tokens, found.train.groups, found.compile) == (256, 1, False)
    assert found.precision in ("bfloat16", "float32")


def test_a_step_is_real_tokens_and_an_epoch_counts_rows(finished):
    rows = steps_of(finished)
    assert all(row["tokens"] <= 256 for row in rows)
    assert all(0 < row["target_tokens"] < row["tokens"] for row in rows)
    epochs = [row["epoch"] for row in rows]
    assert epochs == sorted(epochs)
    assert 1.0 in epochs, "an epoch's last step is as small as what is left"


@pytest.mark.parametrize("folder", ["checkpoint-5", "checkpoint-10", "last", "best", "final"])
def test_every_checkpoint_loads_in_transformers(finished, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / folder)
    tokenizer = AutoTokenizer.from_pretrained(finished / folder)
    said = [{"role": "user", "content": "Count to 3."}]
    text: Any = tokenizer.apply_chat_template(said, tokenize=False)
    assert torch.isfinite(model(**tokenizer(text, return_tensors="pt")).logits).all()


def test_a_pipe_gets_plain_lines_on_stderr_and_the_summary_on_stdout(megatrain):
    done = megatrain("train cfg.yaml train.max_steps=2")
    assert not {"\x1b", "\r"} & {*done.out, *done.err}
    assert "step 2/2  loss" in done.err and "step 2/2  loss" not in done.out
    assert "2 steps" in done.out
    assert "Traceback" not in done.err


def test_json_is_all_there_is_on_stdout(megatrain):
    done = megatrain("train cfg.yaml train.max_steps=2 'sample_prompt=Count to 2.' --json")
    summary = done.json
    assert (summary["steps"], summary["exit_code"], summary["final_dir"]) == (2, 0, "run/final")
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert summary["prompt"] == "Count to 2."
    assert isinstance(summary["answer"], str)


def test_pretraining_from_a_shape_alone(megatrain, project):
    text = "\n".join(turn["content"] for row in chat_rows() for turn in row["messages"]) * 12
    (project / "book.txt").write_text(text)
    assert len(list(decoded(project / "book.txt"))) > 1, "several pieces of 8 KiB"
    data = "data={train: book.txt, eval: 1}"
    megatrain("train cfg.yaml method=pretrain 'model={config: model}' train.max_steps=4", data)
    tokens = [row["tokens"] for row in steps_of(project / "run")]
    assert sorted(tokens)[1:] == [256] * 3, "documents are packed: one block alone is short"
    before, *_, after = [row["eval_loss"] for row in evaluations_of(project / "run")]
    assert after < before


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in steps_of(run_dir)]


CUTS = (
    "train.micro_batch_tokens=64",
    "train.groups=2",
    "train.deterministic=true",
    "threads=2",
    "per_device_train_batch_size=12",
    "train={per_device_train_batch_size: 4, gradient_accumulation_steps: 3}",
)


@pytest.mark.slow
def test_how_a_step_is_cut_changes_rounding_only(megatrain, project):
    common = ("precision=float32", "train.max_steps=2", "data.eval=null", "train.warmup=0")
    megatrain("train cfg.yaml", *common, "train.rows_per_step=12", "output=plain")
    plain = pytest.approx(losses(project / "plain"), rel=1e-5)
    for number, override in enumerate(CUTS):
        rows = () if "batch_size" in override else ("train.rows_per_step=12",)
        megatrain("train cfg.yaml", *common, *rows, override, f"output=cut-{number}")
        assert losses(project / f"cut-{number}") == plain, override
        assert torch.are_deterministic_algorithms_enabled() is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "steps", "epoch"),
    [
        (["train.epochs=2", "train.max_steps=null"], 6, 2.0),
        (["train.epochs=0.5", "train.max_steps=null"], 2, 0.5),
        (["train.epochs=1.5", "train.max_steps=null"], 5, 1.5),
        (["train.epochs=2", "train.max_steps=2"], 2, 2 / 3),
    ],
)
def test_a_run_ends_with_its_epochs_or_its_steps(megatrain, project, overrides, steps, epoch):
    rows = ["train.rows_per_step=20", "data.eval=null"]  # 60 rows: 3 steps an epoch
    megatrain("train cfg.yaml", *rows, *overrides)
    last = steps_of(project / "run")[-1]
    assert (last["step"], last["epoch"]) == (steps, pytest.approx(epoch))
    assert (project / "run" / f"checkpoint-{steps}").is_dir()


def test_without_held_out_rows_nothing_is_evaluated(megatrain, project):
    done = megatrain("train cfg.yaml data.eval=null train.max_steps=1 --json")
    assert evaluations_of(project / "run") == []
    assert not (project / "run" / "best").exists()
    assert (done.json["eval_loss_before"], done.json["prompt"]) == (None, None)


def test_a_folder_that_holds_a_run_is_refused(megatrain, copied):
    before = files_of(copied)
    done = megatrain("train cfg.yaml", code=2)
    assert "cfg.yaml:9: output: run holds a run already; continue it with `megatrain re" in done.err
    assert files_of(copied) == before


def test_a_requeued_job_goes_on_with_the_same_command(megatrain, project, monkeypatch):
    """Slurm counts how often, and the job keeps its number."""
    command = "train cfg.yaml data.eval=null train.max_steps=4 checkpoint.every=2"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    megatrain(command)
    shutil.rmtree(project / "run" / "final")
    (newest,) = (path for path in checkpoints(project / "run") if path.name == "checkpoint-4")
    shutil.rmtree(newest)
    assert "holds a run already" in megatrain(command, code=2).err  # a second command of the job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    said = megatrain(f"{command}0").err
    assert "says of checkpoint.every does not count" in said and (project / "run/final").is_dir()
    assert [step["step"] for step in steps_of(project / "run")] == [1, 2, 3, 4]
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert "holds a run already" in megatrain(command, code=2).err


def test_a_pod_that_is_started_again_goes_on_with_the_same_command(megatrain, project, monkeypatch):
    """Its manifest names the job."""
    command = "train cfg.yaml data.eval=null train.max_steps=2"
    monkeypatch.setenv("MEGATRAIN_JOB", "uid-1")
    megatrain(command)
    assert "run is finished, nothing is left to train" in megatrain(command).err
    monkeypatch.setenv("MEGATRAIN_JOB", "uid-2")
    assert "holds a run already" in megatrain(command, code=2).err


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(megatrain, copied):
    for path in [*checkpoints(copied), copied / "final"]:
        path.rename(copied.parent / path.name)
    megatrain("train run/config.yaml output=run train.max_steps=1")
    assert [row["step"] for row in metrics_of(copied)] == [0, 1, 1]


def test_a_plan_from_python(project):
    assert mt.plan("cfg.yaml").fits
    assert mt.plan("cfg.yaml").fits, "again: the first call imports what it needs"


# -- sequence packing ----------------------------------------------------------------------------


def test_packed_rows_that_leave_room_are_planned_with_it(project):
    """Rows of somewhat more than half of a sequence: none has room for two."""
    write_jsonl(project / "rows.jsonl", [conversation("say", "a word " * 50)] * 40)
    keys = ["data.packing=true", "data.eval=null", "train.max_steps=3"]
    config = load_config("cfg.yaml", keys)
    before = total()
    rows, *_ = open_rows(config, read_model(config))
    assert total() > before, "that rows are read is a sign of life"
    length = int(rows.lengths[0])
    keys += [f"train.seq_len={2 * length - 16}", f"train.tokens_per_step={8 * length}"]
    config = load_config("cfg.yaml", keys)
    model = read_model(config)
    resolved = resolve_run(config, model, find_machine(config))
    plan, found = plan_and_loader(config, model, resolved, rows)
    loader: Any = found
    steps = [[micro["input_ids"].numel() for micro in batch.micro_batches] for batch in loader]
    largest = max(map(sum, steps))
    assert largest == 8 * (2 * length - 16) > 1.5 * plan.job.tokens_per_step
    assert plan.choices.group_tokens(plan.job) * plan.choices.groups >= largest


@pytest.mark.slow
def test_packed_rows_train_as_padded_ones_do(megatrain, project):
    found = {}
    for packing in ("true", "false", "auto"):
        keys = (f"data.packing={packing}", "precision=float32", f"output=run-{packing}")
        megatrain("train cfg.yaml train.max_steps=5", *keys)
        run = project / f"run-{packing}"
        # auto: not on a CPU
        assert load_config(run / "config.resolved.yaml").data.packing is (packing == "true")
        found[packing] = [*losses(run), *(row["eval_loss"] for row in evaluations_of(run))]
    assert found["auto"] == found["false"] != found["true"]
    assert found["true"] == pytest.approx(found["false"], rel=1e-4)


def test_a_run_says_what_it_took_beside_what_was_planned(megatrain, project):
    prices = ("economy.price_per_hour=36", "economy.host_power_w=100")
    found = megatrain("train cfg.yaml train.max_steps=2 --json", *prices).json
    steps = steps_of(project / "run")
    seconds = sum(row["step_s"] for row in steps)
    assert found["economy"]["cost"] == pytest.approx(0.01 * seconds)
    assert found["economy"]["kwh"] == pytest.approx(100 * seconds / 3.6e6)
    assert found["economy"]["tokens"] == found["tokens"]
    assert found["planned_economy"]["hours"] > 0
    for row in steps:
        assert row["energy_j"] == pytest.approx(100 * row["step_s"])
    assert json.loads((project / "run" / "plan.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_a_run_is_tracked_line_by_line_and_again_after_a_resume(megatrain, project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    megatrain("train cfg.yaml track=tensorboard train.max_steps=2")
    megatrain("resume run train.max_steps=4")
    events = EventAccumulator(str(project / "run" / "tensorboard"))
    events.Reload()
    sent = {one.step: one.value for one in events.Scalars("loss")}
    assert sent == {row["step"]: pytest.approx(row["loss"]) for row in steps_of(project / "run")}


def test_a_tracker_that_is_not_installed_is_refused_at_once(megatrain, project, monkeypatch):
    from megatrain.reporting import trackers

    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    refused = megatrain("train cfg.yaml track=wandb", code=2)
    assert "track: wandb is not installed; pip install 'megatrain[wandb]'" in refused.err
    assert not (project / "run").exists()


def test_evaluations_and_saves_come_at_shares_of_an_epoch(megatrain, project):
    whole = "train cfg.yaml train.epochs=1.5 train.max_steps=null checkpoint.keep=9"
    megatrain(f"{whole} train.eval_every=0.25 checkpoint.every=epoch")
    run = project / "run"
    decided = load_config(run / "config.resolved.yaml")
    of_epoch, quarter = decided.checkpoint.every, decided.train.eval_every
    assert isinstance(of_epoch, int) and isinstance(quarter, int)
    assert quarter == round(of_epoch / 4) and of_epoch > 4
    last = steps_of(run)[-1]["step"]
    evaluated = [row["step"] for row in metrics_of(run) if "eval_loss" in row]
    assert evaluated == sorted({0, of_epoch, last, *range(quarter, last, quarter)})
    saved = [f"checkpoint-{step}" for step in (of_epoch, last)]
    assert {*saved} <= {path.name for path in run.iterdir()}
    assert load_config(run / "config.yaml").train.eval_every == 0.25
    refused = megatrain("train cfg.yaml output=no data.streaming=true train.eval_every=0.5", code=2)
    assert "train.eval_every: a share is of an epoch, whose size is not known" in refused.err


@pytest.mark.parametrize("save", [None, 1, 4, 5, 20])
@pytest.mark.parametrize("look", [None, 1, 3, 6])
@pytest.mark.parametrize("evaluates", [True, False])
def test_what_is_still_to_come_is_counted_as_the_loop_does_it(save, look, evaluates):
    for step in range(13):
        later = range(step + 1, 13)
        saves = {n for n in later if n == 12 or loop.due(save, n)}
        looks = saves | {n for n in later if loop.due(look, n)}
        expected = {"saving": len(saves), "evaluating": len(looks) if evaluates else 0}
        assert loop.still_to_come(save, look, evaluates, 12, step) == expected

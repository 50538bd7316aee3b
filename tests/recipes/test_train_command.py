"""`megatrain train`, as a user types it: what it leaves in the run folder, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import megatrain as mt
from megatrain.config import load_config
from megatrain.data.readers import read_text
from megatrain.engine.resolved import packs
from megatrain.models.skeleton import Skeleton
from megatrain.recipes import loop
from megatrain.recipes.rows import read_rows
from megatrain.recipes.run import plan_and_loader
from megatrain.recipes.setup import prepare, read_model
from megatrain.storage.run_folder import checkpoints
from tests.commands import (
    Command,
    chat_rows,
    environment,
    evaluations_of,
    metrics_of,
    steps_of,
    write_jsonl,
)
from tests.support import tiny_config

STEP_KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "target_tokens", "epoch", "step_s", "tokens_per_s", "tflops", "mfu", "gpu_peak_bytes",
    "host_bytes", "skipped", "energy_j", "time", "shares", "advice",
]  # fmt: skip
TIME_KEYS = ["compute", "wait_upload", "wait_update", "wait_download", "wait_nvme", "data"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def test_the_run_folder_is_as_promised(finished: Path) -> None:
    assert names(finished) == {
        "config.yaml", "config.resolved.yaml", "plan.json", "env.json", "metrics.jsonl", "train.log",
        "checkpoint-5", "checkpoint-10", "last", "best", "final",
    }  # fmt: skip
    assert os.readlink(finished / "last") == "checkpoint-10"
    assert oct(finished.stat().st_mode)[-3:] == "700"


def test_metrics_have_exactly_the_promised_keys(finished: Path) -> None:
    for row in steps_of(finished):
        assert list(row) == STEP_KEYS
        assert list(row["time"]) == list(row["shares"]) == TIME_KEYS
        assert len(row["advice"]) > 20
        assert sum(row["time"].values()) == pytest.approx(row["step_s"])
    assert [row["step"] for row in steps_of(finished)] == list(range(1, 11))


def test_evaluations_come_before_the_first_step_and_at_the_end(finished: Path) -> None:
    order = [("eval_loss" in row, row["step"]) for row in metrics_of(finished)]
    assert order[0] == (True, 0)
    assert order[-1] == (True, 10)
    assert [row["step"] for row in evaluations_of(finished)] == [0, 5, 10]
    assert all(
        list(row) == ["step", "eval_loss", "eval_target_tokens", "eval_s"]
        for row in evaluations_of(finished)
    )


def test_the_held_out_loss_falls(finished: Path) -> None:
    before, *_, after = [row["eval_loss"] for row in evaluations_of(finished)]
    assert after < before - 1


def test_the_configs_read_back(finished: Path) -> None:
    asked, resolved = (
        load_config(finished / "config.yaml"),
        load_config(finished / "config.resolved.yaml"),
    )
    assert asked == load_config("cfg.yaml")
    assert (asked.train.micro_batch_tokens, asked.precision, asked.compile) == (
        "auto",
        "auto",
        "auto",
    )
    assert (resolved.train.micro_batch_tokens, resolved.train.groups, resolved.compile) == (
        256,
        1,
        False,
    )
    assert resolved.precision in ("bfloat16", "float32")


def test_plan_and_environment_are_json(finished: Path) -> None:
    assert json.loads((finished / "plan.json").read_text())["fits"] is True
    assert json.loads((finished / "env.json").read_text())["packages"]["torch"] == torch.__version__


def test_a_step_is_real_tokens_and_an_epoch_counts_rows(finished: Path) -> None:
    rows = steps_of(finished)
    assert all(row["tokens"] <= 256 for row in rows)
    assert all(0 < row["target_tokens"] < row["tokens"] for row in rows)
    epochs = [row["epoch"] for row in rows]
    assert epochs == sorted(epochs)
    assert 1.0 in epochs, "an epoch's last step is as small as what is left"


def test_rates_are_those_of_transformers(finished: Path) -> None:
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    for row in steps_of(finished):
        assert row["lr"] == pytest.approx(schedule.get_last_lr()[0], abs=1e-12), row["step"]
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("folder", ["checkpoint-5", "checkpoint-10", "last", "best", "final"])
def test_every_checkpoint_loads_in_transformers(finished: Path, folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / folder)
    tokenizer = AutoTokenizer.from_pretrained(finished / folder)
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to 3."}], tokenize=False
    )
    assert torch.isfinite(model(**tokenizer(text, return_tensors="pt")).logits).all()


def test_the_log_tells_the_story(finished: Path) -> None:
    log = (finished / "train.log").read_text()
    for words in (
        "52 rows",
        "8 rows are held out",
        "step 0: held-out loss",
        "step 10/10",
        "saved run/checkpoint-10",
    ):
        assert words in log


def test_a_pipe_gets_plain_lines_on_stderr_and_the_summary_on_stdout(megatrain: Command) -> None:
    done = megatrain("train", "cfg.yaml", "train.max_steps=2")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert "step 2/2  loss" in done.err
    assert "step 2/2  loss" not in done.out
    assert "2 steps" in done.out
    assert "Traceback" not in done.err


def test_json_is_all_there_is_on_stdout(megatrain: Command) -> None:
    done = megatrain(
        "train", "cfg.yaml", "train.max_steps=2", "sample_prompt=Count to 2.", "--json"
    )
    summary = done.json
    assert (summary["steps"], summary["exit_code"], summary["final_dir"]) == (2, 0, "run/final")
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert summary["prompt"] == "Count to 2."
    assert isinstance(summary["answer"], str)


def test_pretraining_from_a_shape_alone(megatrain: Command, project: Path) -> None:
    text = (
        "\n".join(turn["content"] for row in chat_rows() for turn in row["messages"]) * 12
    )  # several pieces of 8 KiB
    (project / "book.txt").write_text(text)
    assert len(list(read_text(project / "book.txt"))) > 1
    done = megatrain(
        "train",
        "cfg.yaml",
        "method=pretrain",
        "model={config: model}",
        "data={train: book.txt, eval: 1}",
        "train.max_steps=4",
    )
    assert done.code == 0, done.err
    assert [row["tokens"] for row in steps_of(project / "run")] == [256] * 4, (
        "documents are packed: no step is short"
    )
    before, *_, after = [row["eval_loss"] for row in evaluations_of(project / "run")]
    assert after < before


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in steps_of(run_dir)]


@pytest.mark.parametrize(
    "override",
    [
        "train.micro_batch_tokens=64",
        "train.groups=2",
        "train.deterministic=true",
        "threads=2",
        "per_device_train_batch_size=12",
        "train={per_device_train_batch_size: 4, gradient_accumulation_steps: 3}",
    ],
)
def test_how_a_step_is_cut_changes_rounding_only(
    megatrain: Command, project: Path, override: str
) -> None:
    rows = ("train.rows_per_step=12",) if "batch_size" not in override else ()
    common = ("precision=float32", "train.max_steps=3", "data.eval=null", "train.warmup=0")
    assert (
        megatrain("train", "cfg.yaml", *common, "train.rows_per_step=12", "output=plain").code == 0
    )
    done = megatrain("train", "cfg.yaml", *common, *rows, override, "output=cut")
    assert done.code == 0, done.err
    assert losses(project / "cut") == pytest.approx(losses(project / "plain"), rel=1e-5)
    assert torch.are_deterministic_algorithms_enabled() is False


def test_without_clipping_the_first_steps_are_the_same(megatrain: Command, project: Path) -> None:
    common = ("precision=float32", "train.max_steps=3", "data.eval=null")
    assert (
        megatrain("train", "cfg.yaml", *common, "train.max_grad_norm=1e9", "output=clipped").code
        == 0
    )
    assert (
        megatrain("train", "cfg.yaml", *common, "train.max_grad_norm=null", "output=free").code == 0
    )
    assert losses(project / "free") == pytest.approx(losses(project / "clipped"), rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "steps", "epoch"),
    [
        (["train.epochs=2", "train.max_steps=null"], 10, 2.0),
        (["train.epochs=0.5", "train.max_steps=null"], 3, 0.5),
        (["train.epochs=1.5", "train.max_steps=null"], 8, 1.5),
        (["train.epochs=2", "train.max_steps=3"], 3, 0.6),
    ],
)
def test_a_run_ends_with_its_epochs_or_its_steps(
    megatrain: Command, project: Path, overrides: list[str], steps: int, epoch: float
) -> None:
    rows = ["train.rows_per_step=12", "data.eval=null"]  # 60 rows: 5 steps an epoch
    assert megatrain("train", "cfg.yaml", *rows, *overrides).code == 0
    last = steps_of(project / "run")[-1]
    assert (last["step"], last["epoch"]) == (steps, pytest.approx(epoch))
    assert (project / "run" / f"checkpoint-{steps}").is_dir()


def test_rows_without_an_answer_left_are_counted_and_dropped(
    megatrain: Command, project: Path
) -> None:
    long = "word " * 60
    rows = [
        {
            "messages": [
                {"role": "user", "content": long + str(n)},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for n in range(7)
    ]
    write_jsonl(project / "rows.jsonl", [*chat_rows(30), *rows])
    done = megatrain("train", "cfg.yaml", "train.max_steps=2")
    assert done.code == 0
    assert "7 rows dropped, because no token to train on is left in them" in done.err
    assert all(row["loss"] > 0 for row in steps_of(project / "run"))


def test_held_out_rows_may_be_a_file_of_their_own(megatrain: Command, project: Path) -> None:
    write_jsonl(project / "held.jsonl", chat_rows(65)[60:])
    done = megatrain("train", "cfg.yaml", "data.eval=held.jsonl", "train.max_steps=1")
    assert "60 rows, " in done.err
    assert "5 rows are held out" in done.err
    assert len(evaluations_of(project / "run")) == 2


def test_rows_may_be_a_saved_data_set(megatrain: Command, project: Path) -> None:
    splits = {"train": chat_rows(60), "held": chat_rows(65)[60:]}
    saved = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(project / "saved")
    named = ("data.train=saved", "data.eval=saved:held", "train.max_steps=1")
    done = megatrain("train", "cfg.yaml", *named)
    assert "60 rows, " in done.err
    assert "5 rows are held out" in done.err
    missing = megatrain("train", "cfg.yaml", *named, "data.split=test", "output=other")
    assert missing.code == 3
    assert "saved: split 'test': Unknown split" in missing.err


def test_without_held_out_rows_nothing_is_evaluated(megatrain: Command, project: Path) -> None:
    done = megatrain("train", "cfg.yaml", "data.eval=null", "train.max_steps=1", "--json")
    assert evaluations_of(project / "run") == []
    assert not (project / "run" / "best").exists()
    assert (done.json["eval_loss_before"], done.json["prompt"]) == (None, None)


def test_best_is_the_lowest_held_out_loss(
    megatrain: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([6.0, 5.0, 3.0, 4.0, float("nan"), 3.5])
    monkeypatch.setattr(loop, "mean_loss", lambda *_: (next(told), 10))
    done = megatrain(
        "train", "cfg.yaml", "train.max_steps=5", "checkpoint={every: 1, keep: 1}", "--json"
    )
    assert done.json["best_step"] == 2
    assert os.readlink(project / "run" / "best") == "checkpoint-2"
    assert {path.name for path in checkpoints(project / "run")} == {"checkpoint-2", "checkpoint-5"}
    assert evaluations_of(project / "run")[4]["eval_loss"] is None, "JSON has no NaN"


def test_a_folder_that_holds_a_run_is_refused(megatrain: Command, copied: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in copied.rglob("*")
        if path.name not in (".lock", "train.log")
    }
    done = megatrain("train", "cfg.yaml")
    assert done.code == 2
    assert (
        "cfg.yaml:17: output: run holds a run already; continue it with `megatrain resume run`"
        in done.err
    )
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(
    megatrain: Command, copied: Path
) -> None:
    for path in [*checkpoints(copied), copied / "final"]:
        path.rename(copied.parent / path.name)
    assert megatrain("train", "run/config.yaml", "train.max_steps=1").code == 0
    assert [row["step"] for row in metrics_of(copied)] == [0, 1, 1]


def test_from_python(project: Path) -> None:
    summary = mt.train("cfg.yaml")
    assert (summary.steps, summary.exit_code, summary.final_dir) == (10, 0, Path("run/final"))
    assert (Path("run") / "final" / "model.safetensors").is_file()


def test_a_plan_from_python(project: Path) -> None:
    assert mt.plan("cfg.yaml").fits
    assert mt.plan("cfg.yaml").fits, "again: the first call imports what it needs"


def test_two_runs_in_one_folder_are_refused_by_the_lock(
    megatrain: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    first: Callable[..., None] = loop.train_step

    def train_step(run: Any, *rest: Any, **named: Any) -> None:
        if run.step == 1:
            command = [sys.executable, "-m", "megatrain", "train", "cfg.yaml"]
            seen.append(
                subprocess.run(
                    command, capture_output=True, text=True, check=False, env=environment()
                )
            )
        first(run, *rest, **named)

    monkeypatch.setattr(loop, "train_step", train_step)
    assert megatrain("train", "cfg.yaml", "train.max_steps=2").code == 0
    assert seen[0].returncode == 2
    assert f"error: run: in use by another run (process {os.getpid()})" in seen[0].stderr


# -- rows that share sequences ------------------------------------------------------------------------------------------------------


def test_packed_rows_that_leave_room_are_planned_with_it(project: Path) -> None:
    """Rows of somewhat more than half of a sequence: none has room for two."""
    said = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a word " * 50}]
    write_jsonl(project / "rows.jsonl", [{"messages": said}] * 40)
    keys = ["data.packing=true", "data.eval=null", "train.max_steps=3"]
    config = load_config("cfg.yaml", keys)
    rows, _ = read_rows(config, read_model(config))
    length = int(rows.lengths[0])
    config = load_config(
        "cfg.yaml",
        [*keys, f"train.seq_len={2 * length - 16}", f"train.tokens_per_step={8 * length}"],
    )
    plan, loader = plan_and_loader(prepare(config), rows)
    largest = max(
        sum(micro["input_ids"].numel() for micro in batch.micro_batches) for batch in loader
    )
    assert largest == 8 * (2 * length - 16)
    assert (
        plan.choices.group_tokens(plan.job) * plan.choices.groups
        >= largest
        > 1.5 * plan.job.tokens_per_step
    )


def test_packed_rows_train_as_padded_ones_do(megatrain: Command) -> None:
    losses = {}
    for packing in ("true", "false", "auto"):
        done = megatrain(
            "train",
            "cfg.yaml",
            f"data.packing={packing}",
            "precision=float32",
            f"output=run-{packing}",
        )
        assert done.code == 0, done.err
        run = Path(f"run-{packing}")
        assert load_config(run / "config.resolved.yaml").data.packing is (
            packing == "true"
        )  # auto: not on a CPU
        losses[packing] = [row["loss"] for row in steps_of(run)] + [
            row["eval_loss"] for row in evaluations_of(run)
        ]
    assert losses["auto"] == losses["false"] != losses["true"]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "packing", "seq_len", "packed"),
    [
        ("llama", None, 2048, True),  # the default is auto
        ("llama", "auto", 4096, True),
        ("llama", "auto", 4097, False),
        ("llama", "true", 4097, True),
        ("llama", "false", 2048, False),
        ("opt", "auto", 2048, False),  # its rows would see each other
    ],
)
def test_auto_packs_short_sequences_on_a_gpu(
    project: Path, family: str, packing: str | None, seq_len: int, packed: bool
) -> None:
    config = load_config(
        "cfg.yaml", [f"train.seq_len={seq_len}", *([f"data.packing={packing}"] if packing else [])]
    )
    skeleton = Skeleton(tiny_config(family))
    assert packs(skeleton, config.data.packing, config.train.seq_len, "cuda") == packed


def test_packing_is_refused_where_rows_would_see_each_other(
    megatrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Skeleton, "separates_documents", lambda _: False)
    done = megatrain("plan", "cfg.yaml", "sample_packing=true")
    assert done.code == 2
    assert (
        "a llama model does not mask attention between examples packed into one sequence; set data.packing: false"
        in done.err
    )
    assert megatrain("plan", "cfg.yaml", "data.packing=auto").code == 0


def test_a_run_says_what_it_took_beside_what_was_planned(megatrain: Command) -> None:
    done = megatrain(
        "train",
        "cfg.yaml",
        "train.max_steps=2",
        "economy.price_per_hour=36",
        "economy.host_power_w=100",
        "output=priced",
        "--json",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    seconds = sum(row["step_s"] for row in steps_of(Path("priced")))
    assert found["economy"]["cost"] == pytest.approx(0.01 * seconds)
    assert found["economy"]["kwh"] == pytest.approx(100 * seconds / 3.6e6)
    assert found["economy"]["tokens"] == found["tokens"]
    assert found["planned_economy"]["hours"] > 0
    assert [row["energy_j"] for row in steps_of(Path("priced"))] == pytest.approx(
        [100 * row["step_s"] for row in steps_of(Path("priced"))]
    )
    assert json.loads((Path("priced") / "plan.json").read_text())["steps"] == 2

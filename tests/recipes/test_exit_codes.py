"""Every way in which a command can fail: its exit code, and one sentence that says what, where and
what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatrain.engine.gradients import Gradients
from megatrain.machine import hardware
from megatrain.recipes import loop
from tests.helpers.commands import (
    POSITIONS,
    Answer,
    chat_rows,
    environment,
    metrics_of,
    steps_of,
    write_jsonl,
)


def sentence(done: Answer) -> str:
    """The error: the last line of stderr, and the only one that is an error."""
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    return errors[0].removeprefix("error: ")


# override: how the error begins
CONFIG_FAULTS = {
    "train.learning_rte=1": "train.learning_rte: did you mean learning_rate?",
    "train.seq_len=1e3x": "train.seq_len: must be a whole number of tokens of at least 2, not",
    "train.seq_len=129": f"train.seq_len: 129 exceeds the {POSITIONS} positions of this model; set",
    "train.micro_batch_tokens=32": "train.micro_batch_tokens: 32 cannot hold one row of train.seq",
    "train.rows_per_step=0": "train.rows_per_step: must be a whole number of at least 1, or null",
    "memory.host=80": "memory.host: must be a size of at least 1 MiB such as 80GiB",
    "fp16=true": "fp16: training in float16 needs loss scaling",
    "save_only_model=true": "save_only_model: a checkpoint holds what an exact resume needs",
    "checkpoint.save_optimizer=false": "checkpoint.save_optimizer: ",
}
MODEL_FAULTS = {
    "modle": "modle: is no local folder (did you mean model?)",
    "rows.jsonl": "rows.jsonl: is a file; name the folder that holds the model's config.json",
    "empty": "empty: has no config.json; name a folder that holds a Hugging Face model",
    "no-weights": "no-weights: has neither model.safetensors nor model.safetensors.index.json",
    "no-tokenizer": "no-tokenizer: the tokenizer cannot be used",
}
PLACE = "command line: data"
DATA_FAULTS = {
    "data.train=row.jsonl": f"{PLACE}.train: row.jsonl: no such file (did you mean rows.jsonl?)",
    "data.train=[rows.jsonl, row.jsonl]": f"{PLACE}.train: row.jsonl: no such file (did you mean",
    "data.train=no/such": f"{PLACE}.train: no/such: no such file or folder (nor is there a folder",
    "data.train=*.csv": f"{PLACE}.train: *.csv: no file matches",
    "data.split=test": "rows.jsonl: a file has no split 'test'; name a folder with splits",
    "data.train=rows.jsonl:test": f"{PLACE}.train: rows.jsonl:test: rows.jsonl is a file, which",
    "data.train=empty.jsonl": "empty.jsonl: holds no rows",
    "data.train=empty": f"{PLACE}.train: empty: no data files in this folder; known types",
    "data.train=broken.jsonl": "broken.jsonl:2: broken JSON at column 2",
    "data.train=questions.jsonl": "questions.jsonl: no token to train on is left in 3 rows",
    "data.eval=60": "data.eval: 60 holds out 60 of 60 rows; at least one has to be left",
    "data.eval=gone.jsonl": f"{PLACE}.eval: gone.jsonl: no such file",
    "data.format=alpaca": "rows.jsonl:1: field 'instruction' is missing",
    "model=no-template": "rows.jsonl:1: the tokenizer has no chat template for conversations",
}


@pytest.fixture
def broken(project: Path) -> Path:
    """Folders and files with one fault each."""
    (project / "empty").mkdir()
    (project / "empty.jsonl").write_text("")
    (project / "broken.jsonl").write_text(json.dumps(chat_rows(1)[0]) + "\n{x\n")
    questions = [{"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(3)]
    write_jsonl(project / "questions.jsonl", questions)
    lacking = {
        "weights": "model.safetensors",
        "tokenizer": "tokenizer*.json",
        "template": "*.jinja",
    }
    for name, files in lacking.items():
        folder = Path(shutil.copytree(project / "model", project / f"no-{name}"))
        for path in folder.glob(files):
            path.unlink()
    return project


@pytest.mark.parametrize(("override", "words"), CONFIG_FAULTS.items())
def test_a_config_is_2(megatrain, broken, override, words):
    done = megatrain("train cfg.yaml", override, code=2)
    assert sentence(done).startswith(f"command line: {words}")


@pytest.mark.parametrize(("folder", "words"), MODEL_FAULTS.items())
def test_a_model_is_2(megatrain, broken, folder, words):
    done = megatrain("train cfg.yaml", f"model={folder}", code=2)
    assert sentence(done).startswith(words)


@pytest.mark.parametrize(("override", "words"), DATA_FAULTS.items())
def test_data_is_3(megatrain, broken, override, words):
    done = megatrain("train cfg.yaml", override, code=3)
    assert sentence(done).startswith(words)


@pytest.mark.parametrize("command", ["train", "data"])
def test_data_that_is_not_there_is_known_before_torch_is_imported(project, command):
    (project / "cfg.yaml").write_text("model: model\ndata:\n  train: row.jsonl\n")
    before = sorted(project.rglob("*"))
    run = f"print(main(['{command}', 'cfg.yaml']), 'torch' in sys.modules)"
    script = f"import sys; from megatrain.cli import main; {run}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=60,
    )
    words = "row.jsonl: no such file (did you mean rows.jsonl?)"
    assert done.stderr == f"error: cfg.yaml:3: data.train: {words}\n"
    assert done.stdout == "3 False\n"
    assert sorted(project.rglob("*")) == before


def test_rows_to_evaluate_on_that_are_not_there_are_named_at_once(megatrain, project):
    assert sentence(megatrain("eval model --data no/such", code=3)).startswith(
        "--data: no/such: no"
    )


def test_bad_rows_are_skipped_if_asked(megatrain, broken):
    write_jsonl(broken / "rows.jsonl", [*chat_rows(20), {"messages": 5}])
    megatrain("train cfg.yaml", code=3)
    done = megatrain("train cfg.yaml data.on_bad_row=skip train.max_steps=1")
    assert "1 of 21 rows are bad and skipped; the first: rows.jsonl:21" in done.err


@pytest.mark.parametrize("command", ["train", "plan"])
def test_too_little_memory_is_4_before_rows_are_read(megatrain, project, command):
    (project / "rows.jsonl").write_text("{broken")
    done = megatrain(command, "cfg.yaml", "memory.host=64MiB", code=4)
    # how much it needs depends on the machine: the process itself counts
    words = r"does not fit: it needs \d+\.\d\d GiB of host RAM, where 0\.06 GiB can be had"
    assert re.search(words, done.out + done.err)
    assert not (project / "run" / "checkpoint-5").exists()


def test_a_small_budget_that_fits_is_kept_to(megatrain, project):
    need = megatrain("plan cfg.yaml --json").json["totals"]["host"]["need"]
    # the process itself grows a little
    megatrain("plan cfg.yaml", f"memory.host={int(1.02 * need)}")
    megatrain("plan cfg.yaml", f"memory.host={int(0.9 * need)}", code=4)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_too_small_a_disk_is_4(megatrain, project, monkeypatch, command):
    monkeypatch.setattr(hardware, "disk_free", lambda _: 10_000)
    done = megatrain(command, "cfg.yaml", code=4)
    assert "GiB of disk space, where 0.00 GiB can be had" in done.out + done.err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_an_allocation_that_fails_is_5(megatrain, project, monkeypatch, error):
    monkeypatch.setattr(loop, "train_step", Mock(side_effect=error))
    words = sentence(megatrain("train cfg.yaml", code=5))
    assert words.startswith("out of host memory, although only ")
    assert "close other programs, or set train.micro_batch_tokens: 128" in words


@pytest.mark.usefixtures("absurd_from_step_4")
def test_divergence_is_6_and_good_checkpoints_stay(megatrain, project):
    done = megatrain("train cfg.yaml train.max_steps=20 checkpoint.every=2", code=6)
    assert sentence(done).startswith(
        "5 steps in a row were not finite (the batch is in run/bad-batch"
    )
    assert "go back to checkpoint-2, the newest that a finite step followed" in sentence(done)
    assert (project / "run" / "bad-batch-9.safetensors").is_file()
    assert (project / "run" / "checkpoint-2").is_dir(), "none of the lost states took its place"
    skipped = [row for row in steps_of(project / "run") if row["skipped"]]
    assert [row["step"] for row in skipped] == [5, 6, 7, 8, 9]
    assert all(row["grad_norm"] is None for row in skipped), "JSON has no NaN"


def test_one_bad_batch_is_skipped_and_forgotten(megatrain, project, monkeypatch):
    original, norms = Gradients.norm, iter(range(1, 99))
    monkeypatch.setattr(
        Gradients, "norm", lambda *given: float("inf") if next(norms) == 4 else original(*given)
    )
    done = megatrain("train cfg.yaml --json")
    assert done.json["skipped"] == 1
    assert "warning: step 4: the loss or the gradient is not finite; skipped, the weig" in done.err
    assert [row["step"] for row in steps_of(project / "run") if row["skipped"]] == [4]


def test_an_unwritable_folder_is_7(megatrain, project):
    done = megatrain("train cfg.yaml output=cfg.yaml", code=7)
    assert sentence(done).startswith("cfg.yaml: cannot make the run folder: Not a directory")


def test_what_nobody_foresaw_is_1_and_its_traceback_is_in_the_log(megatrain, project, monkeypatch):
    monkeypatch.setattr(loop, "train_step", Mock(side_effect=ValueError("deep down")))
    words = sentence(megatrain("train cfg.yaml", code=1))
    assert words == "unexpected ValueError: deep down; run again with --debug for the traceback"
    log = (project / "run" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert len(metrics_of(project / "run")) == 1
    assert "Traceback" in megatrain("--debug train cfg.yaml", code=1).err

"""`megatrain import`: what it writes and says, its exit codes, and that a plan takes its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.config import load_config

THEIRS = """
base_model: model
datasets: [{path: rows.jsonl, ds_type: json, type: chat_template}]
val_set_size: 8
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 0.01
bf16: false
deepspeed: zero3.json
output_dir: run
"""
FACTORY = """
model_name_or_path: model
stage: sft
finetuning_type: full
dataset: ours
dataset_dir: .
cutoff_len: 64
per_device_train_batch_size: 4
output_dir: run
"""
TRL = """
model_name_or_path: model
dataset_name: rows.jsonl
max_length: 64
per_device_train_batch_size: 4
assistant_only_loss: true
output_dir: run
"""
OURS = {
    "ours": {"file_name": "rows.jsonl", "formatting": "openai", "columns": {"messages": "messages"}}
}


@pytest.mark.parametrize("text", [THEIRS, FACTORY, TRL])
def test_a_plan_takes_what_was_imported(megatrain, project, text):
    Path("theirs.yaml").write_text(text)
    Path("dataset_info.json").write_text(json.dumps(OURS))
    done = megatrain("import theirs.yaml device=cpu threads=1 precision=float32 --output my.yaml")
    assert "train.rows_per_step: 4 (" in done.out
    assert "wrote my.yaml; `megatrain plan my.yaml` says whether it fits" in done.err
    assert "fits" in megatrain("plan my.yaml").out
    assert "row 0: " in megatrain("data my.yaml").out


def test_a_run_of_an_imported_config_trains(megatrain, project):
    Path("theirs.yaml").write_text(THEIRS)
    megatrain("import theirs.yaml device=cpu threads=1 train.max_steps=2 --output my.yaml")
    megatrain("train my.yaml")
    assert (project / "run" / "final").is_dir()


def test_without_a_name_the_config_goes_to_stdout_and_the_report_to_stderr(megatrain, project):
    Path("theirs.yaml").write_text(THEIRS)
    done = megatrain("import theirs.yaml --processes 3")
    Path("my.yaml").write_text(done.out)
    assert load_config("my.yaml").train.rows_per_step == 12
    assert "rows_per_step: 12  # micro_batch_size, gradient_accumulation_steps; 2 x 2" in done.out
    assert "deepspeed: MegaTrain streams the model itself" in done.err
    said = megatrain("import theirs.yaml --json").json
    assert said["trainer"] == "axolotl" and said["config"]["train"]["rows_per_step"] == 4


def test_what_changes_the_result_writes_nothing_unless_it_is_forced(megatrain, project):
    Path("theirs.yaml").write_text(THEIRS + "adapter: lora\nlora_r: 8\nnew_key: 3\n")
    done = megatrain("import theirs.yaml --output my.yaml", code=2)
    assert "error: nothing is written: 2 keys would be lost; --force" in done.err
    assert "impossible (1)\n  theirs.yaml:13: adapter: " in done.out
    assert "unknown (1)\n  theirs.yaml:15: new_key: 3" in done.out
    assert not Path("my.yaml").exists()
    megatrain("import theirs.yaml --output my.yaml --force")
    assert (
        "# NOT HONOURED: adapter: 'lora'\n# NOT HONOURED: new_key: 3\n"
        in Path("my.yaml").read_text()
    )
    assert load_config("my.yaml").train.seq_len == 64
    said = megatrain("import theirs.yaml --output my.yaml --force", code=2).err
    assert "my.yaml: exists already; choose another name or remove it" in said


def test_a_file_that_is_no_whole_config_says_what_is_missing_even_if_forced(megatrain, project):
    Path("args.json").write_text('{"per_device_train_batch_size": 2, "optim": "adamw_torch"}')
    done = megatrain("import args.json --output my.yaml --force", code=2)
    assert (
        "missing or contradictory (2)" in done.out and "model: missing; name a hub id" in done.out
    )
    assert "nothing is written: what is missing is listed" in done.err
    megatrain("import args.json model=model data.train=rows.jsonl --output my.yaml")
    assert load_config("my.yaml").train.rows_per_step == 2


def test_a_template_that_is_text_is_written_beside_the_config(megatrain, project):
    Path("theirs.yaml").write_text(TRL + 'chat_template: "{% for m in messages %}{% endfor %}"\n')
    megatrain("import theirs.yaml --output my.yaml")
    assert load_config("my.yaml").data.chat_template == "my.chat_template.jinja"
    assert "{% for m" in Path("my.chat_template.jinja").read_text()


def test_a_file_that_is_not_there(megatrain, project):
    assert "none.yaml: no such file" in megatrain("import none.yaml", code=2).err

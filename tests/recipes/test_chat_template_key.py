"""A chat template that the config names is used, saved, and kept by later commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatrain.data import workers
from megatrain.data.template import find_template
from tests.helpers.once import rows_are_encoded_in_workers

TURNS = [{"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": "1 2 3"}]
TWO_STEPS = "train.max_steps=2 train.tokens_per_step=64 data.eval=null"


@pytest.fixture
def base(tmp_path: Path, model_dir: Path) -> Path:
    """The model without a chat template."""
    copy = shutil.copytree(model_dir, tmp_path / "base")
    (copy / "chat_template.jinja").unlink()
    return copy


def test_a_base_model_is_trained_with_a_named_template(megatrain, project, base):
    words = "no chat template for conversations; name one (data.chat_template: chatml)"
    assert words in megatrain(f"data cfg.yaml model={base}", code=3).err
    megatrain(f"train cfg.yaml model={base} data.chat_template=chatml {TWO_STEPS}")
    for name in ("checkpoint-2", "final"):
        saved: Any = AutoTokenizer.from_pretrained(project / "run" / name)
        assert saved.chat_template == find_template("chatml")
        text = saved.apply_chat_template(TURNS, tokenize=False)
        assert text.endswith("<|im_start|>assistant\n1 2 3<|im_end|>\n")
    assert megatrain("eval run --data rows.jsonl --json").json["eval_target_tokens"] > 0


@pytest.mark.slow
def test_a_resume_keeps_the_checkpoint_s_and_says_that_the_file_has_changed(
    megatrain, project, base
):
    file = project / "mine.jinja"
    file.write_text(find_template("chatml"))
    run = f"train cfg.yaml model={base} chat_template=mine.jinja {TWO_STEPS} checkpoint.every=1"
    megatrain(run)
    shutil.rmtree(project / "run" / "final")
    file.write_text(find_template("mistral"))
    said = megatrain("resume run train.max_steps=3").err
    assert f"{file}: has changed since this run began; the checkpoint's is used" in said
    assert (project / "run" / "final" / "chat_template.jinja").read_text() == find_template(
        "chatml"
    )
    file.unlink()
    said = megatrain("resume run train.max_steps=4").err
    assert "no such file, and no such name" in said and "the checkpoint's is used" in said


def test_what_cannot_be_used_is_named_with_its_line(megatrain, project):
    (project / "cfg.yaml").write_text(
        "model: model\ndata:\n  train: rows.jsonl\n  chat_template: gemma\n"
    )
    error = megatrain("data cfg.yaml", code=2).err
    words = "cfg.yaml:4: data.chat_template: gemma: the tokenizer has no token <start_of_turn>"
    assert error.startswith(f"error: {words}")


def test_a_template_in_the_home_of_nobody_is_named(megatrain, project):
    error = megatrain("data cfg.yaml", "data.chat_template=~nobody-here/x", code=2).err
    assert "data.chat_template: ~nobody-here/x: no such file, and no such name" in error


@pytest.mark.slow
@pytest.mark.parametrize("command", ["data cfg.yaml", "train cfg.yaml", "generate model a"])
def test_a_template_that_computes_without_end_ends_every_command(
    megatrain, project, monkeypatch, command
):
    monkeypatch.setattr(workers, "ROW_LIMIT_S", 0.2)
    source = (project / "model").resolve()
    (project / "model").unlink()
    shutil.copytree(source, project / "model")
    hostile = "{% set n = 10 %}{{ (n ** n) ** (n ** n) }}"
    (project / "model" / "chat_template.jinja").write_text(hostile)
    with rows_are_encoded_in_workers():
        error = megatrain(command, code=3).err
    assert "the chat template takes more than 0.2 s of computing for one conversation" in error
    assert {path.name for path in project.glob("run/*")} <= {".lock", "train.log"}

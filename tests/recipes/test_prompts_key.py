"""`eval.prompts`: every evaluation answers them into samples.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.recipes import loop
from tests.helpers.commands import write_jsonl

ASK = ("eval.prompts=asked.jsonl", "eval.max_new_tokens=4", "precision=float32")


@pytest.fixture(autouse=True)
def asked(project: Path) -> None:
    turns = [{"role": "user", "content": text} for text in ("Count to 2.", "Count to 5.")]
    turns.insert(1, {"role": "assistant", "content": "1 2 (7)"})
    write_jsonl(project / "asked.jsonl", [{"prompt": "Count to 3."}, {"messages": turns}])


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_every_evaluation_answers_them(megatrain, project):
    megatrain("train cfg.yaml train.eval_every=2 train.max_steps=3", *ASK)
    found = samples(project / "run")
    assert [row["step"] for row in found] == [0, 0, 2, 2, 3, 3]
    assert found[0]["prompt"] == "Count to 3." and len(found[1]["prompt"]) == 3
    last = megatrain("generate run 'Count to 3.' --max-new-tokens 4 --json").json["answer"]
    assert found[-2]["answer"] == last


def test_without_held_out_rows_they_are_answered_too(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=1 data.eval=null", *ASK)
    assert [row["step"] for row in samples(project / "run")] == [0, 0, 1, 1]


def test_a_number_takes_that_many_held_out_rows(megatrain, project):
    """Up to their answers; texts up to some tokens."""
    keys = ("data.eval=3", "eval.max_new_tokens=4", "train.max_steps=1")
    megatrain("train cfg.yaml eval.prompts=2", *keys)
    found = samples(project / "run")
    assert [row["step"] for row in found] == [0, 0, 1, 1]
    asked = [row["prompt"] for row in found[:2]]
    assert all("Count to" in one for one in asked) and len(set(asked)) == 2
    few = megatrain("train cfg.yaml output=few eval.prompts=5", *keys)
    assert "eval.prompts: 3 of 5 are answered, as rows are few or long" in few.err


@pytest.mark.slow
def test_a_resumed_run_answers_none_twice(megatrain, project, monkeypatch):
    steps = ("train.max_steps=4", "checkpoint.every=2")
    megatrain("train cfg.yaml output=whole", *steps, *ASK)
    original = loop.evaluate

    def ended(run: Any, *rest: Any) -> Any:
        found = original(run, *rest)
        if run.step == 4:
            raise RuntimeError
        return found

    monkeypatch.setattr(loop, "evaluate", ended)
    megatrain("train cfg.yaml", *steps, *ASK, code=1)
    monkeypatch.setattr(loop, "evaluate", original)
    assert [row["step"] for row in samples(project / "run")][-1] == 4  # of no checkpoint
    with (project / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 2, "pro')
    megatrain("resume run")
    assert samples(project / "run") == samples(project / "whole")


REFUSED = {
    "eval.prompts=2 data.eval=null": (2, "eval.prompts: a number of held-out rows; set data.eval"),
    "eval.prompts=none.txt": (
        3,
        "eval.prompts: none.txt: no such file; it holds one prompt a line",
    ),
    "eval.max_new_tokens=9": (2, "eval.max_new_tokens: has no effect without eval.prompts"),
    "eval.prompts=asked.jsonl eval.max_new_tokens=120": (
        3,
        "eval.prompts: prompt 1 has 22 tokens, which with an answer of eval.max_new_tokens 120 "
        "exceed the 128 that the model reads",
    ),
}


def test_what_cannot_be_answered_is_refused(megatrain, project):
    for keys in REFUSED:
        code, words = REFUSED[keys]
        assert words in megatrain(f"train cfg.yaml {keys}", code=code).err
        assert not (project / "run" / "config.yaml").exists()


def test_a_wrong_file_is_refused_before_torch_is_imported(megatrain, project, monkeypatch):
    monkeypatch.setattr("megatrain.recipes.run.train", None)
    (project / "asked.jsonl").write_text("{")
    done = megatrain("train cfg.yaml", *ASK, code=3)
    assert "eval.prompts: asked.jsonl:1: " in done.err

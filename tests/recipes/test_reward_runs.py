"""Runs of reward models: what they save, who reads it, and what is refused of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatrain.config import load_config
from megatrain.data.rows import Rows
from megatrain.recipes.model import read_model
from megatrain.recipes.setup import open_rows
from tests.helpers.commands import evaluations_of, write_jsonl
from tests.recipes.test_preference_runs import pairs

OPTIONS = ["method=reward", "train.learning_rate=1e-3"]


@pytest.fixture
def of_pairs(project: Path) -> Path:
    write_pairs(project)
    return project


def write_pairs(project: Path) -> None:
    write_jsonl(project / "rows.jsonl", pairs())


@pytest.fixture
def trained(trained_once: Any, of_pairs: Path) -> Path:
    """The run folder of a finished run in float32."""
    whole = trained_once(*OPTIONS, "precision=float32", begin=write_pairs)
    return Path(shutil.copytree(whole / "run", of_pairs / "run", symlinks=True))


def accuracy_by_transformers(folder: Path, rows: Rows, tokenizer: Any) -> float:
    """The share of pairs whose chosen answer has the higher score, on padded batches."""
    loading: Any = transformers.AutoModelForSequenceClassification
    model = loading.from_pretrained(folder).eval()
    scores = []
    for row in range(len(rows)):
        sides = [{"input_ids": rows.side(row, side)[0].tolist()} for side in (0, 1)]
        batch = tokenizer.pad(sides, return_tensors="pt")
        with torch.no_grad():
            scores.append(model(**batch).logits[:, 0])
    chosen, rejected = torch.stack(scores).T
    return float((chosen > rejected).float().mean())


def test_what_is_saved_scores_in_transformers_as_in_the_run(megatrain, trained):
    last = evaluations_of(trained)[-1]
    assert last["eval_accuracy"] > 0.5
    config = load_config(trained / "config.yaml")
    model = read_model(config)
    held_out = open_rows(config, model)[1]
    assert held_out is not None
    found = accuracy_by_transformers(trained / "final", held_out, model.tokenizer)
    assert found == pytest.approx(last["eval_accuracy"])
    megatrain("export run there")
    assert found == accuracy_by_transformers(trained.parent / "there", held_out, model.tokenizer)
    for folder in (trained / "final", trained.parent / "there"):
        assert not (folder / "generation_config.json").exists()


def test_defaults_are_those_of_trl(of_pairs):
    text = (of_pairs / "cfg.yaml").read_text().replace("learning_rate: 0.01, ", "")
    (of_pairs / "cfg.yaml").write_text(text)
    found = load_config(of_pairs / "cfg.yaml", ["method=reward"])
    assert (found.train.learning_rate, found.data.truncation_mode) == (1e-4, "drop")
    kept = load_config(of_pairs / "cfg.yaml", ["method=reward", "data.truncation_mode=keep_end"])
    assert kept.data.truncation_mode == "keep_end"
    assert load_config(of_pairs / "cfg.yaml", ["method=dpo"]).train.learning_rate == 1e-6


def test_a_reward_model_is_trained_further_and_evaluated_without_its_run(megatrain, trained):
    before = evaluations_of(trained)[-1]
    more = ["model=run/final", "output=more", "precision=float32", "train.max_steps=1"]
    said = megatrain("train cfg.yaml", *OPTIONS, *more).err
    assert "drawn at random" not in said
    first = evaluations_of(trained.parent / "more")[0]
    assert first["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-6)
    found = megatrain("eval run/final --data rows.jsonl --json").json
    assert found["eval_accuracy"] > 0.5
    assert "perplexity" not in found


@pytest.mark.slow
def test_margins_of_rows_are_wanted(megatrain, of_pairs):
    losses = []
    for margin in (None, 0.0, 2.0):
        rows = [row if margin is None else {**row, "margin": margin} for row in pairs(80)]
        write_jsonl(of_pairs / "rows.jsonl", rows[:60])
        write_jsonl(of_pairs / "others.jsonl", rows[60:])
        more = ["data.eval=others.jsonl", "train.max_steps=1", f"output=run-{margin}"]
        megatrain("train cfg.yaml", *OPTIONS, *more)
        losses.append(evaluations_of(of_pairs / f"run-{margin}")[0]["eval_loss"])
    assert losses[0] == losses[1] < losses[2]


def test_what_needs_a_language_model_is_refused(megatrain, trained):
    (trained.parent / "sft.yaml").write_text((trained.parent / "cfg.yaml").read_text())
    for line, reason in (
        ("generate run hello", "is a reward model, which gives scores and writes no text"),
        ("train sft.yaml model=run/final output=no", "set method: reward instead of sft"),
        ("bench cfg.yaml method=reward", "bench times steps of a language model"),
    ):
        refused = megatrain(line, code=2).err
        assert reason in refused and "Traceback" not in refused


@pytest.mark.slow
def test_a_plan_of_a_shape_has_no_vocabulary_in_its_head(megatrain, project):
    plans = {
        method: megatrain(f"plan tiny method={method} train.tokens_per_step=8192 --json").json
        for method in ("dpo", "reward")
    }
    assert plans["dpo"]["parameters"] - plans["reward"]["parameters"] == 511 * 64

"""Rows given in Python go the way of files: the same run, and a resume that knows them again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

import megatrain as mt
from megatrain.data.sources import name_of_rows
from tests.commands import chat_rows, steps_of, write_jsonl

ROWS = chat_rows(30)
TEXTS = [{"text": f"{row['messages'][1]['content']} and on"} for row in ROWS]
KEYS: dict[str, Any] = {"train": {"tokens_per_step": 256, "seq_len": 64, "max_steps": 2}}
KEYS |= {"model": "model", "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def own_cache(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    return project / "cache"


def config(train: object, output: str, held_out: object = 6, **keys: Any) -> dict[str, Any]:
    return {**KEYS, "data": {"train": train, "eval": held_out, **keys}, "output": output}


def figures(run_dir: str) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in steps_of(Path(run_dir))]


def about_rows(run_dir: str) -> list[str]:
    """What the log says of them, without the time of day."""
    lines = Path(run_dir, "train.log").read_text().splitlines()
    return [line.partition(" INFO ")[2] for line in lines if " rows " in line or "rows," in line]


@pytest.mark.slow
def test_every_form_is_the_file(project):
    write_jsonl(project / "rows.jsonl", ROWS)
    expected = mt.train(config("rows.jsonl", "of-file"))
    forms = {
        "list": ROWS,
        "columns": {"messages": [row["messages"] for row in ROWS]},
        "dataset": datasets.Dataset.from_list(ROWS),
        "parts": [{"path": ROWS[:10]}, datasets.Dataset.from_list(ROWS[10:])],
    }
    for name, given in forms.items():
        found = mt.train(config(given, name))
        assert figures(name) == figures("of-file")
        assert found.eval_loss_after == expected.eval_loss_after
        written = mt.load_config(f"{name}/config.yaml")
        assert written.data.train[0].path == name_of_rows(ROWS[:10] if name == "parts" else ROWS)
        assert about_rows(name) == about_rows("of-file")
    assert len(about_rows("list")) == 3


@pytest.mark.slow
def test_a_resume_takes_the_cache_or_the_rows_again_and_no_others(project, own_cache):
    mt.train(config(ROWS, "run", held_out=TEXTS[:4]))
    steps: dict[str, Any] = {"train.max_steps": 3}
    mt.train(config(ROWS, "whole", held_out=TEXTS[:4]), **steps)
    shutil.copytree("run", "again", symlinks=True)
    shutil.copytree("run", "others", symlinks=True)
    mt.resume("run", **steps)
    shutil.rmtree(own_cache)
    with pytest.raises(mt.errors.DataError, match=r"30 rows given in Python, digest .* again in"):
        mt.resume("again", **steps)
    with pytest.raises(mt.errors.DataError, match="are not those of the checkpoint"):
        mt.resume("others", data={"train": ROWS[1:], "eval": TEXTS[:4]}, **steps)
    given = {"train": datasets.Dataset.from_list(ROWS), "eval": TEXTS[:4]}
    mt.resume("again", data=given, **steps)
    assert figures("run") == figures("again") == figures("whole")
    with pytest.raises(mt.errors.DataError, match=r"data\.train: 30 rows given in Python"):
        mt.train("run/config.yaml", output="anew")


def test_they_are_evaluated_and_planned(project):
    write_jsonl(project / "rows.jsonl", ROWS[:5])
    assert mt.evaluate("model", ROWS[:5]) == mt.evaluate("model", "rows.jsonl")
    plan, of_file = (mt.plan(config(given, "x")) for given in (ROWS[:5], "rows.jsonl"))
    assert plan.choices == of_file.choices
    assert plan.fits


def test_weights_and_streaming_and_columns_hold_for_them_too(project):
    renamed = [{"q": "Count.", "a": row["messages"][1]["content"]} for row in ROWS]
    parts = [{"path": ROWS, "weight": 1}, {"path": ROWS[:4], "weight": 1}]
    with pytest.raises(mt.errors.ConfigError, match="weights are of whole sets"):
        mt.train(config(parts, "refused", streaming=True))
    mt.train(config(parts, "weighted"))
    assert "by its weight" in Path("weighted/train.log").read_text()
    names = {"prompt": "q", "completion": "a"}
    mt.train(config(renamed, "streamed", streaming=True, columns=names))
    with pytest.raises(mt.errors.DataError, match="list row 1: "):
        mt.train(config(renamed, "wrong"))
    assert not Path("wrong").exists()


def test_a_config_keeps_its_rows_through_changes(project):
    given = mt.load_config(config(ROWS, "run"))
    changed = mt.load_config(given.model_dump(mode="json"))
    assert changed == given, "which rows they are is part of it"
    assert not changed.rows
    assert mt.train(given, train={"max_steps": 1}).steps == 1


def lists(**columns: list[int]) -> dict[str, list[int]]:
    return columns


SPLITS = datasets.DatasetDict(train=datasets.Dataset.from_list(TEXTS[:1]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "not an empty list"),
        (lists(prompt=[1, 2], completion=[1]), "as many values each, not prompt 2, completion 1"),
        (SPLITS, r"a DatasetDict has several splits \(train\); give one of them"),
        (SPLITS["train"].to_iterable_dataset(), "an IterableDataset has no rows that could be"),
        (SPLITS["train"].to_pandas(), r"give datasets\.Dataset\.from_pandas"),
        ([*TEXTS[:1], 3], "source 1: must be a file"),
        ({"path": 3}, "must be a file, a folder or a hub id, not 3"),
        (3.5, "must be a file"),
    ],
)
def test_other_things_get_a_sentence(given, words):
    with pytest.raises(mt.errors.ConfigError, match=f"keywords: data.train: .*{words}"):
        mt.load_config(config(given, "run"))

"""What `data` and `train` say of rows before anything is trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

import megatrain as mt
from megatrain.config import load_config
from megatrain.data.rows import Counts
from megatrain.data.sources import name_of_rows
from megatrain.errors import DataError
from megatrain.recipes.setup import check_cuts
from tests.helpers.commands import chat_rows, conversation, steps_of, write_jsonl

LEFT_OUT = "fields 'name' of messages are left out by the chat template"


def named(number: int) -> dict[str, Any]:
    row = conversation(f"Count to {number}.", "1 2 3")
    row["messages"][0]["name"] = "eve"
    return {**row, "id": number}


def test_warnings_and_columns_are_said_by_both_commands(megatrain, project):
    write_jsonl(project / "rows.jsonl", [named(n) for n in range(8)])
    write_jsonl(project / "held.jsonl", [named(90)])
    shown = megatrain("data cfg.yaml data.eval=held.jsonl").out
    assert f"warning: 8 {LEFT_OUT}" in shown
    assert f"warning: data.eval: 1 {LEFT_OUT}" in shown
    assert "rows became text: 8 by the chat template" in shown
    assert "columns that are not read: id" in shown
    assert "<|im_end|> ends answers here: generation_config.json" in shown
    as_json = megatrain("data cfg.yaml data.eval=held.jsonl --json").json
    assert as_json["train"]["notes"] == {LEFT_OUT: 8}
    assert as_json["train"]["unread_columns"] == ["id"]
    said = megatrain("train cfg.yaml data.eval=held.jsonl train.max_steps=1").err
    assert f"warning: 8 {LEFT_OUT}" in said
    assert f"warning: data.eval: 1 {LEFT_OUT}" in said
    assert "columns that are not read: id" in said


def test_a_new_run_that_cuts_most_tokens_needs_the_mode_or_the_length_set():
    def check(cut: int, **keys: Any) -> None:
        counts = Counts(tokens=100, truncated=1, truncated_tokens=cut, longest=9000)
        given = {"model": "m", "data.train": "rows", **keys}
        check_cuts(load_config({}, given), counts)

    with pytest.raises(DataError) as raised:
        check(51)
    assert "51.0% of all tokens are cut off" in str(raised.value)
    assert "; set data.truncation_mode or train.seq_len to say" in str(raised.value)
    check(50)
    check(51, **{"data.truncation_mode": "keep_start"})
    check(51, **{"train.seq_len": 4096})


def test_rows_of_pairs_are_refused_with_their_line_and_method(megatrain, project):
    rows = [named(1), {**named(2), "label": False}]
    write_jsonl(project / "rows.jsonl", rows)
    error = megatrain("data cfg.yaml", code=3).err
    assert "rows.jsonl:2: field 'label': " in error
    assert "method: kto" in error


ASKED = [{"role": "user", "content": "Count to 2."}]
PAIR = {"prompt": ASKED, "chosen": "1 2", "rejected": "2 1"}
JUDGED = {"prompt": ASKED, "completion": "1 2", "label": False}


@pytest.mark.parametrize(
    ("method", "row", "first", "counted"),
    [
        ("dpo", PAIR, "row 0, rejected: ", {"kind": "pairs", "wanted_rows": None}),
        ("kto", JUDGED, "row 0: unwanted, ", {"kind": "judged", "wanted_rows": 0}),
    ],
)
def test_rows_of_preference_methods_are_shown(megatrain, project, method, row, first, counted):
    rows = [{**row, "prompt": [{**ASKED[0], "content": f"Count to {n}."}]} for n in range(8)]
    write_jsonl(project / "rows.jsonl", [*rows, {**row, "label": "x", "chosen": ""}])
    asked = f"data cfg.yaml method={method} data.eval=2"
    error = megatrain(asked, code=3).err
    assert "rows.jsonl:9: field " in error
    assert error.count("\n") == 1
    shown = megatrain(f"{asked} data.on_bad_row=skip").out
    assert first in shown
    assert "1 of 9 rows are bad and skipped; the first: " in shown
    found = megatrain(f"{asked} data.on_bad_row=skip --json").json
    assert {"rows": 6, "bad_rows": 1, **counted}.items() <= found["train"].items()


@pytest.mark.parametrize(
    ("method", "row", "words"),
    [
        ("sft", PAIR, "field 'chosen': two answers, of which one is better, are for method: dpo, "),
        ("sft", JUDGED, "field 'label': answers that are marked as wanted or unwanted are for me"),
        ("dpo", named(1), "field 'chosen' is missing: a row needs two answers"),
        ("dpo", JUDGED, "are for method: kto"),
        ("kto", PAIR, "field 'chosen': two answers, of which one is better, are for method: dpo, "),
        ("kto", named(1), "field 'label' is missing: each answer needs a label"),
    ],
)
def test_a_method_refuses_rows_of_another(megatrain, project, method, row, words):
    write_jsonl(project / "rows.jsonl", [row] * 8)
    error = megatrain(f"data cfg.yaml method={method}", code=3).err
    assert words in error
    assert error.count("\n") == 1


def test_steps_that_cannot_be_as_asked_are_said(megatrain, project):
    said = megatrain("train cfg.yaml train.tokens_per_step=10 train.max_steps=3 data.eval=null").err
    assert "warning: 60 of 60 rows are longer than train.tokens_per_step 10, the longest " in said
    assert "a step takes one row at least, so it is larger there" in said
    assert "is never reached" not in said
    quiet = megatrain("train cfg.yaml train.max_steps=3 output=other").err
    assert "tokens_per_step" not in quiet


# -- rows in python --------------------------------------------------------------------------------

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
    assert not Path("wrong/config.yaml").exists()


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
        (lists(prompt=[1, 2], completion=[1]), r"as many values each, not \[2, 1\]"),
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

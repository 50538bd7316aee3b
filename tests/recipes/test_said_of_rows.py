"""What `data` and `train` say of rows before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commands import conversation, write_jsonl

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


@pytest.mark.parametrize(("warmup", "highest"), [(200, "0.0001"), (3, "0.00667")])
def test_a_rate_that_is_never_reached_is_said(megatrain, project, warmup, highest):
    said = megatrain(f"train cfg.yaml train.warmup={warmup} train.max_steps=3 data.eval=null").err
    assert f"train.learning_rate 0.01 is never reached: the warm-up takes {warmup} steps" in said
    assert f"the highest rate is {highest}; set a lower train.warmup" in said

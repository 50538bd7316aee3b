"""What `data` and `train` say of rows before anything is trained."""

from __future__ import annotations

from typing import Any

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

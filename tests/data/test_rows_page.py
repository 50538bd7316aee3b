"""docs/rows.md against the code: every format is on it, and its examples are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatrain.data.formats import (
    ABOUT_ALPACA,
    ABOUT_CHATS,
    LABELS,
    MATTERS,
    PROMPT_NAMES,
    ROW_FORMATS,
    convert_row,
    detect_format,
    formats_of,
)
from megatrain.data.samples import JUDGED, KINDS, PAIRS, PLAIN, PROMPTS, Chat, Picture, asked_in
from megatrain.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"
TEXT = PAGE.read_text()
EXAMPLES = {
    kind: [json.loads(line) for line in block.splitlines()]
    for kind, block in zip(
        (PLAIN, "images", PAIRS, JUDGED, PROMPTS),
        re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL),
        strict=True,
    )
}


def test_the_tables_have_the_formats_and_no_others():
    assert re.findall(r"^\| (\w+) \| `", TEXT, re.MULTILINE) == list(ROW_FORMATS)


def test_the_table_says_which_columns_a_format_reads():
    for name in ROW_FORMATS:
        form = ROW_FORMATS[name]
        (line,) = re.findall(rf"^\| {name} \| (.*)$", TEXT, re.MULTILINE)
        columns, also = line.split(" | ")
        assert tuple(re.findall("`(.*?)`", columns)) == form.columns
        more = [] if PAIRS not in form.kinds else ["margin"]
        assert sorted(re.findall("`(.*?)`", also)) == sorted([*form.also, *more])


def test_every_column_that_matters_is_on_the_page():
    (named,) = re.findall(r"^A column that would change.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert set(MATTERS) <= set(re.findall("`(.*?)`", named))


def test_every_prompt_is_read():
    assert [asked_in(row)[-1]["role"] for row in EXAMPLES.pop(PROMPTS)] == ["user"] * 3


@pytest.mark.parametrize("kind", [PLAIN, PAIRS, JUDGED])
def test_every_example_is_read_and_every_format_has_one(kind):
    forms = []
    for row in EXAMPLES[kind]:
        form = detect_format(row, kind)
        assert form is not None
        sides = convert_row(form, row, kind=kind).texts
        assert len(sides) == KINDS[kind].trained
        forms.append(form)
    assert all(form in forms for form in formats_of(kind))


def test_every_example_with_an_image_is_read():
    picture = Picture("cat.png", 0, "", 1, 1)
    for row in EXAMPLES["images"]:
        form = detect_format(row)
        assert form is not None
        (chat,) = convert_row(form, row, find=lambda named: picture).texts
        assert isinstance(chat, Chat)
        assert [len(turn.texts) for turn in chat.messages] == [2, 1]
        assert chat.pictures == (picture,)


def test_names_of_columns_methods_and_modes_are_on_the_page():
    columns = {*LABELS, *PROMPT_NAMES, *ABOUT_ALPACA, *ABOUT_CHATS, "margin"}
    for name in (*columns, "keep_start", "keep_end", "context", "drop"):
        assert f"`{name}`" in TEXT, name
    headings = "".join(re.findall(r"^## (?:Pairs|Judged answers|Prompts): .*$", TEXT, re.MULTILINE))
    for name, method in METHODS.items():
        assert re.search(rf"\b{name}\b", headings) or method.kind == PLAIN

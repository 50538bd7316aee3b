"""docs/rows.md against the code: every format is on it, and its examples are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatrain.data.conversations import ABOUT_ALPACA, ABOUT_CHATS
from megatrain.data.cuts import TRUNCATION_MODES
from megatrain.data.formats import FORMATS, convert_row, detect_format, formats_of
from megatrain.data.preferences import LABELS, PROMPT_NAMES
from megatrain.data.samples import JUDGED, KINDS, PAIRS, PLAIN, texts_of
from megatrain.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"
TEXT = PAGE.read_text()
EXAMPLES = {
    kind: [json.loads(line) for line in block.splitlines()]
    for kind, block in zip(
        (PAIRS, JUDGED), re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL), strict=True
    )
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_on_the_page_with_its_columns(name):
    (line,) = re.findall(rf"^\| {name} \| (.*)$", TEXT, re.MULTILINE)
    for column in FORMATS[name].columns:
        assert f"`{column}`" in line


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_example_is_read_and_every_format_has_one(kind):
    forms = []
    for row in EXAMPLES[kind]:
        form = detect_format(row, kind)
        assert form is not None
        sides = texts_of(convert_row(form, row, kind=kind))
        assert len(sides) == KINDS[kind].trained
        forms.append(form)
    assert all(form in forms for form in formats_of(kind).values())


def test_names_of_columns_methods_and_modes_are_on_the_page():
    columns = {*LABELS, *PROMPT_NAMES, *ABOUT_ALPACA, *ABOUT_CHATS, "margin"}
    for name in (*columns, *TRUNCATION_MODES):
        assert f"`{name}`" in TEXT, name
    headings = "".join(re.findall(r"^## (?:Pairs|Judged answers): .*$", TEXT, re.MULTILINE))
    for name, method in METHODS.items():
        assert re.search(rf"\b{name}\b", headings) or method.kind == PLAIN

"""What the page of models says of a family is what comes of it now."""

from __future__ import annotations

import json

import pytest

from benchmarks import families

FOUND = {
    row["family"]: row["state"]
    for rows in json.loads(families.RESULTS.read_text())["families"].values()
    for row in rows
}
# One of every state, and more where that is for several reasons.
SOME = ("gpt_oss", "mamba2", "llava", "zaya", "bert", "gemma3n_text", "dots3_note_text", "reformer")


@pytest.mark.parametrize("family", SOME)
def test_a_family_does_what_the_page_says(family):
    assert families.check(family)["state"] == FOUND[family]


def test_most_families_are_full():
    assert sum(state == "full" for state in FOUND.values()) >= 95
    assert {family for family, state in FOUND.items() if state == "failed"} <= {"inkling_mm_model"}

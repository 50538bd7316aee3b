"""Families do what docs/models.md says of them."""

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
QUICK = ("zaya", "bert", "gemma3n_text", "reformer", "mamba2")
SLOW = ("gpt_oss", "llava", "dots3_note_text")
SOME = (*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW))


@pytest.mark.slow
@pytest.mark.parametrize("family", SOME)
def test_a_family_does_what_the_page_says(family):
    assert families.check(family)["state"] == FOUND[family]


def test_most_families_are_full():
    assert sum(state == "full" for state in FOUND.values()) >= 95
    assert {family for family, state in FOUND.items() if state == "failed"} <= {"inkling_mm_model"}

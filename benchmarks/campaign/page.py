"""Writes the tables of docs/reliability.md from the campaigns in benchmarks/results.

    python -m benchmarks.campaign.page

Where a case that was lost has since become a fast test, its entry in the file of results may say
which: `"test": "tests/..."`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign.parts import PARTS, WANTED, Wanted
from benchmarks.records import RESULTS, ROOT
from benchmarks.write_page import filled

PAGE = ROOT / "docs" / "reliability.md"
FILES = "campaign*.json"
REASON = 160  # characters


@dataclass(frozen=True)
class Sum:
    """What all campaigns together tried; once one has tried all there is, others add nothing."""

    tried: int
    lost: int
    seconds: float
    of: int | None  # cases that there are, where one campaign has tried them all


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), tables(campaigns())))


def campaigns(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All campaigns, oldest first."""
    files = sorted(folder.rglob(FILES), key=lambda path: (path.parent.name, path.name))
    return [json.loads(path.read_text()) for path in files]


def tables(found: Sequence[dict[str, Any]]) -> dict[str, Sequence[str]]:
    """Every generated part of the page, by the name of its marker."""
    return {
        "wanted": list(wanted(found)),
        "parts": list(parts(found)),
        "lost": list(lost(found)),
        "campaigns": list(runs(found)),
    }


def total(found: Sequence[dict[str, Any]], names: Sequence[str]) -> Sum:
    of_these = [part for one in found for part in one["parts"] if part["what"] in names]
    whole = [part for part in of_these if part["of"]]
    counted = [max(whole, key=lambda part: part["of"])] if whole else of_these
    tried, seconds = (sum(part[key] for part in counted) for key in ("tried", "seconds"))
    lost = sum(part["lost"] for part in of_these)
    return Sum(tried, lost, seconds, counted[0]["of"] if whole else None)


def wanted(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the campaigns shall try, have tried, and have still to try."""
    yield "| what | wanted | tried | lost | still to be run |"
    yield "|---|---|---|---|---|"
    for kind, want in WANTED.items():
        names = [name for name, part in PARTS.items() if part.kind == kind]
        have = total(found, names)
        cells = (kind, amount(want), _tried(want, have), f"{have.lost:,}", missing(want, have))
        yield f"| {' | '.join(cells)} |"


def amount(want: Wanted) -> str:
    return f"every one of the {want.unit}" if want.number is None else _of(want, want.number)


def _of(want: Wanted, number: float) -> str:
    return f"{number / 3600:.2g} hours" if want.unit == "seconds" else f"{number:,.0f} {want.unit}"


def _tried(want: Wanted, have: Sum) -> str:
    if want.unit == "seconds":
        return f"{have.tried:,} in {have.seconds / 60:.0f} minutes"
    return f"{have.tried:,}"


def missing(want: Wanted, have: Sum) -> str:
    """What is left of what is wanted, in words."""
    if want.number is None:
        return "nothing" if have.of is not None else "the rest: no campaign had time for all"
    left = want.number - (have.seconds if want.unit == "seconds" else have.tried)
    return "nothing" if left <= 0 else _of(want, left)


def parts(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| part | tried | survived | lost | seconds each |"
    yield "|---|---|---|---|---|"
    for name in PARTS:
        have = total(found, [name])
        each = f"{have.seconds / have.tried:.2g}" if have.tried else "-"
        figures = (have.tried, have.tried - have.lost, have.lost)
        yield f"| {name} | {' | '.join(f'{figure:,}' for figure in figures)} | {each} |"


def lost(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each case that was lost, and the fast test that it has become."""
    failures = [
        (part["what"], failure)
        for one in found
        for part in one["parts"]
        for failure in part["failures"]
    ]
    if not failures:
        yield "Nothing."
        return
    yield "| part and case | what happened | test |"
    yield "|---|---|---|"
    for what, failure in failures:
        words = " ".join(failure["reason"].replace("|", "/").split())[-REASON:]
        test = f"`{failure['test']}`" if "test" in failure else "none yet"
        yield f"| {what}, {failure['case']} | {words.replace('`', '')} | {test} |"


def runs(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| date | commit | machine | seed | minutes |"
    yield "|---|---|---|---|---|"
    for one in found:
        seeds = ", ".join(sorted({str(part["seed"]) for part in one["parts"]}))
        minutes = sum(part["seconds"] for part in one["parts"]) / 60
        cells = (one["date"], one["commit"], one["machine"], seeds, f"{minutes:.0f}")
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

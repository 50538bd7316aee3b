"""Writes the tables of docs/comparison.md from benchmarks/comparison.toml.

python -m benchmarks.comparison
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import write_page
from megatrain.version import VERSION

HOME = Path(__file__).parent
FILE, PAGE = HOME / "comparison.toml", HOME.parent / "docs" / "comparison.md"
OURS = "megatrain"
NOTHING = "-"


def main() -> None:
    found = tomllib.loads(FILE.read_text())
    PAGE.write_text(write_page.filled(PAGE.read_text(), tables(found)))


def tables(found: dict[str, Any]) -> dict[str, list[str]]:
    """By marker of the page: the lines of what was compared, and of where it stands."""
    return {
        "versions": versions(found),
        "features": [*features(found)],
        "sources": [*sources(found)],
    }


def versions(found: dict[str, Any]) -> list[str]:
    systems = found["systems"].values()
    titles = ["MegaTrain", *(one["title"] for one in systems)]
    numbers = [VERSION, *(one["version"] for one in systems)]
    rows = (f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), numbers))
    return [f"Releases that were read on {found['read_on']}, the newest on PyPI:", "", *rows]


def features(found: dict[str, Any]) -> Iterator[str]:
    """A table for each group: a row for a feature, a column for a system, and what shows ours."""
    titles = [one["title"] for one in found["systems"].values()]
    for group, rows in groupby(found["row"], lambda row: row["group"]):
        yield from (f"## {group}", "")
        yield f"| | MegaTrain | shown by | {' | '.join(titles)} |"
        yield "|---" * (len(titles) + 3) + "|"
        for row in rows:
            mark, shown = cell(row[OURS])
            others = [cell(row[name])[0] if name in row else NOTHING for name in found["systems"]]
            yield f"| {row['what']} | **{mark}** | {link(shown)} | {' | '.join(others)} |"
        yield ""


def link(path: str) -> str:
    """A page, or a file of the repository, as seen from docs/."""
    target = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    return f"[{Path(path).stem}]({target})"


def sources(found: dict[str, Any]) -> Iterator[str]:
    """Where each claim about the others stands: a list for each system."""
    for name, system in found["systems"].items():
        yield from (
            f"### {system['title']} {system['version']}",
            "",
            "| | file | words |",
            "|---|---|---|",
        )
        for row in found["row"]:
            if name in row:
                file, words = claim(row[name])
                yield f"| {row['what']} | `{file}` | `{words.replace('`', '').replace('|', '/')}` |"
        yield ""


def cell(text: str) -> tuple[str, str]:
    """(mark, what shows it)."""
    mark, _, shown = text.partition(" | ")
    return mark, shown


def claim(text: str) -> tuple[str, str]:
    """(file, words in it) of another system's cell."""
    file, _, words = cell(text)[1].partition(": ")
    return file, words


if __name__ == "__main__":
    main()

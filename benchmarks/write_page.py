"""Writes the tables and the plot of docs/performance.md from the JSON files of benchmarks/results. What was not measured is not shown.

    python -m benchmarks.write_page

Tables stand between markers; everything else on the page is written by hand. Running it again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import capacity, compare, plan_table, roofline, targets
from benchmarks.cases import CASES, TARGETS, Case, sweep_case
from benchmarks.plot import Axes, Series, chart
from benchmarks.records import RESULTS, ROOT, Record, latest, load
from benchmarks.sweep import TOKENS
from benchmarks.systems import OURS, PEERS, TITLES

PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "throughput.svg"
COMPARED = ("7.6b-65k", "7.6b-16k", "1.8b-16k", "14.8b-65k")
PLOTTED_MODEL, PLOTTED_PARAMETERS = "qwen2.5-7b", 7_615_616_512
UP = range(0, 701, 100)  # TFLOP/s


@dataclass(frozen=True)
class Script:
    """A benchmark whose JSON is not a record of a run: which files, and the figure to show of one."""

    words: str
    wanted: str
    files: str
    figure: Callable[[dict[str, Any]], str]


def _against_plain(report: dict[str, Any]) -> str:
    return f"{report['engine_over_plain']['cpu_s']:.2f} x"


def _losses_apart(report: dict[str, Any]) -> str:
    (_, reference), *others = report["results"].items()
    apart = ", ".join(f"{name} {found['percent_apart']['held_out_after']:+.2f}%" for name, found in others)
    return f"{apart} after {len(reference['losses'])} steps"


SCRIPTS = (
    Script("SmolLM2-135M on a CPU: processor time of a step against a plain PyTorch loop", "1.15 x", "cpu_loop*.json", _against_plain),
    Script("fp8 products: held-out loss of a small model against bf16, 100 real steps", "0.5%", "fp8_quality*.json", _losses_apart),
)


def main() -> None:
    records = load()
    PAGE.write_text(filled(PAGE.read_text(), tables(records)))
    PLOT.write_text(plot(records))


def filled(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """`page` with the lines between `<!-- name -->` and `<!-- /name -->` replaced. Raises ValueError for a table that has no place."""
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if (page.count(begin), page.count(end)) != (1, 1):
            raise ValueError(f"{PAGE.name}: the markers {begin.strip()} and {end} must stand on it once each")
        before, _, rest = page.partition(begin)
        page = before + begin + "\n".join([*lines, ""]) + end + rest.partition(end)[2]
    return page


def tables(records: Sequence[Record]) -> dict[str, Sequence[str]]:
    """Every generated part of the page, by the name of its marker."""
    return {
        "targets": targets.table(TARGETS, records),
        "capacity": capacity.table(records),
        "scripts": scripts(RESULTS),
        "peers": peers(records),
        "ceilings": ceilings(),
        **plan_table.section(RESULTS),
    }


def scripts(folder: Path) -> list[str]:
    """What scripts with figures of their own found, the newest file of each."""
    rows = ["| what | wanted | measured | from |", "|---|---|---|---|"]
    for script in SCRIPTS:
        newest = max(folder.rglob(script.files), key=lambda path: (path.parent.name, path.name), default=None)
        found = (
            (targets.NOT_YET, "") if newest is None else (script.figure(json.loads(newest.read_text())), str(newest.relative_to(folder)))
        )
        rows.append(f"| {script.words} | {script.wanted} | {' | '.join(found)} |")
    return rows


def peers(records: Sequence[Record]) -> list[str]:
    """One table for each case on which any peer was tried, each on the machine that tried them last."""
    lines: list[str] = []
    for name in COMPARED:
        peer = max((record for record in records if record.case == name and record.system in PEERS), key=lambda one: one.date, default=None)
        if peer is not None:
            same = [record for record in records if record.machine == peer.machine]
            lines += [f"`{name}`, {peer.date}, {peer.machine}:", "", *compare.table(same, name, [OURS, *PEERS]), ""]
    return lines or [f"{targets.NOT_YET}.".capitalize()]


def ceilings() -> list[str]:
    """The roofline at the sweep's steps."""
    rows = ["| tokens per step | nothing recomputed | all layers recomputed |", "|---|---|---|"]
    for tokens in TOKENS:
        figures = [roofline.tflops(PLOTTED_PARAMETERS, tokens, roofline.H200, recomputed) for recomputed in (0.0, 1.0)]
        rows.append(f"| {tokens:,} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")
    return rows


# -- plot ---------------------------------------------------------------------------------------------------------------------------


def plot(records: Sequence[Record]) -> str:
    """Measured throughput of the 7.6B model over tokens per step, under the roofline of an H200."""
    lines = [Series(TITLES[system], points) for system in (OURS, *PEERS) if (points := measured(records, system))]
    for words, recomputed in (("limit, all streamed", 0.0), ("limit, also recomputed", 1.0)):
        steps = [2 ** (power / 4) for power in range(48, 69)]
        points = [(tokens, roofline.tflops(PLOTTED_PARAMETERS, int(tokens), roofline.H200, recomputed)) for tokens in steps]
        lines.append(Series(words, points, limit=True))
    title = "7.6B parameters on one H200: TFLOP/s over tokens per step"
    return chart(title, "tokens per step", "TFLOP/s", Axes(TOKENS, UP), lines)


def measured(records: Sequence[Record], system: str) -> list[tuple[float, float]]:
    """(tokens per step, TFLOP/s) of every point that was measured, of the sweep or of a case like it."""
    points = []
    for tokens in TOKENS:
        names = [sweep_case(PLOTTED_MODEL, tokens).name] + [case.name for case in CASES.values() if _plain(case, tokens)]
        found = [record for name in names if (record := latest(records, name, system)) and not record.error]
        if found:
            points.append((float(tokens), max(found, key=lambda record: record.date).tflops))
    return points


def _plain(case: Case, tokens: int) -> bool:
    return (case.model, case.tokens, case.seq_len, case.layers, case.overrides) == (PLOTTED_MODEL, tokens, 1024, None, ())


if __name__ == "__main__":
    main()

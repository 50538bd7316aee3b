"""Writes the tables and the plot of docs/performance.md from the JSON files of benchmarks/results.

    python -m benchmarks.write_page

What was not measured is not shown. Tables stand between markers; everything else on the page is
written by hand. Running it again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import bench_table, capacity, compare, plan_table, roofline, targets
from benchmarks.cases import CASES, TARGETS, Case, sweep_case
from benchmarks.plot import Axes, Series, chart
from benchmarks.records import RESULTS, ROOT, Record, latest, load
from benchmarks.sweep import TOKENS
from benchmarks.systems import OURS, PEERS, TITLES
from megatrain.machine.hardware import GIB

PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "throughput.svg"
COMPARED = ("7.6b-65k", "7.6b-16k", "1.8b-16k", "14.8b-65k")
PLOTTED_MODEL, PLOTTED_PARAMETERS = "qwen2.5-7b", 7_615_616_512
UP = range(0, 701, 100)  # TFLOP/s


@dataclass(frozen=True)
class Shown:
    """A row of the page's tables of figures: a case, its step and what it was allowed, in words."""

    case: str
    step: str
    allowed: str


SPEED = (
    Shown("7.6b-65k", "7.6B, 65,536 tokens", "the whole GPU"),
    Shown("7.6b-131k-fp8", "7.6B, 131,072 tokens, fp8 matmuls", "the whole GPU"),
    Shown("7.6b-16k", "7.6B, 16,384 tokens", "the whole GPU"),
    Shown("7.6b-32k-long", "7.6B, 32,768 tokens, sequences of 8,192", "the whole GPU"),
    Shown("14.8b-65k", "14.8B, 65,536 tokens", "the whole GPU"),
    Shown("1.8b-16k", "1.8B, 16,384 tokens", "the whole GPU"),
    Shown("1.8b-16k-12gib", "1.8B, 16,384 tokens", "12 GiB of the GPU"),
    Shown("14.8b-32k-24gib", "14.8B, 32,768 tokens", "24 GiB of the GPU"),
    Shown("7.6b-65k-streamed", "7.6B, 65,536 tokens", "everything streamed and recomputed"),
)
LION_INT4 = "Lion with int8 moments, int4 checkpoints"
LARGE = (
    Shown("120b-16k", f"**120.2B**, 16,384 tokens, {LION_INT4}", "the whole GPU"),
    Shown("101b-16k", "**101.4B**, 16,384 tokens, AdamW with int8 moments", "the whole GPU"),
    Shown("32b-65k", "32.8B, 65,536 tokens, AdamW with fp32 moments", "the whole GPU"),
    Shown(
        "100b-16k-251gib",
        f"**100.6B**, 16,384 tokens, {LION_INT4}",
        "the whole GPU, 128 GiB of a drive",
    ),
    Shown("32b-32k-24gib", "32.8B, 32,768 tokens, AdamW with int8 moments", "24 GiB of the GPU"),
    Shown("49b-16k-126gib", f"**49.2B**, 16,384 tokens, {LION_INT4}", "the whole GPU"),
    Shown("40b-16k-126gib", "39.8B, 16,384 tokens, AdamW with int8 moments", "the whole GPU"),
    Shown("20b-16k", "20.1B, 16,384 tokens, AdamW with int8 moments", "the whole GPU"),
    Shown(
        "depth-180", "42.5B in 180 layers, 16,384 tokens, Lion with int8 moments", "all streamed"
    ),
    Shown("depth-28", "7.1B in 28 such layers, the same", "all streamed"),
    Shown("7.6b-context-32k", "7.6B, one sequence of 32,768 tokens", "the whole GPU"),
    Shown("7.6b-context-128k", "7.6B, one sequence of 131,072 tokens", "the whole GPU"),
    Shown("7.6b-context-512k", "7.6B, one sequence of 524,288 tokens", "the whole GPU"),
)


@dataclass(frozen=True)
class Script:
    """A benchmark whose JSON is no record of a run: its files, and the figure to show of one."""

    words: str
    wanted: str
    files: str
    figure: Callable[[dict[str, Any]], str]


def _against_plain(report: dict[str, Any]) -> str:
    return f"{report['engine_over_plain']['cpu_s']:.2f} x"


def _losses_apart(report: dict[str, Any]) -> str:
    (_, reference), *others = report["results"].items()
    apart = ", ".join(
        f"{name} {found['percent_apart']['held_out_after']:+.2f}%" for name, found in others
    )
    return f"{apart} after {len(reference['losses'])} steps"


SCRIPTS = (
    Script(
        "SmolLM2-135M on a CPU: processor time of a step against a plain PyTorch loop",
        "1.15 x",
        "cpu_loop*.json",
        _against_plain,
    ),
    Script(
        "fp8 matmuls: held-out loss of a small model against bf16, 100 real steps",
        "0.5%",
        "fp8_quality*.json",
        _losses_apart,
    ),
)


def main() -> None:
    records = load()
    PAGE.write_text(filled(PAGE.read_text(), tables(records)))
    PLOT.write_text(plot(records))


def filled(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """`page` with the lines between `<!-- name -->` and `<!-- /name -->` replaced.

    Raises ValueError for a table that has no place on it.
    """
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if (page.count(begin), page.count(end)) != (1, 1):
            raise ValueError(
                f"the markers {begin.strip()} and {end} must stand on the page once each"
            )
        before, _, rest = page.partition(begin)
        page = before + begin + "\n".join([*lines, ""]) + end + rest.partition(end)[2]
    return page


def tables(records: Sequence[Record]) -> dict[str, Sequence[str]]:
    """Every generated part of the page, by the name of its marker."""
    return {
        "speed": figures(SPEED, records),
        "large": figures(LARGE, records),
        "mixtures": bench_table.table(RESULTS, bench_table.MIXTURES),
        "gpus": bench_table.table(RESULTS, bench_table.GPUS),
        "targets": targets.table(TARGETS, records),
        "capacity": capacity.table(records),
        "scripts": scripts(RESULTS),
        "peers": peers(records),
        "ceilings": ceilings(),
        **plan_table.section(RESULTS),
    }


def figures(shown: Sequence[Shown], records: Sequence[Record]) -> list[str]:
    """Rate, time and memory of each case's newest run. Raises ValueError for one never measured."""
    headings = ("model and step", "allowed", "TFLOP/s", "tokens/s", "s/step", "GPU GiB", "host GiB")
    rows = [f"| {' | '.join(headings)} | measured on |", "|---" * (len(headings) + 1) + "|"]
    for one in shown:
        record = latest(records, one.case, OURS)
        if record is None or record.error:
            raise ValueError(f"no figures of {one.case}")
        result = record.result
        # what PyTorch reserves for a moment, the driver's meter may miss
        gpu = max(result["gpu_peak_bytes"], result["gpu_peak_reserved_bytes"])
        cells = (
            one.step,
            one.allowed,
            f"{record.tflops:.0f}",
            f"{result['tokens_per_s']:,.0f}",
            f"{result['step_s']:.3g}",
            f"{gpu / GIB:.1f}",
            f"{result['host_bytes'] / GIB:.1f}",
            f"{record.date}, {record.machine}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def scripts(folder: Path) -> list[str]:
    """What scripts with figures of their own found, the newest file of each."""
    rows = ["| what | wanted | measured | from |", "|---|---|---|---|"]
    for script in SCRIPTS:
        newest = max(
            folder.rglob(script.files), key=lambda path: (path.parent.name, path.name), default=None
        )
        found = (
            (targets.NOT_YET, "")
            if newest is None
            else (script.figure(json.loads(newest.read_text())), str(newest.relative_to(folder)))
        )
        rows.append(f"| {script.words} | {script.wanted} | {' | '.join(found)} |")
    return rows


def peers(records: Sequence[Record]) -> list[str]:
    """One table for each case that a peer ran, of the machine where one ran last."""
    lines: list[str] = []
    for name in COMPARED:
        peer = max(
            (record for record in records if record.case == name and record.system in PEERS),
            key=lambda one: one.date,
            default=None,
        )
        if peer is not None:
            same = [record for record in records if record.machine == peer.machine]
            lines += [
                f"`{name}`, {peer.date}, {peer.machine}:",
                "",
                *compare.table(same, name, [OURS, *PEERS]),
                "",
            ]
    return lines or [f"{targets.NOT_YET}.".capitalize()]


def ceilings() -> list[str]:
    """The roofline at the sweep's steps."""
    rows = ["| tokens per step | nothing recomputed | all layers recomputed |", "|---|---|---|"]
    for tokens in TOKENS:
        figures = [
            roofline.tflops(PLOTTED_PARAMETERS, tokens, roofline.H200, recomputed)
            for recomputed in (0.0, 1.0)
        ]
        rows.append(f"| {tokens:,} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")
    return rows


# -- plot -----------------------------------------------------------------------------------


def plot(records: Sequence[Record]) -> str:
    """Measured throughput of the 7.6B model over tokens per step, under the roofline of an H200."""
    lines = [
        Series(TITLES[system], points)
        for system in (OURS, *PEERS)
        if (points := measured(records, system))
    ]
    for words, recomputed in (("limit, all streamed", 0.0), ("limit, also recomputed", 1.0)):
        steps = [2 ** (power / 4) for power in range(48, 69)]
        points = [
            (tokens, roofline.tflops(PLOTTED_PARAMETERS, int(tokens), roofline.H200, recomputed))
            for tokens in steps
        ]
        lines.append(Series(words, points, limit=True))
    title = "7.6B parameters on one H200: TFLOP/s over tokens per step"
    return chart(title, "tokens per step", "TFLOP/s", Axes(TOKENS, UP), lines)


def measured(records: Sequence[Record], system: str) -> list[tuple[float, float]]:
    """(tokens per step, TFLOP/s) of every measured point of the sweep, or of a case like it."""
    points = []
    for tokens in TOKENS:
        names = [sweep_case(PLOTTED_MODEL, tokens).name] + [
            case.name for case in CASES.values() if _plain(case, tokens)
        ]
        found = [
            record
            for name in names
            if (record := latest(records, name, system)) and not record.error
        ]
        if found:
            points.append((float(tokens), max(found, key=lambda record: record.date).tflops))
    return points


def _plain(case: Case, tokens: int) -> bool:
    return (case.model, case.tokens, case.seq_len, case.layers, case.overrides) == (
        PLOTTED_MODEL,
        tokens,
        1024,
        None,
        (),
    )


if __name__ == "__main__":
    main()

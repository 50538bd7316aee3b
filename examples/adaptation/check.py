"""What an adaptation came to: `python -m examples.adaptation.check RUNS`.

Prints a table of figures before and after each stage, writes it as `result.json` beside the runs,
and exits with an error unless held-out text of the domain is predicted better, general text about
as well, and held-out pairs are told apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS, SECONDS, RESULT = "tasks-{}.json", "seconds.json", "result.json"
STAGES = ("1-pretrain", "2-sft", "3-dpo")
# figure of a task -> what the table calls it
FIGURES = {
    "folio_text bits_per_byte": "Folio, bits per byte",
    "general_text bits_per_byte": "Wikipedia, bits per byte",
    "folio_spelling acc": "spelling, of 4",
    "folio_next acc_norm": "next speech, of 4",
    "general_next acc_norm": "next sentence, of 4",
}
OF_PAIRS = ("rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")
KEPT = 0.02  # share by which bits per byte of general text may rise
Row = dict[str, Any]


def main(runs: Path) -> None:
    result = read(runs)
    print("\n".join(table(result)))
    (runs / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    if wrong := [*failures(result)]:
        raise SystemExit("error: " + "; ".join(wrong))
    print(f"ok: {runs / STAGES[-1] / 'final'} is the adapted model")


def read(runs: Path) -> Row:
    """Figures of the tasks before and after each stage, and each stage's own held-out figures."""
    tasks, own = {}, {}
    for name in ("before", *STAGES):
        found = json.loads((runs / TASKS.format(name)).read_text())["results"]
        tasks[name] = {
            figure: found[figure.split()[0]][f"{figure.split()[1]},none"] for figure in FIGURES
        }
    for stage in STAGES:
        lines = map(json.loads, (runs / stage / "metrics.jsonl").read_text().splitlines())
        evaluations = [line for line in lines if any(name.startswith("eval_") for name in line)]
        of_rows = [line for line in evaluations if "eval_loss" in line]
        own[stage] = [
            {name: line[f"eval_{name}"] for name in ("loss", *OF_PAIRS) if f"eval_{name}" in line}
            for line in (of_rows[0], of_rows[-1])
        ]
    seconds = json.loads((runs / SECONDS).read_text()) if (runs / SECONDS).exists() else {}
    return {"tasks": tasks, "held_out": own, "seconds": seconds}


def table(result: Row) -> Iterator[str]:
    """As Markdown."""
    yield f"| | {' | '.join(FIGURES.values())} | own held-out loss | wall time |"
    yield "|---" * (len(FIGURES) + 3) + "|"
    for stage, figures in result["tasks"].items():
        shown = [f"{figures[name]:.3f}" for name in FIGURES]
        losses = " -> ".join(f"{row['loss']:.3f}" for row in result["held_out"].get(stage, []))
        seconds = result["seconds"].get(stage)
        shown += [losses, "" if seconds is None else f"{seconds['wall']:.0f} s"]
        yield f"| {stage} | {' | '.join(shown)} |"
    yield ""
    first, last = result["held_out"]["3-dpo"]
    for name in OF_PAIRS:
        yield f"held-out pairs, {name}: {first[name]:.3f} -> {last[name]:.3f}"
    wall, processor = (
        sum(seconds[kind] for seconds in result["seconds"].values())
        for kind in ("wall", "processor")
    )
    yield f"all in all {wall:.0f} s, {processor:.0f} s of processors"


def failures(result: Row) -> Iterator[str]:
    tasks, own = result["tasks"], result["held_out"]
    for name, allowed in (("folio_text", 1.0), ("general_text", 1 + KEPT)):
        figure = f"{name} bits_per_byte"
        before, after = tasks["before"][figure], tasks[STAGES[-1]][figure]
        if after >= before * allowed:
            yield f"{figure} went from {before:.3f} to {after:.3f}"
    for stage, (first, last) in own.items():
        if last["loss"] >= first["loss"]:
            yield f"{stage}: the held-out loss did not fall"
    first, last = own["3-dpo"]
    accuracy = last["rewards/accuracies"]
    if accuracy <= max(0.5, first["rewards/accuracies"]) or last["rewards/margins"] <= 0:
        yield f"held-out pairs are not told apart: accuracy {accuracy:.3f}"
    if tasks[STAGES[-1]]["folio_spelling acc"] <= tasks["before"]["folio_spelling acc"]:
        yield "the Folio's spelling is chosen no more often"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m examples.adaptation.check RUNS")
    main(Path(sys.argv[1]))

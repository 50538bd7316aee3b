"""Plans against runs as a table: the newest run of every configuration in plan_cases.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plan_cases import CPU_CASES, CUDA_CASES
from benchmarks.plan_check import (
    GPU_TOLERANCE,
    HOST_TOLERANCE,
    TIME_TOLERANCE,
    errors,
    misjudged,
    over_limits,
)
from megatrain.machine.hardware import GIB

Figures = tuple[tuple[str, str, float], ...]  # what is measured, in words, and the promise
ON_GPU: Figures = (
    ("allocated", "GPU GiB, allocated", GPU_TOLERANCE),
    ("driver", "GPU GiB, as the driver counts", GPU_TOLERANCE),
)
EVERYWHERE: Figures = (("host", "host GiB", HOST_TOLERANCE), ("seconds", "s/step", TIME_TOLERANCE))
# Names of configurations are keys of recorded results; the page shows them in the field's terms.
SHOWN = {
    "rows of many lengths": "variable-length sequences",
    "all retained": "all activations saved",
    "half retained": "half of the activations saved",
    "cheaply retained": "selective checkpointing",
    "compiled, retained": "compiled, all activations saved",
    "groups, sums on the": "accumulation groups, gradients summed on the",
    "sums here and there": "gradients summed on both",
    "offloaded": "activation checkpoints in host RAM",
    "graphs in host RAM": "saved activations in host RAM",
    "head decides": "the head needs most",
    "planned freely": "planned without settings",
}


@dataclass(frozen=True)
class Checked:
    """One configuration, as `plan_check` reports it, and the day of its run."""

    result: Mapping[str, Any]
    day: str

    @property
    def refused(self) -> bool:
        return bool(self.result["refused"])

    @property
    def errors(self) -> dict[str, float]:
        return errors(self.result)


def newest(folder: Path, device: str) -> dict[str, Checked]:
    """The newest complete run of each configuration, by name, in the order of the cases.

    Of runs of one day the last file counts; runs that were not timed, or failed, do not.
    """
    found: dict[str, Checked] = {}
    for path in sorted(folder.glob("*/plan_check*.json")):
        report = json.loads(path.read_text())
        if report["device"] == device:
            complete = {
                name: result for name, result in report["cases"].items() if _is_complete(result)
            }
            found |= {
                name: Checked(result, path.parent.name[: len("2026-01-01")])
                for name, result in complete.items()
            }
    return {
        name: found[name]
        for name in (CUDA_CASES if device == "cuda" else CPU_CASES)
        if name in found
    }


def _is_complete(result: Mapping[str, Any]) -> bool:
    return "refused" in result and (result["refused"] or "seconds" in result["predicted"])


def table(checked: Mapping[str, Checked], device: str) -> list[str]:
    """How many plans kept their promises, then a row for each configuration."""
    figures = (*ON_GPU, *EVERYWHERE) if device == "cuda" else EVERYWHERE
    headings = [
        "configuration",
        "parameters",
        *(cell for _, words, _ in figures for cell in (words, "plan")),
        "run on",
    ]
    rows = [_row(name, one, figures) for name, one in checked.items()]
    return [
        *_summary(checked, figures),
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
        *rows,
    ]


def _summary(checked: Mapping[str, Checked], figures: Figures) -> Iterator[str]:
    runs = [one for one in checked.values() if not one.refused]
    for figure, words, tolerance in figures:
        apart = sorted(one.errors[figure] for one in runs)
        kept = sum(abs(error) <= tolerance for error in apart)
        extremes = f"{apart[0]:+.1%} and {apart[-1]:+.1%}"
        yield f"- {words}: {kept} of {len(runs)} within {tolerance:.0%}, all within {extremes}"
    edges = [one.result for one in checked.values() if one.result["case"]["edge"]]
    right = sum(not (misjudged(edge) or over_limits(edge)) for edge in edges)
    promise = "refused just below the need, accepted and kept just above"
    yield f"- {right} of {len(edges)} edges right: {promise}"


def _row(name: str, one: Checked, figures: Figures) -> str:
    for recorded, shown in SHOWN.items():
        name = name.replace(recorded, shown)
    cells = [name, f"{one.result['parameters'] / 1e9:.2f}B"]
    for figure, _, _ in figures:
        cells += (
            ["refused", ""]
            if one.refused
            else [_shown(figure, one.result["measured"][figure]), f"{one.errors[figure]:+.1%}"]
        )
    return f"| {' | '.join([*cells, one.day])} |"


def _shown(figure: str, value: float) -> str:
    return f"{value:.3g}" if figure == "seconds" else f"{value / GIB:.2f}"


def section(folder: Path) -> dict[str, Sequence[str]]:
    """The page's tables, by the names of their markers."""
    return {f"plans-{device}": table(newest(folder, device), device) for device in ("cuda", "cpu")}

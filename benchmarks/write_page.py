"""Writes the tables of docs/performance.md from the JSON files of benchmarks/results.

    python -m benchmarks.write_page

Tables stand between markers; everything else on the page is written by hand. Running it again
changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import CAPACITY_CASES, SAME_BATCH
from benchmarks.measure import table as peer_table
from benchmarks.plan_cases import CPU_CASES, CUDA_CASES
from benchmarks.plan_check import (
    GPU_TOLERANCE,
    HOST_TOLERANCE,
    TIME_TOLERANCE,
    errors,
    misjudged,
    over_limits,
)
from benchmarks.records import RESULTS, ROOT, Record, latest, load
from benchmarks.systems import OURS, PEERS
from megatrain.machine.datasheets import peak_tflops
from megatrain.machine.hardware import GIB

PAGE = ROOT / "docs" / "performance.md"
COMPARED = ("7.6b-65k", "7.6b-16k", "1.8b-16k", "14.8b-65k")


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), tables(load())))


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
        "mixtures": benched(RESULTS, MIXTURES),
        "gpus": benched(RESULTS, GPUS),
        "capacity": capacity(records),
        "peers": peers(records),
        **section(RESULTS),
    }


# -- speed and size -------------------------------------------------------------------------------


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


# -- peers ----------------------------------------------------------------------------------------


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
                *peer_table(same, name, [OURS, *PEERS]),
                "",
            ]
    return lines or ["Not measured yet."]


# -- what `megatrain bench --json` printed, beside its plan ---------------------------------------

BENCHED = ("model and step", "TFLOP/s", "tokens/s", "s/step", "GPU GiB", "host GiB", "waiting")
LEAST = 0.005  # of a step that is waited, to be shown


@dataclass(frozen=True)
class Benched:
    """A row: the file below benchmarks/results, and its model and step in words."""

    words: str
    file: str


H200, FOUR_H200 = "2026-11-25-h200", "2026-11-26-h200"
H100, HOT_H100 = "2026-11-25-h100", "2026-11-26-h100"  # heated before rates are measured
TWO_H200, TWO_H100 = "2026-11-27-h200", "2026-11-27-h100"
MIXTURES = (
    Benched(
        "GPT-OSS-120B, whole (116.8B), Lion, int8 moments",
        f"{FOUR_H200}/gpt-oss-120b-65k.ours.json",
    ),
    *(
        Benched(f"Qwen3-30B-A3B, whole, {n} tokens", f"{FOUR_H200}/qwen3-30b-a3b-{name}.ours.json")
        for n, name in (("16,384", "16k"), ("65,536", "65k"), ("262,144", "262k"))
    ),
    Benched("Qwen3-30B-A3B, whole, in half the RAM", f"{H200}/qwen3-30b-a3b-65k.json"),
    Benched("Qwen3-30B-A3B, 27 layers (17.4B)", f"{H200}/qwen3-30b-a3b-27-layers-65k.json"),
    Benched("Qwen3-30B-A3B, 10 layers (6.9B)", f"{H200}/qwen3-30b-a3b-10-layers-65k.json"),
    Benched(
        "Qwen3-30B-A3B, 10 layers, 24 GiB of GPU memory",
        f"{H200}/qwen3-30b-a3b-10-layers-65k-24gib.json",
    ),
    Benched("GPT-OSS-20B, whole, int8 moments", f"{H200}/gpt-oss-20b-65k-again.json"),
    Benched(
        "Qwen3.5-35B-A3B, 4 layers (4.4B), flash-linear-attention",
        f"{H200}/qwen3.5-35b-a3b-4-layers-65k-again.json",
    ),
)
ONE, TWO, FOUR = "ours.1-gpu.json", "ours.2-gpus.json", "ours.4-gpus.json"
GPUS = (
    Benched("7.6B, 65,536 tokens, one H200", f"{FOUR_H200}/7.6b-65k-each.{ONE}"),
    Benched("7.6B, 65,536 tokens on each of two H200", f"{FOUR_H200}/7.6b-65k-each.{TWO}"),
    Benched("7.6B, 65,536 tokens on each of four H200", f"{FOUR_H200}/7.6b-65k-each.{FOUR}"),
    Benched("7.6B, 65,536 tokens, one of two H200", f"{TWO_H200}/7.6b-65k-in-all.{ONE}"),
    Benched("7.6B, 65,536 tokens on two H200 in all", f"{TWO_H200}/7.6b-65k-in-all.{TWO}"),
    Benched("7.6B, 65,536 tokens on four H200 in all", f"{FOUR_H200}/7.6b-65k-in-all.{FOUR}"),
    Benched("32.8B, int8 moments, 65,536 tokens, one H200", f"{FOUR_H200}/32.8b-65k-each.{ONE}"),
    Benched("32.8B, the same on each of two H200", f"{FOUR_H200}/32.8b-65k-each.{TWO}"),
    Benched("32.8B, the same on each of four H200", f"{FOUR_H200}/32.8b-65k-each.{FOUR}"),
    Benched(
        "177.5B (205 of Llama-3-70B's layers), Lion, int8 moments and checkpoints of int4, 16,384 "
        "tokens on each of four H200",
        f"{FOUR_H200}/177b-16k-each.{FOUR}",
    ),
    Benched(
        "95.4B (109 of Llama-3-70B's layers), Lion, int8 moments and checkpoints of int4, 16,384 "
        "tokens on each of two H200",
        f"{FOUR_H200}/95b-16k-each.{TWO}",
    ),
    Benched(
        "7.6B, one sequence of 524,288 tokens shared by two H200",
        f"{FOUR_H200}/7.6b-context-512k.{TWO}",
    ),
    Benched("7.6B, 65,536 tokens, one H100 by itself", f"{HOT_H100}/7.6b-65k.json"),
    Benched("7.6B, 16,384 tokens, one H100 by itself", f"{HOT_H100}/7.6b-16k.json"),
    Benched("7.6B, 65,536 tokens, one of two H100", f"{HOT_H100}/7.6b-65k-in-all.{ONE}"),
    Benched("7.6B, 65,536 tokens on each of two H100", f"{HOT_H100}/7.6b-65k-each.{TWO}"),
    Benched("7.6B, 65,536 tokens, one of two other H100", f"{TWO_H100}/7.6b-65k-in-all.{ONE}"),
    Benched("7.6B, 65,536 tokens on both in all", f"{TWO_H100}/7.6b-65k-in-all.{TWO}"),
    Benched("7.6B, 16,384 tokens, one of two H100", f"{TWO_H100}/7.6b-16k-in-all.{ONE}"),
    Benched("7.6B, 16,384 tokens on two H100 in all", f"{TWO_H100}/7.6b-16k-in-all.{TWO}"),
    Benched(
        "7.6B, 32,768 tokens, one of two H100", f"{TWO_H100}/7.6b-32k-each-no-peer-access.{ONE}"
    ),
    Benched(
        "7.6B, 32,768 tokens on each of two H100, no peer access",
        f"{TWO_H100}/7.6b-32k-each-no-peer-access.{TWO}",
    ),
    Benched("14.8B, 65,536 tokens, one of two H100", f"{TWO_H100}/14.8b-65k-each.{ONE}"),
    Benched("14.8B, 65,536 tokens on each of two H100", f"{TWO_H100}/14.8b-65k-each.{TWO}"),
    Benched("3.4B, 65,536 tokens on each of two H100", f"{H100}/3.4b-65k-each.{TWO}"),
    Benched(
        "the same, DeepSpeed ZeRO-3 offload", f"{H100}/3.4b-65k-each.zero3.2-gpus.32-rows.json"
    ),
    Benched("the same, PyTorch FSDP2 offload", f"{H100}/3.4b-65k-each.fsdp2.2-gpus.32-rows.json"),
)


def benched(folder: Path, shown: Sequence[Benched]) -> list[str]:
    """A row for each, with what was measured and, in brackets, by how much it exceeds the plan."""
    rows = [f"| {' | '.join(BENCHED)} | measured on |", "|---" * (len(BENCHED) + 1) + "|"]
    return rows + [
        _benched_row(one.words, json.loads((folder / one.file).read_text())) for one in shown
    ]


def _benched_row(words: str, found: dict[str, Any]) -> str:
    result = found.get("result", found)  # of a record, too

    def beside(name: str, figure: str) -> str:
        planned = "error" in result
        return f"{figure} ({result['error'][name]:+.1%})" if planned else figure

    waits = {
        name.removeprefix("wait_"): share
        for name, share in result.get("shares", {}).items()
        if name != "compute" and share > LEAST
    }
    waiting = ", ".join(f"{name} {share:.1%}" for name, share in waits.items()) or "none"
    cells = (
        words,
        f"{result['tflops']:.0f}",
        f"{result['tokens_per_s']:,.0f}",
        beside("step_s", f"{result['step_s']:.3g}"),
        beside("gpu_peak_bytes", f"{result['gpu_peak_bytes'] / GIB:.1f}"),
        beside("host_bytes", f"{result['host_bytes'] / GIB:.1f}"),
        waiting if "shares" in result else "not told",
        _where(found),
    )
    return f"| {' | '.join(cells)} |"


def _where(found: dict[str, Any]) -> str:
    """The day, the cores and the RAM of the host."""
    if "result" in found:
        return f"{found['date']}, {found['machine'].partition(', ')[2]}"
    hardware, ranks = found["environment"]["hardware"], found.get("ranks", 1)
    cores, ram = hardware["physical_cores"] * ranks, hardware["host_total_bytes"] * ranks / GIB
    return f"{found['environment']['date']}, {cores} cores, {ram:.0f} GiB of RAM"


# -- capacity, in detail --------------------------------------------------------------------------

CAPACITY = (
    *("case", "parameters", "tokens/step", "context", "TFLOP/s", "with attention", "tokens/s"),
    *("s/step", "planned", "GPU GiB", "planned", "host GiB", "planned", "disk GiB"),
    *("bound by", "loss", "measured on"),
)


def capacity(records: Sequence[Record]) -> list[str]:
    """Markdown rows: every case that was tried."""
    rows = [f"| {' | '.join(CAPACITY)} |", "|" + "---|" * len(CAPACITY)]
    tried = ((name, latest(records, name, OURS)) for name in CAPACITY_CASES)
    return rows + [f"| {' | '.join(cells(name, record))} |" for name, record in tried if record]


def cells(name: str, record: Record) -> list[str]:
    """One case's figures, or why there are none."""
    where = f"{record.date}, {record.machine}"
    if record.error:
        return [
            name,
            f"failed: {record.error.replace('|', '/')}",
            *[""] * (len(CAPACITY) - 3),
            where,
        ]
    result, predicted = record.result, record.result["predicted"]
    phases = result["plan"]["timing"]["phases"]
    longest = max(phases, key=lambda phase: phases[phase])
    on_disk = result["plan"]["totals"].get("nvme", {}).get("need", 0)
    steps = result.get("warmup_steps", []) + result["steps"]
    return [
        name,
        f"{result['parameters'] / 1e9:.1f}B",
        f"{result['tokens']:,}",
        f"{result['config']['train']['seq_len']:,}",
        f"{result['tflops']:.0f}",
        _with_attention(result["mfu"], record.machine),
        f"{result['tokens_per_s']:,.0f}",
        f"{result['step_s']:.1f}",
        f"{predicted['step_s']:.1f}",
        _gib(
            max(result["gpu_peak_bytes"] or 0, result["gpu_peak_reserved_bytes"] or 0)
        ),  # what is given back soon, the meter may miss
        _gib(predicted["gpu_peak_bytes"]),
        _gib(result["host_bytes"]),
        _gib(predicted["host_bytes"]),
        _gib(on_disk),
        f"{longest}: {result['plan']['timing']['bound_by'][longest]}",
        f"{steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}"
        if SAME_BATCH in record.command and len(steps) > 1
        else "-",
        where,
    ]


def _with_attention(mfu: float | None, machine: str) -> str:
    """TFLOP/s of matrix products and causal attention, nothing counted twice."""
    peak = peak_tflops(machine.split(",")[0])
    return "-" if mfu is None or peak is None else f"{mfu * peak:.0f}"


def _gib(nbytes: int | None) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes else "-"


# -- plans against runs ---------------------------------------------------------------------------

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


def planned(checked: Mapping[str, Checked], device: str) -> list[str]:
    """How many plans kept their promises, then a row for each configuration."""
    figures = (*ON_GPU, *EVERYWHERE) if device == "cuda" else EVERYWHERE
    headings = [
        "configuration",
        "parameters",
        *(cell for _, words, _ in figures for cell in (words, "plan")),
        "run on",
    ]
    rows = [_planned_row(name, one, figures) for name, one in checked.items()]
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


def _planned_row(name: str, one: Checked, figures: Figures) -> str:
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
    return {
        f"plans-{device}": planned(newest(folder, device), device) for device in ("cuda", "cpu")
    }


if __name__ == "__main__":
    main()

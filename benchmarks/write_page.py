"""Writes the tables of docs/performance.md from the JSON files of benchmarks/results.

    python -m benchmarks.write_page

Tables stand between markers; everything else on the page is written by hand. Running it again
changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CAPACITY_CASES, OURS, PEERS, SAME_BATCH
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
        **{f"plans-{on}": planned(newest(RESULTS, on), on) for on in ("cuda", "cpu")},
    }


# -- speed and size -------------------------------------------------------------------------------


# a case, its step and what it was allowed, in words
SPEED = (
    ("7.6b-65k", "7.6B, 65,536 tokens", "the whole GPU"),
    ("7.6b-131k-fp8", "7.6B, 131,072 tokens, fp8 matmuls", "the whole GPU"),
    ("7.6b-16k", "7.6B, 16,384 tokens", "the whole GPU"),
    ("7.6b-32k-long", "7.6B, 32,768 tokens, sequences of 8,192", "the whole GPU"),
    ("14.8b-65k", "14.8B, 65,536 tokens", "the whole GPU"),
    ("1.8b-16k", "1.8B, 16,384 tokens", "the whole GPU"),
    ("1.8b-16k-12gib", "1.8B, 16,384 tokens", "12 GiB of the GPU"),
    ("14.8b-32k-24gib", "14.8B, 32,768 tokens", "24 GiB of the GPU"),
    ("7.6b-65k-streamed", "7.6B, 65,536 tokens", "everything streamed and recomputed"),
)


def figures(shown: Sequence[tuple[str, str, str]], records: Sequence[Record]) -> list[str]:
    """Rate, time and memory of each case's newest run. Raises ValueError for one never measured."""
    headings = ("model and step", "allowed", "TFLOP/s", "tokens/s", "s/step", "GPU GiB", "host GiB")
    rows = [f"| {' | '.join(headings)} | measured on |", "|---" * (len(headings) + 1) + "|"]
    for case, step, allowed in shown:
        record = latest(records, case, OURS)
        if record is None or record.error:
            raise ValueError(f"no figures of {case}")
        result = record.result
        # what PyTorch reserves for a moment, the driver's meter may miss
        gpu = max(result["gpu_peak_bytes"], result["gpu_peak_reserved_bytes"])
        cells = (
            step,
            allowed,
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


H200, FOUR_H200 = "2026-11-25-h200", "2026-11-26-h200"
H100, HOT_H100 = "2026-11-25-h100", "2026-11-26-h100"  # heated before rates are measured
TWO_H200, TWO_H100, LONG_H200 = "2026-11-27-h200", "2026-11-27-h100", "2026-11-30-h200"
# model and step in words, and the file below benchmarks/results
MIXTURES = (
    (
        "GPT-OSS-120B, whole (116.8B), Lion, int8 moments",
        f"{FOUR_H200}/gpt-oss-120b-65k.ours.json",
    ),
    *(
        (f"Qwen3-30B-A3B, whole, {n} tokens", f"{FOUR_H200}/qwen3-30b-a3b-{name}.ours.json")
        for n, name in (("16,384", "16k"), ("65,536", "65k"), ("262,144", "262k"))
    ),
    ("Qwen3-30B-A3B, whole, in half the RAM", f"{H200}/qwen3-30b-a3b-65k.json"),
    ("Qwen3-30B-A3B, 27 layers (17.4B)", f"{H200}/qwen3-30b-a3b-27-layers-65k.json"),
    ("Qwen3-30B-A3B, 10 layers (6.9B)", f"{H200}/qwen3-30b-a3b-10-layers-65k.json"),
    (
        "Qwen3-30B-A3B, 10 layers, 24 GiB of GPU memory",
        f"{H200}/qwen3-30b-a3b-10-layers-65k-24gib.json",
    ),
    ("GPT-OSS-20B, whole, int8 moments", f"{H200}/gpt-oss-20b-65k-again.json"),
    (
        "Qwen3.5-35B-A3B, 4 layers (4.4B), flash-linear-attention",
        f"{H200}/qwen3.5-35b-a3b-4-layers-65k-again.json",
    ),
)
ONE, TWO, FOUR = "ours.1-gpu.json", "ours.2-gpus.json", "ours.4-gpus.json"
GPUS = (
    ("7.6B, 65,536 tokens, one H200", f"{FOUR_H200}/7.6b-65k-each.{ONE}"),
    ("7.6B, 65,536 tokens on each of four H200", f"{FOUR_H200}/7.6b-65k-each.{FOUR}"),
    ("7.6B, 65,536 tokens, one of two other H200", f"2026-11-29-h200/7.6b-65k-each.{ONE}"),
    ("7.6B, 65,536 tokens on each of both", f"2026-11-29-h200/7.6b-65k-each.{TWO}"),
    ("7.6B, 65,536 tokens, one of two H200", f"{TWO_H200}/7.6b-65k-in-all.{ONE}"),
    ("7.6B, 65,536 tokens on two H200 in all", f"{TWO_H200}/7.6b-65k-in-all.{TWO}"),
    ("7.6B, 65,536 tokens on four H200 in all", f"{FOUR_H200}/7.6b-65k-in-all.{FOUR}"),
    ("32.8B, int8 moments, 65,536 tokens, one H200", f"{FOUR_H200}/32.8b-65k-each.{ONE}"),
    ("32.8B, the same on each of two H200", f"{FOUR_H200}/32.8b-65k-each.{TWO}"),
    ("32.8B, the same on each of four H200", f"{FOUR_H200}/32.8b-65k-each.{FOUR}"),
    (
        "177.5B (205 of Llama-3-70B's layers), Lion, int8 moments and checkpoints of int4, 16,384 "
        "tokens on each of four H200",
        f"{FOUR_H200}/177b-16k-each.{FOUR}",
    ),
    (
        "95.4B (109 of Llama-3-70B's layers), Lion, int8 moments and checkpoints of int4, 16,384 "
        "tokens on each of two H200",
        f"{FOUR_H200}/95b-16k-each.{TWO}",
    ),
    ("7.6B, one sequence of 524,288 tokens, one H200", f"{LONG_H200}/7.6b-context-512k.{ONE}"),
    ("7.6B, the same shared by two H200", f"{LONG_H200}/7.6b-context-512k.{TWO}"),
    ("7.6B, 65,536 tokens, one H100 by itself", f"{HOT_H100}/7.6b-65k.json"),
    ("7.6B, 16,384 tokens, one H100 by itself", f"{HOT_H100}/7.6b-16k.json"),
    ("7.6B, 65,536 tokens, one of two H100", f"{HOT_H100}/7.6b-65k-in-all.{ONE}"),
    ("7.6B, 65,536 tokens on each of two H100", f"{HOT_H100}/7.6b-65k-each.{TWO}"),
    ("7.6B, 65,536 tokens, one of two other H100", f"{TWO_H100}/7.6b-65k-in-all.{ONE}"),
    ("7.6B, 65,536 tokens on both in all", f"{TWO_H100}/7.6b-65k-in-all.{TWO}"),
    ("7.6B, 16,384 tokens, one of two H100", f"{TWO_H100}/7.6b-16k-in-all.{ONE}"),
    ("7.6B, 16,384 tokens on two H100 in all", f"{TWO_H100}/7.6b-16k-in-all.{TWO}"),
    ("7.6B, 32,768 tokens, one of two H100", f"{TWO_H100}/7.6b-32k-each-no-peer-access.{ONE}"),
    (
        "7.6B, 32,768 tokens on each of two H100, no peer access",
        f"{TWO_H100}/7.6b-32k-each-no-peer-access.{TWO}",
    ),
    ("14.8B, 65,536 tokens, one of two H100", f"{TWO_H100}/14.8b-65k-each.{ONE}"),
    ("14.8B, 65,536 tokens on each of two H100", f"{TWO_H100}/14.8b-65k-each.{TWO}"),
    ("3.4B, 65,536 tokens on each of two H100", f"{H100}/3.4b-65k-each.{TWO}"),
    ("the same, DeepSpeed ZeRO-3 offload", f"{H100}/3.4b-65k-each.zero3.2-gpus.32-rows.json"),
    ("the same, PyTorch FSDP2 offload", f"{H100}/3.4b-65k-each.fsdp2.2-gpus.32-rows.json"),
)


def benched(folder: Path, shown: Sequence[tuple[str, str]]) -> list[str]:
    """A row for each, with what was measured and, in brackets, by how much it exceeds the plan."""
    rows = [f"| {' | '.join(BENCHED)} | measured on |", "|---" * (len(BENCHED) + 1) + "|"]
    return rows + [_benched_row(w, json.loads((folder / file).read_text())) for w, file in shown]


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
    *("case", "parameters", "tokens/step", "TFLOP/s", "tokens/s", "s/step", "GPU GiB", "host GiB"),
    *("disk GiB", "loss", "measured on"),
)


def capacity(records: Sequence[Record]) -> list[str]:
    """Markdown rows of every case that was tried; in brackets how much was measured over the
    plan."""
    rows = [f"| {' | '.join(CAPACITY)} |", "|" + "---|" * len(CAPACITY)]
    tried = ((name, latest(records, name, OURS)) for name in CAPACITY_CASES)
    return rows + [f"| {' | '.join(_cells(name, record))} |" for name, record in tried if record]


def _cells(name: str, record: Record) -> list[str]:
    where = f"{record.date}, {record.machine}"
    if record.error:
        failed = f"failed: {record.error.replace('|', '/')}"
        return [name, failed, *[""] * (len(CAPACITY) - 3), where]
    result, predicted = record.result, record.result["predicted"]
    # what is given back soon, the driver's meter may miss
    gpu = max(result["gpu_peak_bytes"] or 0, result["gpu_peak_reserved_bytes"] or 0)
    on_disk = result["plan"]["totals"].get("nvme", {}).get("need", 0)
    losses = [step["loss"] for step in (*result.get("warmup_steps", []), *result["steps"])]
    learnt = SAME_BATCH in record.command and len(losses) > 1

    def beside(value: float, planned: float | None, unit: int = 1) -> str:
        return f"{value / unit:.1f} ({value / planned - 1:+.1%})" if value and planned else "-"

    return [
        name,
        f"{result['parameters'] / 1e9:.1f}B",
        f"{result['tokens']:,}",
        f"{result['tflops']:.0f}",
        f"{result['tokens_per_s']:,.0f}",
        beside(result["step_s"], predicted["step_s"]),
        beside(gpu, predicted["gpu_peak_bytes"], GIB),
        beside(result["host_bytes"], predicted["host_bytes"], GIB),
        f"{on_disk / GIB:.1f}" if on_disk else "-",
        f"{losses[0]:.3f} to {losses[-1]:.3f}" if learnt else "-",
        where,
    ]


# -- plans against runs ---------------------------------------------------------------------------

Figures = tuple[tuple[str, str, float], ...]  # what is measured, in words, and the promise
ON_GPU: Figures = (
    ("allocated", "GPU GiB, allocated", GPU_TOLERANCE),
    ("driver", "GPU GiB, as the driver counts", GPU_TOLERANCE),
)
EVERYWHERE: Figures = (("host", "host GiB", HOST_TOLERANCE), ("seconds", "s/step", TIME_TOLERANCE))


def newest(folder: Path, device: str) -> dict[str, dict[str, Any]]:
    """The newest complete run of each configuration, by name, as `plan_check` reports it, with its
    `day`.

    Of runs of one day the last file counts; runs that were not timed, or failed, do not.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/plan_check*.json")):
        report, day = json.loads(path.read_text()), path.parent.name[: len("2026-01-01")]
        if report["device"] == device:
            for name, result in report["cases"].items():
                refused = result.get("refused")
                if refused or (refused is False and "seconds" in result["predicted"]):
                    found[name] = {**result, "day": day}
    known = CUDA_CASES if device == "cuda" else CPU_CASES
    return {name: found[name] for name in known if name in found}


def planned(checked: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """Markdown list of the promises that plans kept. Raises IndexError without any run."""
    lines, runs = [], [errors(one) for one in checked.values() if not one["refused"]]
    for figure, words, tolerance in (*ON_GPU, *EVERYWHERE) if device == "cuda" else EVERYWHERE:
        apart = sorted(one[figure] for one in runs)
        kept = sum(abs(error) <= tolerance for error in apart)
        within = f"{kept} of {len(runs)} within {tolerance:.0%}"
        lines.append(f"- {words}: {within}, all within {apart[0]:+.1%} and {apart[-1]:+.1%}")
    edges = [one for one in checked.values() if one["case"]["edge"]]
    right = sum(not (misjudged(edge) or over_limits(edge)) for edge in edges)
    promise = "refused just below the need, accepted and kept just above"
    days = sorted(one["day"] for one in checked.values())
    ran = f"- newest runs from {days[0]} to {days[-1]}"
    return [*lines, f"- {right} of {len(edges)} edges right: {promise}", ran]


if __name__ == "__main__":
    main()

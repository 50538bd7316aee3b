"""Tables of docs/performance.md from what `megatrain bench --json` printed: figures beside the plan
that was made before the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.machine.hardware import GIB

HEADINGS = ("model and step", "TFLOP/s", "tokens/s", "s/step", "GPU GiB", "host GiB", "waiting")
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


def table(folder: Path, shown: Sequence[Benched]) -> list[str]:
    """A row for each, with what was measured and, in brackets, by how much it exceeds the plan."""
    rows = [f"| {' | '.join(HEADINGS)} | measured on |", "|---" * (len(HEADINGS) + 1) + "|"]
    return rows + [_row(one.words, json.loads((folder / one.file).read_text())) for one in shown]


def _row(words: str, found: dict[str, Any]) -> str:
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

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


H200, H100 = "2026-11-25-h200", "2026-11-25-h100"
MIXTURES = (
    Benched("Qwen3-30B-A3B, whole (30.5B)", f"{H200}/qwen3-30b-a3b-65k.json"),
    Benched("Qwen3-30B-A3B, 27 layers (17.4B)", f"{H200}/qwen3-30b-a3b-27-layers-65k.json"),
    Benched("Qwen3-30B-A3B, 10 layers (6.9B)", f"{H200}/qwen3-30b-a3b-10-layers-65k.json"),
    Benched("GPT-OSS-20B, whole, int8 moments", f"{H200}/gpt-oss-20b-65k-offloaded.json"),
    Benched(
        "Qwen3.5-35B-A3B, 4 layers (4.4B), flash-linear-attention",
        f"{H200}/qwen3.5-35b-a3b-4-layers-65k-profiled.json",
    ),
)
GPUS = (
    Benched("7.6B, 65,536 tokens, one H200", f"{H200}/7.6b-65k-beside-2.json"),
    Benched("7.6B, 65,536 tokens on each of two H200", f"{H200}/7.6b-65k-each-of-2.json"),
    Benched("7.6B, 65,536 tokens, one H100", f"{H100}/7.6b-65k-beside-2.json"),
    Benched("7.6B, 65,536 tokens on each of two H100", f"{H100}/7.6b-65k-each-of-2.json"),
    Benched("3.4B, 65,536 tokens on each of two H100", f"{H100}/3.4b-65k-each-of-2.json"),
)


def table(folder: Path, shown: Sequence[Benched]) -> list[str]:
    """A row for each, with what was measured and, in brackets, by how much it exceeds the plan."""
    rows = [f"| {' | '.join(HEADINGS)} | measured on |", "|---" * (len(HEADINGS) + 1) + "|"]
    return rows + [_row(one.words, json.loads((folder / one.file).read_text())) for one in shown]


def _row(words: str, result: dict[str, Any]) -> str:
    def beside(name: str, figure: str) -> str:
        return f"{figure} ({result['error'][name]:+.1%})"

    waits = {
        name.removeprefix("wait_"): share
        for name, share in result["shares"].items()
        if name != "compute" and share > LEAST
    }
    hardware = result["environment"]["hardware"]
    ranks = result.get("ranks", 1)
    cores, ram = hardware["physical_cores"] * ranks, hardware["host_total_bytes"] * ranks / GIB
    cells = (
        words,
        f"{result['tflops']:.0f}",
        f"{result['tokens_per_s']:,.0f}",
        beside("step_s", f"{result['step_s']:.3g}"),
        beside("gpu_peak_bytes", f"{result['gpu_peak_bytes'] / GIB:.1f}"),
        beside("host_bytes", f"{result['host_bytes'] / GIB:.1f}"),
        ", ".join(f"{name} {share:.1%}" for name, share in waits.items()) or "none",
        f"{result['environment']['date']}, {cores} cores, {ram:.0f} GiB of RAM",
    )
    return f"| {' | '.join(cells)} |"

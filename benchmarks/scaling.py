"""What more GPUs would give, by the plan: writes the table of docs/scale.md.

    python -m benchmarks.scaling

H200s with 16 cores and 256 GiB of RAM each, sequences of 1,024, AdamW with fp32 moments, exact
clipping. Rates of several at work are those that two and four H200 reached, in proportion to their
NVLink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.write_page import filled
from megatrain.errors import PlanError
from megatrain.recipes.another_machine import another_machine
from megatrain.recipes.setup import make_run_plan, prepare, quiet_libraries
from megatrain.recipes.shapes import bench_config, shape_model

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
GPU, GIB_EACH, CORES_EACH, GBITS = "H200", 256, 16, 400
HOSTS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 8))  # (GPUs of each, hosts)


@dataclass(frozen=True)
class Case:
    """tokens: of a step, of each GPU or of all."""

    words: str
    model: str
    tokens: int
    each: bool


CASES = (
    Case("7.6B, 65,536 tokens each", "qwen2.5-7b", 65_536, each=True),
    Case("7.6B, 65,536 tokens in all", "qwen2.5-7b", 65_536, each=False),
    Case("7.6B, 16,384 tokens in all", "qwen2.5-7b", 16_384, each=False),
    Case("14.8B, 65,536 tokens each", "qwen2.5-14b", 65_536, each=True),
    Case("32.8B, 65,536 tokens each", "qwen2.5-32b", 65_536, each=True),
)


def main() -> None:
    quiet_libraries()
    PAGE.write_text(filled(PAGE.read_text(), {"planned": list(table(CASES))}))


def table(cases: Sequence[Case]) -> Iterator[str]:
    """Markdown rows."""
    heads = (f"{gpus}" if hosts == 1 else f"{hosts} hosts of {gpus}" for gpus, hosts in HOSTS)
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (len(HOSTS) + 1) + "|"
    for case in cases:
        yield f"| {case.words} | {' | '.join(row(case))} |"


def row(case: Case) -> Iterator[str]:
    """TFLOP/s of each GPU, by their number."""
    parts = None
    for gpus, hosts in HOSTS:
        tokens = case.tokens * (gpus * hosts if case.each else 1)
        step = ("train.seq_len=1024", f"train.tokens_per_step={tokens}")
        config = bench_config(case.model, step)
        described = {"gpu": GPU, "ram": f"{gpus * GIB_EACH}GiB", "cores": gpus * CORES_EACH}
        network = float(GBITS) if hosts > 1 else None
        machine = another_machine(config, gpus=gpus, hosts=hosts, network=network, **described)
        if parts is None:  # the model's shape is that of every row
            parts = prepare(config, shape_model(config), machine)
        resolved = replace(parts.resolved, machine=machine)
        try:
            plan = make_run_plan(replace(parts, config=config, resolved=resolved))
            plan.check()
        except PlanError:  # does not fit, or has fewer rows than GPUs
            yield "-"
        else:
            yield f"{plan.timing.tflops:.0f}"


if __name__ == "__main__":
    main()

"""Models and contexts that need every tier: what the plan said of each, byte by byte, and what was
measured.
python -m benchmarks.capacity --only 101b-16k
Each run leaves a JSON in benchmarks/results/<date>-<machine>. A case that this machine cannot hold
fails with the plan's own words.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import CAPACITY_CASES, SAME_BATCH
from benchmarks.compare import arguments, measure
from benchmarks.records import Record, latest
from benchmarks.systems import OURS
from megatrain.machine.datasheets import peak_tflops
from megatrain.machine.hardware import GIB

HEADINGS = (
    *("case", "parameters", "tokens/step", "context", "TFLOP/s", "with attention", "tokens/s"),
    *("s/step", "planned", "GPU GiB", "planned", "host GiB", "planned", "disk GiB"),
    *("bound by", "loss", "measured on"),
)


def main() -> None:
    parser = arguments(__doc__, [OURS])
    parser.add_argument(
        "--only", nargs="+", choices=CAPACITY_CASES, default=list(CAPACITY_CASES), help="cases"
    )
    args = parser.parse_args()
    records = measure([CAPACITY_CASES[name] for name in args.only], args)
    print("\n" + "\n".join(table(records)))


def table(records: Sequence[Record]) -> list[str]:
    """Markdown rows: every case that was tried."""
    rows = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    tried = ((name, latest(records, name, OURS)) for name in CAPACITY_CASES)
    return rows + [f"| {' | '.join(cells(name, record))} |" for name, record in tried if record]


def cells(name: str, record: Record) -> list[str]:
    """One case's figures, or why there are none."""
    where = f"{record.date}, {record.machine}"
    if record.error:
        return [
            name,
            f"failed: {record.error.replace('|', '/')}",
            *[""] * (len(HEADINGS) - 3),
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


if __name__ == "__main__":
    main()

"""The cases that have a target, through `megatrain bench`: what was wanted, and what was measured.
python -m benchmarks.targets --only 7.6b-65k 1.8b-16k
Each run leaves a JSON in benchmarks/results/<date>-<machine>. A case that this machine cannot hold
fails with the plan's own words.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import CASES, TARGETS, Target
from benchmarks.compare import arguments, measure
from benchmarks.records import Record, latest
from benchmarks.systems import OURS

NOT_YET = "not measured yet"


def main() -> None:
    parser = arguments(__doc__, [OURS])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        default=needed(),
        help="cases; default: all that the targets need",
    )
    args = parser.parse_args()
    records = measure([CASES[name] for name in args.only], args)
    print(
        "\n" + "\n".join(table([target for target in TARGETS if target.case in args.only], records))
    )


def needed() -> list[str]:
    """Every case that a target is about or compares with, each once."""
    return list(
        dict.fromkeys(name for target in TARGETS for name in (target.against, target.case) if name)
    )


def table(targets: Sequence[Target], records: Sequence[Record]) -> list[str]:
    """Markdown rows: each target, what was measured, and what the plan had said of that step's
    time."""
    rows = [
        "| case | wanted | measured | s/step | predicted | measured on |",
        "|---|---|---|---|---|---|",
    ]
    return rows + [
        f"| {target.words} | {wanted(target)} | {measured(target, records)} |" for target in targets
    ]


def wanted(target: Target) -> str:
    return _in_words(target, target.wanted)


def measured(target: Target, records: Sequence[Record]) -> str:
    """Four cells."""
    record = latest(records, target.case, OURS)
    if record is None:
        return f"{NOT_YET} | | | "
    if record.error:
        return f"failed: {record.error.replace('|', '/')} | | | {record.date}, {record.machine}"
    value = reached(target, record, records)
    predicted = record.result.get("predicted", {}).get("step_s")
    seconds = f"{record.result['step_s']:.2f}", "-" if predicted is None else f"{predicted:.2f}"
    words = NOT_YET if value is None else _in_words(target, value)
    return f"{words} | {' | '.join(seconds)} | {record.date}, {record.machine}"


def reached(target: Target, record: Record, records: Sequence[Record]) -> float | None:
    """The figure that the target is about; None where what it is compared with was not measured."""
    if target.share:
        share = record.result.get(target.share)
        return None if share is None else float(share)
    if target.against is None:
        return record.tflops
    other = latest(records, target.against, OURS)
    return (
        float(record.result[target.figure] / other.result[target.figure])
        if other and not other.error
        else None
    )


def _in_words(target: Target, value: float) -> str:
    if target.share:
        return f"{value:.1%}"
    return f"{value:.2f} x" if target.against else f"{value:.0f} TFLOP/s"


if __name__ == "__main__":
    main()

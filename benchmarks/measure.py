"""Steps of ours and of its peers, one process after another on this machine.

    python -m benchmarks.measure --cases 1.8b-16k 7.6b-65k --systems ours resident zero3
    python -m benchmarks.measure --cases 101b-16k
    python -m benchmarks.measure --cases 7.6b-65k --before FOLDER

Each run leaves a JSON in benchmarks/results/<date>-<machine>, also when it failed; a case that this
machine cannot hold fails with the plan's own words. DeepSpeed needs `pip install deepspeed ninja`
and a C++ compiler besides. FOLDER holds the package of another checkout (`git archive COMMIT
megatrain | tar x -C FOLDER`): it runs first and last, and this one twice in between, so that a
drift of the machine shows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import CAPACITY_CASES, CASES, OURS, PEERS, TITLES, Case, Run, our_run, runs_of
from benchmarks.records import ROOT, Record, execute, latest, new_folder
from megatrain.machine.hardware import GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {**CASES, **CAPACITY_CASES}
    parser.add_argument("--cases", nargs="+", choices=known, default=["1.8b-16k", "7.6b-65k"])
    parser.add_argument("--systems", nargs="+", choices=(OURS, *PEERS), default=[OURS, *PEERS])
    parser.add_argument(
        "--micro-batch-tokens",
        nargs="+",
        type=int,
        default=[16384, 65536],
        help="what each peer is tried with",
    )
    parser.add_argument("--steps", type=int, default=4, help="measured")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds of one process")
    parser.add_argument("--before", type=Path, help="folder of another checkout's package")
    parser.add_argument("--output", type=Path, default=None, help="folder of the JSON files")
    args = parser.parse_args()
    cases = [known[name] for name in args.cases]
    if args.before is not None:
        for case in cases:
            run_all(before_after(case, args.before, args.steps, args.warmup), args)
        return
    records = measure(cases, args)
    for name in args.cases:
        print(f"\n{name}\n" + "\n".join(table(records, name, args.systems)))


def measure(cases: Sequence[Case], args: argparse.Namespace) -> list[Record]:
    """Every system on every case, one process at a time."""
    tried = ((case, system) for case in cases for system in args.systems)
    sizes = args.micro_batch_tokens, args.steps, args.warmup
    return run_all([run for one in tried for run in runs_of(*one, *sizes)], args)


def run_all(runs: Iterable[Run], args: argparse.Namespace) -> list[Record]:
    folder, records = args.output or new_folder(), []
    for run in runs:
        record = execute(run, args.limit, folder)
        records.append(record)
        rate = f"{record.tflops:.4g} TFLOP/s, {record.result.get('step_s', 0):.4g} s"
        ended = record.error or rate
        print(f"{run.name}: {ended} ({record.wall_s:.0f} s in all)", flush=True)
    return records


def before_after(case: Case, before: Path, steps: int, warmup: int) -> list[Run]:
    """`megatrain bench` of the other checkout, of this one twice, and of the other again."""
    ours = our_run(case, steps, warmup)
    other = (("PYTHONSAFEPATH", "1"), ("PYTHONPATH", f"{before.absolute()}{os.pathsep}{ROOT}"))
    order = (("before", other), ("now", ()), ("now-again", ()), ("before-again", other))
    return [replace(ours, variant=variant, environ=environ) for variant, environ in order]


def table(records: Sequence[Record], case: str, systems: Sequence[str]) -> list[str]:
    """Markdown rows: the fastest variant of each system on a case."""
    rows = [
        "| system | s/step | TFLOP/s | tokens/s | GPU GiB | host GiB |",
        "|---|---|---|---|---|---|",
    ]
    for system in systems:
        record = latest(records, case, system)
        if record is not None:
            rows.append(f"| {TITLES[system]} | {_cells(record)} |")
    return rows


def _cells(record: Record) -> str:
    if record.error:
        return f"failed: {record.error.replace('|', '/')} | | | |"
    result = record.result
    memory = (result["gpu_peak_bytes"], result["host_bytes"])
    gpu, host = ("-" if count is None else f"{count / GIB:.1f}" for count in memory)
    rates = f"{record.tflops:.3g} | {result['tokens_per_s']:,.0f}"
    return f"{result['step_s']:.2f} | {rates} | {gpu} | {host}"


if __name__ == "__main__":
    main()

"""What lies in a GPU's memory at the worst moment of a step, by the line of code that asked for it,
beside what the plan says.
python -m benchmarks.peak qwen2.5-7b --layers 3 train.tokens_per_step=16384 memory.resident=0
train.retained=0
Of a compiled model the lines are those of the code that inductor wrote: what decides a layer's
working set (decision 0030).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.losses import next_token
from megatrain.recipes.bench import prepare_shape, random_batches
from megatrain.recipes.setup import make_engine, make_run_plan, quiet_libraries
from megatrain.recipes.shapes import bench_config

MIB = 2**20
OURS = ("megatrain", "torchinductor", "inductor")  # folders of the files whose lines are shown
SHOWN_FRAMES = 3
MOST_EVENTS = 500_000


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit(
            "error: this machine has no CUDA device, whose allocator keeps the record that this "
            "script reads"
        )
    report = measure(args.model, args.layers, args.overrides, args.steps)
    print("\n".join(table(report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a shape of `megatrain bench`, or a model folder")
    parser.add_argument(
        "--layers", type=int, default=None, help="another depth than the model's own; few suffice"
    )
    parser.add_argument("--steps", type=int, default=3, help="of which the last is watched")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", help="keys of the config")
    return parser.parse_intermixed_args(given)


def measure(model: str, layers: int | None, overrides: list[str], steps: int) -> dict[str, Any]:
    """Peaks of every step, what the plan says, and what was alive at the peak of the last step
    beyond what was there before it."""
    quiet_libraries()
    config = bench_config(model, overrides)
    parts = prepare_shape(config, layers)
    plan = make_run_plan(parts, checkpoints_written=0)
    plan.check()
    peaks = []
    with make_engine(parts, plan) as engine:
        batches = random_batches(config, plan, engine, 0)
        for number in range(steps):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if number == steps - 1:
                torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
            engine.train_step(batches, next_token, config.train.learning_rate)
            torch.cuda.synchronize()
            peaks.append({"before": before, "peak": torch.cuda.max_memory_allocated()})
        (events, *_) = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
    alive = alive_at_the_peak(events)
    return {
        "model": model,
        "overrides": overrides,
        "planned": {
            "allocated": plan.allocated_bytes,
            "working_sets": plan.working_sets,
            "device": plan.device,
        },
        "steps": peaks,
        "alive": [
            {"where": where, "bytes": size, "count": count}
            for where, (size, count) in alive.items()
        ],
    }


def alive_at_the_peak(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """(bytes, how many) by where they were asked for, the largest first: what was given out and not
    yet back at the worst moment."""
    live: dict[int, Mapping[str, Any]] = {}
    now, most, at_most = 0, 0, {}
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])["size"]
        if now > most:
            most, at_most = now, dict(live)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in at_most.values():
        where = place(event["frames"])
        sizes[where] += event["size"]
        counts[where] += 1
    return {where: (size, counts[where]) for where, size in sizes.most_common()}


def place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost lines of our files and of compiled ones; of others, if there are none."""
    lines = [
        (frame["filename"], f"{Path(frame['filename']).name}:{frame['line']}") for frame in frames
    ]
    ours = [line for name, line in lines if any(folder in name for folder in OURS)]
    return " < ".join((ours or [line for _, line in lines])[:SHOWN_FRAMES])


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines for people."""
    planned, last = report["planned"], report["steps"][-1]
    sets = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in planned["working_sets"].items())
    return [
        f"allocated at the peak: {last['peak'] / MIB:,.0f} MiB, "
        f"planned {planned['allocated'] / MIB:,.0f} (working sets: {sets})",
        f"there before the step: {last['before'] / MIB:,.0f} MiB; then, at the peak:",
        *(
            f"{row['bytes'] / MIB:10,.1f} MiB in {row['count']:4}  {row['where']}"
            for row in report["alive"]
            if row["bytes"] >= MIB
        ),
    ]


if __name__ == "__main__":
    main()

"""Training with arrays on NVMe: what the drive moves, alone and beside a step, against what it can;
and what the computation waits for.
python -m benchmarks.nvme --model qwen2.5-7b --folder /scratch --json out.json memory.nvme_blocks=28
Random weights and tokens through the engine of `megatrain train`. The drive is measured first, with
the same pieces and threads as `doctor` uses. Bytes are the plan's: what an update reads and writes,
and what sweeps read.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

from megatrain.engine.engine import Engine
from megatrain.losses import next_token
from megatrain.measure.disk import disk_rates
from megatrain.planner.memory import Layout
from megatrain.recipes.bench import Batches, prepare_shape, random_batches
from megatrain.recipes.setup import make_engine, make_run_plan, quiet_libraries
from megatrain.recipes.shapes import bench_config
from megatrain.reporting.meters import peak_host_bytes
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.words import time_in_words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen2.5-0.5b", help="a shape of `megatrain bench`, or a model folder"
    )
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "overrides",
        nargs="*",
        help="keys of the config, such as memory.nvme_blocks=8 memory.nvme_arrays=state",
    )
    args = parser.parse_args()
    report = measure(args.model, args.layers, args.folder, args.steps, args.overrides)
    print("\n".join(table(report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(
    model: str, layers: int | None, folder: Path, steps: int, overrides: list[str]
) -> dict[str, Any]:
    """Rates of the drive alone, of an update that nothing runs beside, and of whole steps; stalls
    of those."""
    quiet_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    write, read = disk_rates(folder)
    config = bench_config(model, [f"memory.nvme={folder}", *overrides])
    parts = prepare_shape(config, layers)
    plan = make_run_plan(parts, checkpoints_written=0)
    plan.check()
    bytes_read, bytes_written = Layout.of(
        plan.choices, plan.job, parts.resolved.shape, parts.machine.hardware
    ).nvme_traffic
    with make_engine(parts, plan) as engine:
        batches = random_batches(config, plan, engine, seed=0)
        engine.train_step(
            batches, next_token, config.train.learning_rate
        )  # compiles, and touches memory and files first
        wait_for_updates(engine)
        update_s = update_alone(engine, batches) if config.train.max_grad_norm else None
        measured = [step(engine, batches, config.train.learning_rate) for _ in range(steps)]
        wait_for_updates(engine)
    return {
        "date": date.today().isoformat(),
        "model": model,
        "parameters": parts.resolved.shape.parameters,
        "choices": {
            name: getattr(plan.choices, name) for name in ("nvme_blocks", "nvme_arrays", "resident")
        },
        "disk": {"write_bytes_per_s": write, "read_bytes_per_s": read},
        "bytes_read": bytes_read,
        "bytes_written": bytes_written,
        "drive_s": bytes_read / read
        + bytes_written / write,  # one after the other, at the measured rates
        "update_alone_s": update_s,
        "predicted_step_s": plan.timing.seconds,
        "steps": measured,
        "host_bytes": {"peak": peak_host_bytes(), "planned": plan.host_bytes},
    }


def wait_for_updates(engine: Engine) -> None:
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)


def update_alone(engine: Engine, batches: Batches) -> float:
    """Seconds of an update while nothing is computed."""
    engine.forward_backward(batches, next_token)
    started = time.perf_counter()
    engine.step()
    wait_for_updates(engine)
    return time.perf_counter() - started


def step(engine: Engine, batches: Batches, lr: float) -> dict[str, Any]:
    started = time.perf_counter()
    result = engine.train_step(batches, next_token, lr)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "loss": result.loss,
        "time": vars(StepTime.of(seconds, result.stalls_s)),
    }


def table(report: dict[str, Any]) -> list[str]:
    """What was found, for people."""
    disk, moved = report["disk"], report["bytes_read"] + report["bytes_written"]
    alone = report["update_alone_s"]
    rates = [disk[f"{way}_bytes_per_s"] / 1e9 for way in ("write", "read")]
    read, written = report["bytes_read"] / 1e9, report["bytes_written"] / 1e9
    rows = [
        f"{report['model']}, {report['parameters']:,} parameters, {report['choices']}",
        f"the drive writes {rates[0]:.2f} GB/s and reads {rates[1]:.2f}; a step reads "
        f"{read:.2f} GB and writes {written:.2f}: {report['drive_s']:.2f} s at these rates",
    ]
    if alone is not None:
        share = f"{report['drive_s'] / alone:.0%} of the drive's limit"
        rows.append(f"an update alone: {alone:.2f} s, {moved / alone / 1e9:.2f} GB/s, {share}")
    rows.append(f"a step: predicted {report['predicted_step_s']:.2f} s")
    for number, one in enumerate(report["steps"]):
        busy, parts = moved / one["seconds"] / 1e9, time_in_words(StepTime(**one["time"]))
        rows.append(f"step {number + 1}: {one['seconds']:.2f} s, {busy:.2f} GB/s, {parts}")
    return rows


if __name__ == "__main__":
    main()

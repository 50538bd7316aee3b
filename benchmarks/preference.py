"""A step of pairs beside a step of the same rows without preferences, and the reference's pass.

    python -m benchmarks.preference --model qwen2.5-7b --tokens-per-step 65536 --seq-len 1024

One engine, planned for the method, random weights and tokens. Answers are the second half of each
sequence; `sft` trains the same tokens of the same rows. Under `dpo` rows are pairs. Under `kto`
they are judged by turns, and half of the micro-batches are mismatches, which have no gradient.
Every figure is a median, beside what was planned. Writes JSON to --output, and a table last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from megatrain.engine.engine import Engine
from megatrain.engine.objective import AnyLoss
from megatrain.losses import IGNORE, Dpo, Kto, next_token
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.bench import memory_of, prepare_shape
from megatrain.recipes.describe import choices_in_words, environment_of
from megatrain.recipes.shapes import bench_config
from megatrain.reporting.meters import GpuMeter

Batches = list[dict[str, torch.Tensor]]
METHODS: dict[str, AnyLoss] = {"dpo": Dpo(), "kto": Kto()}


def step_of(engine: Engine, plan: Plan, seq_len: int, seed: int) -> Batches:
    """One step of full rows, of whose tokens the second half are answers."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = plan.job.tokens_per_step // seq_len, engine.anatomy.vocab_size
    ids = torch.randint(0, vocabulary, (rows, seq_len), generator=generator)
    labels = ids.clone()
    labels[:, : seq_len // 2] = IGNORE
    size = plan.choices.micro_batch_tokens // seq_len // 2 * 2
    given = {
        "input_ids": ids,
        "labels": labels,
        "row_reference": torch.full((rows,), -12.0 * seq_len / 2),
        "row_value": torch.arange(rows, dtype=torch.float32) % 2,
        "row_mismatched": torch.arange(rows) >= max(size, rows // 2),
    }
    parts = zip(*(value.split(size) for value in given.values()), strict=True)
    return [dict(zip(given, part, strict=True)) for part in parts]


def seconds_of(run: Callable[[int], object], warmup: int, steps: int) -> list[float]:
    """Seconds of each call after the first ones. Each ends when its results are on the host."""
    found = []
    for number in range(warmup + steps):
        started = time.perf_counter()
        run(number)
        found.append(time.perf_counter() - started)
        print(f"  {found[-1]:.3f} s", flush=True)
    return found[warmup:]


def measured(args: argparse.Namespace) -> dict[str, Any]:
    plans = {}
    with ExitStack() as stack:
        train = {"tokens_per_step": args.tokens_per_step, "seq_len": args.seq_len}
        config = bench_config(args.model, {"train": train, "device": args.device, "gpus": 1})
        parts = prepare_shape(config, args.layers)
        losses: dict[str, AnyLoss] = {"sft": next_token, args.method: METHODS[args.method]}
        for method, loss in losses.items():
            share = 0.5 if method == "kto" else 1.0
            resolved = replace(parts.resolved, loss=loss)
            parts = replace(parts, resolved=resolved, trained_share=share)
            plans[method] = setup.make_run_plan(parts, checkpoints_written=0)
            plans[method].check()
            print(method, choices_in_words(plans[method]), flush=True)
        plan = plans[args.method]
        engine = stack.enter_context(setup.make_engine(parts, plan))
        meter = stack.enter_context(GpuMeter(engine.device))
        drawn = [step_of(engine, plan, args.seq_len, seed) for seed in range(3)]
        plain = [[{n: b[n] for n in ("input_ids", "labels")} for b in step] for step in drawn]
        found: dict[str, list[float]] = {}
        for name, batches in {"sft": plain, args.method: drawn, "sft again": plain}.items():
            print(name, flush=True)
            loss, steps = losses[name.split()[0]], batches

            def step(number: int, loss: Any = loss, steps: Any = steps) -> object:
                return engine.train_step(steps[number % 3], loss, 1e-6)

            found[name] = seconds_of(step, args.warmup, args.steps)
        for name, run in {
            "forward with loss": lambda n: engine.evaluate(plain[n % 3]),
            "reference": lambda n: engine.logprobs(plain[n % 3]),
        }.items():
            print(name, flush=True)
            found[name] = seconds_of(run, 1, 2)
        memory = memory_of(engine, meter)
    planned = {name: one.timing.seconds for name, one in plans.items()}
    planned |= {"forward": plan.timing.phases["forward"], "gpu_bytes": plan.gpu_bytes}
    return {
        "date": date.today().isoformat(),
        "method": args.method,
        "model": args.model,
        "layers": args.layers,
        "tokens_per_step": args.tokens_per_step,
        "seq_len": args.seq_len,
        "environment": environment_of(parts.machine),
        "choices": vars(plan.choices),
        "seconds": found,
        "median_s": {name: statistics.median(values) for name, values in found.items()},
        "planned_s": planned,
        "planned_host_bytes": plan.host_bytes,
        "measured_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b", help="a named shape, folder or hub id")
    parser.add_argument("--method", choices=METHODS, default="dpo")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("preference.json"))
    args = parser.parse_args()
    result = measured(args)
    args.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    median, planned = result["median_s"], result["planned_s"]
    print(f"{'':20} {'measured s':>10} {'planned s':>10}")
    for name, seconds in median.items():
        print(f"{name:20} {seconds:10.3f} {planned.get(name.split()[0], float('nan')):10.3f}")
    print(f"{args.method} over sft of the same rows: {median[args.method] / median['sft']:.4f}")


if __name__ == "__main__":
    main()

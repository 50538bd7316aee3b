"""Fine-tuning rows of many lengths: padded or packed into sequences, eager or compiled.

    python -m benchmarks.rows --model qwen2.5-7b --tokens 65536 --seq-len 2048 --json out.json
    python -m benchmarks.rows --model tiny --tokens 2048 --seq-len 256 --variants packed device=cpu

Random weights, and rows of random tokens whose lengths are spread like those of instructions with
their answers (log-normal, median 150). Every variant takes the same rows through the loader, the
plan and the engine of `megatrain train`. Rates count real tokens, not padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.data.dataset import Counts, IdArray, IndexArray, MaskArray, PlainRows
from megatrain.data.loader import Loader
from megatrain.losses import next_token
from megatrain.machine.hardware import GIB
from megatrain.recipes.bench import prepare_shape
from megatrain.recipes.describe import choices_in_words
from megatrain.recipes.run import knowing_rows
from megatrain.recipes.setup import make_engine, make_run_plan
from megatrain.recipes.shapes import bench_config
from megatrain.reporting.meters import GpuMeter, peak_host_bytes

VARIANTS = {
    "padded": ("data.packing=false", "compile=false"),
    "padded-compiled": ("data.packing=false", "compile=true"),
    "packed": ("data.packing=true", "compile=false"),
    "packed-compiled": ("data.packing=true", "compile=true"),
}
SHORTEST, MEDIAN, SPREAD = 16, 150, 0.8  # tokens; standard deviation of the logarithm


@dataclass(frozen=True)
class RandomRows(PlainRows):
    """Rows of random tokens, the second half of each its targets; the same tokens whenever a row is
    read."""

    lengths: IndexArray
    vocabulary: int
    counts: Counts = field(default_factory=Counts)
    digest: str = "random"

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def target_counts(self) -> IndexArray:
        return self.lengths - self.lengths // 2

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        length = int(self.lengths[index])
        ids = np.random.default_rng(index).integers(0, self.vocabulary, length, dtype=np.int32)
        return ids, np.arange(length) >= length // 2


def rows_of(tokens: int, seq_len: int, vocabulary: int) -> RandomRows:
    """Rows of at least `tokens` tokens together."""
    generator, lengths = np.random.default_rng(0), np.zeros(0, np.int64)
    while lengths.sum() < tokens:
        drawn = generator.lognormal(np.log(MEDIAN), SPREAD, 256)
        lengths = np.concatenate([lengths, np.clip(drawn, SHORTEST, seq_len).astype(np.int64)])
    return RandomRows(lengths, vocabulary)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Steps of one variant."""
    count = args.warmup + args.steps
    sizes = {"tokens_per_step": args.tokens, "seq_len": args.seq_len, "max_steps": count}
    keys = [f"train.{key}={value}" for key, value in sizes.items()]
    config = bench_config(args.model, ["method=sft", *keys, *VARIANTS[name], *args.overrides])
    parts = prepare_shape(config, args.layers)
    vocabulary = parts.resolved.skeleton.anatomy.vocab_size
    rows = rows_of(args.tokens * (count + 1), args.seq_len, vocabulary)
    packed = parts.resolved.packed_to
    loader_of = partial(
        Loader, rows, pad_id=0, pack_to=packed, seed=0, tokens_per_step=args.tokens, epochs=1
    )
    known = knowing_rows(parts, loader_of(micro_batch_tokens=args.seq_len))
    plan = make_run_plan(known, checkpoints_written=0)
    plan.check()
    loader = loader_of(micro_batch_tokens=plan.choices.micro_batch_tokens)
    steps, computed = [], []
    with make_engine(parts, plan) as engine, GpuMeter(engine.device) as meter:
        for number, batch in enumerate(islice(loader, count)):
            started = time.perf_counter()
            result = engine.train_step(batch.micro_batches, next_token, config.train.learning_rate)
            seconds = time.perf_counter() - started
            steps.append({"seconds": seconds, "tokens": batch.tokens, "loss": result.loss})
            tokens = sum(micro["input_ids"].numel() for micro in batch.micro_batches)
            computed.append(tokens / batch.tokens)
            parts_of_it = f"{len(batch.micro_batches)} micro-batches"
            print(f"{name} step {number}: {seconds:.3f} s, {parts_of_it}", flush=True)
        memory = {"gpu_peak_bytes": meter.peak_bytes(), "host_bytes": peak_host_bytes()}
    rate = statistics.median(step["tokens"] / step["seconds"] for step in steps[args.warmup :])
    return {
        "tokens_per_s": rate,
        "tflops": 6 * plan.active_parameters * rate / 1e12,
        "computed_per_token": statistics.fmean(computed),
        "choices": choices_in_words(plan),
        "plan": plan.to_dict(),
        "steps": steps,
        **memory,
    }


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    shape = "a shape of `megatrain bench`, or a model folder"
    parser.add_argument("--model", default="qwen2.5-7b", help=shape)
    parser.add_argument("--layers", type=int, help="another depth than the model's own")
    parser.add_argument("--tokens", type=int, default=65536, help="real ones, per step")
    longest = "longest row, and packed sequence"
    parser.add_argument("--seq-len", type=int, default=2048, help=longest)
    parser.add_argument("--steps", type=int, default=6, help="measured")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


def row(name: str, result: dict[str, Any]) -> str:
    gpu, rate = (
        result["gpu_peak_bytes"],
        f"{result['tokens_per_s']:>10,.0f}{result['tflops']:>9.3g}",
    )
    memory = f"{'-' if gpu is None else f'{gpu / GIB:.1f}':>9}{result['host_bytes'] / GIB:>9.1f}"
    return f"{name:18}{rate}{result['computed_per_token']:>10.2f}{memory}"


def main() -> None:
    args = parse()
    results = {}
    for name in args.variants:
        results[name] = measure(args, name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(f"\n{'':18}{'tokens/s':>10}{'TFLOP/s':>9}{'computed':>10}{'GPU GiB':>9}{'host GiB':>9}")
    for name, result in results.items():
        print(row(name, result))
    if args.json:
        arguments = {key: value for key, value in vars(args).items() if key != "json"}
        today = date.today().isoformat()
        found = {"date": today, "arguments": arguments, "results": results}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

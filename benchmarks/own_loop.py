"""A loop of one's own around `Engine.from_config(..., settings="auto")`, beside `megatrain bench`.

python -m benchmarks.own_loop --model qwen2.5-7b --tokens-per-step 65536 --seq-len 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import AutoConfig

import megatrain as mt
from megatrain.models.shapes import SHAPES


def step_seconds(model: str, tokens_per_step: int, seq_len: int, steps: int) -> list[float]:
    """Seconds of each step on random tokens."""
    config = AutoConfig.for_model(**SHAPES[model]) if model in SHAPES else model
    seconds = []
    with mt.Engine.from_config(config, tokens_per_step=tokens_per_step, seq_len=seq_len) as engine:
        assert engine.plan is not None
        rows = engine.plan.choices.micro_batch_tokens // seq_len
        for _ in range(steps):
            ids = torch.randint(0, engine.anatomy.vocab_size, (tokens_per_step // seq_len, seq_len))
            batches = [{"input_ids": part, "labels": part} for part in ids.split(rows)]
            started = time.perf_counter()
            engine.train_step(batches, lr=1e-5)
            seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b", help="a named shape, folder or hub id")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    count = args.warmup + args.steps
    seconds = step_seconds(args.model, args.tokens_per_step, args.seq_len, count)
    median = statistics.median(seconds[args.warmup :])
    print(json.dumps({"step_s": median, "steps_s": seconds}))


if __name__ == "__main__":
    main()

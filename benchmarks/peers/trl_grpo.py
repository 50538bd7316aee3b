"""Steps of TRL's GRPOTrainer, whose answers transformers' `generate` writes, on one GPU.
python -m benchmarks.peers.trl_grpo WORK --answers 256 --length 512 --dtype float32
WORK is what benchmarks.grpo_step prepares. Moments have the weights' dtype; matmuls run in bf16.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROWS, GROUP = 8, 8  # answers of a micro-batch and of a prompt


class Times(TrainerCallback):
    """Ends of steps."""

    def __init__(self) -> None:
        self.at = [0.0]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.at[0] = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.at.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    settings = GRPOConfig(
        output_dir=str(args.work / "trl"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=args.answers // ROWS,
        num_generations=GROUP,
        max_completion_length=args.length,
        max_steps=args.steps,
        logging_steps=1,
        bf16=True,
        report_to=[],
        save_strategy="no",
        model_init_kwargs={"dtype": args.dtype},
    )
    rows = (args.work / "prompts.jsonl").read_text().splitlines()
    times = Times()
    trainer = GRPOTrainer(
        model=str(args.work / "model"),
        args=settings,
        reward_funcs=runpy.run_path(str(args.work / "rewards.py"))["odd"],
        train_dataset=Dataset.from_list([json.loads(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(args.work / "model", padding_side="left"),
        callbacks=[times],
    )
    trainer.train()
    seconds = [round(b - a, 2) for a, b in zip(times.at, times.at[1:], strict=False)]
    logged = [one for one in trainer.state.log_history if "reward" in one]
    found = {"system": "trl", "dtype": args.dtype, "step_s": seconds}
    found |= {"lengths": [one["completions/mean_length"] for one in logged]}
    found |= {"peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Times steps of `method: distill`, teacher and student of random weights, beside their plan.

    python -m benchmarks.distill_step qwen2.5-7b qwen2.5-32b --tokens 65536 --seq-len 4096 --steps 3
    python -m benchmarks.distill_step qwen2.5-7b qwen2.5-32b --seq-len 1280 --answer 1024

Shapes are named ones (megatrain/models/shapes.py) of one vocabulary. Prints a JSON line: seconds of
the teacher's sweep and of the student's step, peaks of memory, and the same as planned. With
--answer the student writes that many tokens at the end of each row, without an end.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import typer
from transformers import AutoConfig

from megatrain.config.load import bench_config
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import AnswerRequest
from megatrain.engine.rollout.draw import Draw
from megatrain.models.shapes import named_shape
from megatrain.recipes import frozen
from megatrain.recipes.bench import memory_of, resolve_shape
from megatrain.recipes.setup import memory_errors, plan_run, quiet_libraries
from megatrain.reporting.meters import GpuMeter


def main(
    student: str,
    teacher: str,
    tokens: int = 65_536,
    seq_len: int = 4096,
    steps: int = 3,
    answer: int = 0,
) -> None:
    """Time the steps."""
    quiet_libraries()
    keys = {"method": "distill", "distill.teacher_model_name_or_path": teacher}
    keys |= {"train.tokens_per_step": str(tokens), "train.seq_len": str(seq_len)}
    if answer:
        keys |= {"distill.lmbda": "1", "distill.max_completion_length": str(answer)}
    config = bench_config(student, [f"{key}={value}" for key, value in keys.items()])
    resolved = resolve_shape(config, None)
    plan = plan_run(config, resolved, checkpoints_written=0)
    plan.check()
    loss: Any = resolved.request.loss
    found: list[dict[str, float]] = []
    with ExitStack() as stack:
        stack.enter_context(memory_errors(plan))
        engine = stack.enter_context(Engine.open_plan(plan))
        described: Any = AutoConfig.for_model(**(named_shape(teacher) or {}))
        how = frozen.READS | frozen.computing_as(engine)
        loss.teacher = stack.enter_context(Engine.from_config(described, seed=1, **how))
        meter = stack.enter_context(GpuMeter(engine.device))
        generator = torch.Generator().manual_seed(0)
        rows = max(1, plan.choices.micro_batch_tokens // seq_len)
        for step in range(steps + 1):
            shape = tokens // seq_len, seq_len
            ids = torch.randint(0, engine.anatomy.vocab_size, shape, generator=generator)
            batches = [{"input_ids": part, "labels": part} for part in torch.split(ids, rows)]
            began = time.perf_counter()
            if answer:
                write(engine, ids, answer, step)
            written = time.perf_counter()
            with frozen.taught(loss, batches) as given:
                taught_s = time.perf_counter() - written
                result = engine.train_step(given, loss, 1e-6)
            seconds = time.perf_counter() - began
            taken = {"rollout_s": written - began, "teacher_s": taught_s, "step_s": seconds}
            found.append({**taken, "loss": result.loss})
            print(f"step {step}: {found[-1]}", file=sys.stderr, flush=True)
        memory = memory_of(engine, meter)
    steady = {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    planned = {"step_s": plan.timing.seconds, "phases": plan.timing.phases}
    planned |= {"gpu_bytes": plan.gpu_bytes, "host_bytes": plan.host_bytes}
    about = {"student": student, "teacher": teacher, "tokens": tokens, "seq_len": seq_len}
    about |= {"measured": {**steady, **memory}, "planned": planned, "device": device}
    print(json.dumps({**about, "choices": str(plan.choices)}))


def write(engine: Engine, ids: torch.Tensor, answer: int, seed: int) -> None:
    """Let the engine write the last `answer` tokens of each row of `ids` [rows, tokens]."""
    prompts = enumerate(ids[:, :-answer].tolist())
    asked = [AnswerRequest(number, prompt, (0,), answer) for number, prompt in prompts]
    for one in engine.rollout(asked, Draw(seed=seed), ()):
        ids[one.key, -answer:] = torch.tensor(one.ids)


if __name__ == "__main__":
    typer.run(main)

"""Which model fits which machine, by the plan: writes the tables of docs/what-fits.md.

    python -m benchmarks.what_fits

Steps of 65,536 tokens in sequences of 2,048, AdamW, exact clipping. Tokens per second are predicted
from public figures of the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from benchmarks.write_page import filled
from megatrain.config.load import bench_config
from megatrain.errors import PlanError
from megatrain.recipes.model import shape_model
from megatrain.recipes.planned_machine import planned_machine
from megatrain.recipes.setup import plan_run, quiet_libraries, request_of, resolve_run

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
MODELS: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3-8b")
MODELS += ("qwen2.5-14b", "qwen2.5-32b", "llama-3-70b")
RAM = ("32GiB", "64GiB", "128GiB", "256GiB", "512GiB", "1024GiB")
GPUS = ("RTX 3060", "RTX 4060 Ti 16GB", "RTX 4090", "H100", "H200")
MOMENTS = {"float32": "", "bfloat16": " *with bf16*", "int8": " *with int8*"}
STEP = ("train.seq_len=2048", "train.tokens_per_step=65536")


def main() -> None:
    # each row by a process of its own, whose RAM is part of the plan, as in `megatrain plan`
    cases = [*product(MODELS, GPUS)]
    with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        found = dict(zip(cases, pool.starmap(row, cases, chunksize=1), strict=True))
    lines = [line for gpu in GPUS for line in (f"### {gpu}", "", *table(gpu, found), "")]
    PAGE.write_text(filled(PAGE.read_text(), {"tables": lines[:-1]}))


def table(gpu: str, found: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """Markdown rows. found: cells by model and GPU."""
    yield f"| | {' | '.join(f'{size} of RAM' for size in RAM)} |"
    yield "|---" * (len(RAM) + 1) + "|"
    for model in MODELS:
        yield f"| {model} | {' | '.join(found[model, gpu])} |"


def row(model: str, gpu: str) -> Sequence[str]:
    """Cells for one model and GPU, one for each size of RAM."""
    quiet_libraries()
    first = bench_config(model, STEP)
    described = shape_model(first)
    known = resolve_run(first, described, planned_machine(first, gpu=gpu, ram=RAM[0]))
    cells = []
    for ram in RAM:
        for moments, words in MOMENTS.items():
            config = bench_config(model, [*STEP, f"optimizer.moments={moments}"])
            machine = planned_machine(config, gpu=gpu, ram=ram)
            request = request_of(config, described)
            plan = plan_run(config, replace(known, machine=machine, request=request))
            try:
                plan.check()
            except PlanError:
                continue
            cells.append(f"{plan.timing.tokens_per_s:,.0f}{words}")
            break
        else:
            cells.append("-")
    return cells


if __name__ == "__main__":
    main()

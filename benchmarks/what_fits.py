"""Which model fits which machine, by the plan: writes the tables of docs/what-fits.md, and those of
docs/my-gpu.md, which have the largest model of each machine.

    python -m benchmarks.what_fits

Steps of 65,536 tokens in sequences of 2,048, AdamW, exact clipping. Seconds and tokens per second
are predicted from public figures of the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from benchmarks.write_page import filled
from megatrain.config.load import bench_config
from megatrain.planner.plan import Plan
from megatrain.recipes.doctor import planned_machine
from megatrain.recipes.model import shape_model
from megatrain.recipes.setup import plan_run, quiet_libraries, request_of, resolve_run

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
MODELS: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3-8b")
MODELS += ("qwen2.5-14b", "qwen2.5-32b", "llama-3-70b")
RAM = ("32GiB", "64GiB", "128GiB", "256GiB", "512GiB", "1024GiB")
GPUS = ("RTX 3060", "RTX 4060 Ti 16GB", "RTX 4090", "H100", "H200")
MOMENTS = {"float32": "", "bfloat16": " *with bf16*", "int8": " *with int8*"}
STEP = ("train.seq_len=2048", "train.tokens_per_step=65536")


# docs/my-gpu.md: cards by their memory; dense models from the largest on, and mixtures
MY_GPU = Path(__file__).parent.parent / "docs" / "my-gpu.md"
CARD_RAM = ("64GiB", "96GiB", "128GiB", "192GiB", "256GiB", "512GiB")
CARDS: dict[str, tuple[str, ...]] = {"GB10": ("88GiB",)}  # of its one memory; the row has the rest
CARDS |= dict.fromkeys(("RTX 4090", "RTX 5090", "L40S", "H100", "H200"), CARD_RAM)
DENSE = ("qwen2.5-72b", "qwen2.5-32b", "qwen2.5-14b", "llama-3-8b", "qwen2.5-7b", "qwen3-4b")
EXPERTS = ("gpt-oss-120b", "qwen3-30b-a3b", "gpt-oss-20b")
COLUMNS = {
    "dense, fp32 moments": (DENSE, "float32"),
    "dense, int8 moments": (DENSE, "int8"),
    "mixture, int8 moments": (EXPERTS, "int8"),
}


def main() -> None:
    # each row by a process of its own, whose RAM is part of the plan, as in `megatrain plan`
    cases = [*product(MODELS, GPUS)]
    with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        cards = dict(zip(CARDS, pool.map(largest, CARDS, chunksize=1), strict=True))
        found = dict(zip(cases, pool.starmap(row, cases, chunksize=1), strict=True))
    lines = [line for gpu in GPUS for line in (f"### {gpu}", "", *table(gpu, found), "")]
    PAGE.write_text(filled(PAGE.read_text(), {"tables": lines[:-1]}))
    MY_GPU.write_text(filled(MY_GPU.read_text(), cards))


def table(gpu: str, found: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """Markdown rows. found: cells by model and GPU."""
    yield f"| | {' | '.join(f'{size} of RAM' for size in RAM)} |"
    yield "|---" * (len(RAM) + 1) + "|"
    for model in MODELS:
        yield f"| {model} | {' | '.join(found[model, gpu])} |"


def row(model: str, gpu: str) -> Sequence[str]:
    """Cells for one model and GPU, one for each size of RAM."""
    plan_for = plans(model, gpu)
    cells = []
    for ram in RAM:
        for moments, words in MOMENTS.items():
            plan = plan_for(ram, moments)
            if plan is not None:
                cells.append(f"{plan.timing.tokens_per_s:,.0f}{words}")
                break
        else:
            cells.append("-")
    return cells


def largest(gpu: str) -> Sequence[str]:
    """Markdown rows for a GPU: the largest model of each column that fits, with its step."""
    rows = [f"| RAM | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    known = cache(plans)
    for ram in CARDS[gpu]:
        cells = []
        for models, moments in COLUMNS.values():
            fitting = ((model, known(model, gpu)(ram, moments)) for model in models)
            shown = (
                f"{model}: {plan.timing.seconds:.3g} s, {plan.timing.tokens_per_s:,.0f}"
                for model, plan in fitting
                if plan
            )
            cells.append(next(shown, "-"))
        rows.append(f"| {ram.replace('GiB', ' GiB')} | {' | '.join(cells)} |")
    return rows


def plans(model: str, gpu: str) -> Callable[[str, str], Plan | None]:
    """A function of RAM and moments: the plan, or None where there is none that fits."""
    quiet_libraries()
    first = bench_config(model, STEP)
    described = shape_model(first)
    known = resolve_run(first, described, planned_machine(first, gpu=gpu, ram=RAM[-1]))

    def plan_for(ram: str, moments: str) -> Plan | None:
        config = bench_config(model, [*STEP, f"optimizer.moments={moments}"])
        machine = planned_machine(config, gpu=gpu, ram=ram)
        request = request_of(config, described)
        plan = plan_run(config, replace(known, machine=machine, request=request))
        return plan if plan.fits else None

    return plan_for


if __name__ == "__main__":
    main()

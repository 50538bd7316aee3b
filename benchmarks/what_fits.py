"""Which model fits which machine, by the plan: writes the tables of docs/what-fits.md.

    python -m benchmarks.what_fits

Steps of 65,536 tokens in sequences of 2,048, AdamW, exact clipping. Tokens a second are predicted from public figures of the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.errors import PlanError
from megatrain.recipes.another_machine import another_machine
from megatrain.recipes.setup import assemble, make_run_plan, quiet_libraries
from megatrain.recipes.shapes import bench_config, shape_model

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3-70b")
RAM = ("32GiB", "64GiB", "128GiB", "256GiB", "512GiB", "1024GiB")
GPUS = ("RTX 4090", "H100", "H200")
MOMENTS = {"float32": "", "bfloat16": " *with bf16*", "int8": " *with int8*"}
STEP = ("train.seq_len=2048", "train.tokens_per_step=65536")
INTRODUCTION = """# What fits

By `megatrain plan MODEL --gpu GPU --ram RAM`, which you can ask about your own model, batch and machine. Every parameter is trained, by
AdamW with exact clipping, in steps of 65,536 tokens and sequences of 2,048. A number is predicted tokens per second, from public figures of
the GPU, with fp32 moments; *with bf16* is what `optimizer.moments: bfloat16` makes possible, *with int8* what `optimizer.moments: int8`
does; a dash, that nothing does which leaves the batch as it is. Predictions are no measurements: those are in
[performance.md](performance.md). Qwen2.5-1.5B is the shape without tied embeddings, 1.8B.
"""


def main() -> None:
    quiet_libraries()
    PAGE.write_text(INTRODUCTION + "".join(f"\n## {gpu}\n\n" + "\n".join(table(gpu)) + "\n" for gpu in GPUS))


def table(gpu: str) -> Iterator[str]:
    """Markdown rows."""
    yield f"| | {' | '.join(f'{size} of RAM' for size in RAM)} |"
    yield "|---" * (len(RAM) + 1) + "|"
    for model in MODELS:
        yield f"| {model} | {' | '.join(row(model, gpu))} |"


def row(model: str, gpu: str) -> Sequence[str]:
    """A cell for every size of RAM."""
    first = bench_config(model, STEP)
    parts = assemble(first, shape_model(first), another_machine(first, gpu, RAM[0]))
    cells = []
    for ram in RAM:
        for moments, words in MOMENTS.items():
            config = bench_config(model, [*STEP, f"optimizer.moments={moments}"])
            machine = another_machine(config, gpu, ram)
            plan = make_run_plan(config, replace(parts, machine=machine))
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

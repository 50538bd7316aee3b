"""`megatrain rollout`: answers and rewards of a config, without training."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain.config import Config
from megatrain.data.rows import permutation
from megatrain.errors import printable
from megatrain.recipes.frozen import first_model
from megatrain.recipes.model import read_model, suited
from megatrain.recipes.rl.prompts import read_prompt_rows
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.setup import day_of, quiet_libraries
from megatrain.recipes.signals import StopRequest

SHOWN = 200  # characters of a prompt or an answer


def try_out(config: Config, prompts: int) -> dict[str, Any]:
    """Write `num_generations` answers to each of some prompts, the first of a run, and judge
    them. config: of a method of prompts."""
    quiet_libraries()
    model = suited(read_model(config), config)
    rows, _ = read_prompt_rows(config, model, day_of(config))
    chosen: Any = rows.choose(permutation(len(rows), config.train.seed, 0)[:prompts])
    with ExitStack() as stack:
        computing = {"precision": config.precision, "device": config.device}
        engine = stack.enter_context(first_model(config, **computing))
        log = Path(stack.enter_context(TemporaryDirectory())) / "printed"
        stack.callback(lambda: log.exists() and sys.stderr.write(log.read_text(errors="replace")))
        rollouts = Rollouts(
            rows=chosen, held_out=None, config=config, model=model, micro_batch_tokens=0
        )
        rollouts.begin(engine, stack, log, trains=False)
        began = time.perf_counter()
        count = config.policy.num_generations
        figures, groups = rollouts.answered(chosen, None, count, StopRequest())
        answers = [
            {"prompt": one["prompt"], "answer": answer, "rewards": rewards}
            for one in groups
            for answer, *rewards in zip(one["completions"], *one["rewards"], strict=True)
        ]
        seconds, names = time.perf_counter() - began, rollouts.judges.names
        return {**figures, "seconds": seconds, "names": names, "answers": answers}


def print_answers(found: dict[str, Any]) -> None:
    """Print the figures, and the first answer to each prompt with its rewards."""
    table = Table("prompt", "answer", *found["names"])
    firsts = {str(one["prompt"]): one for one in reversed(found["answers"])}
    for one in firsts.values():
        texts = (_text(one[name]) for name in ("prompt", "answer"))
        table.add_row(*texts, *("-" if x is None else f"{x:.3g}" for x in one["rewards"]))
    console = Console()
    console.print(table)
    for name, value in found.items():
        if isinstance(value, float):
            console.print(f"{name:<42} {value:.4g}", highlight=False)


def _text(given: Any) -> str:
    text = given if isinstance(given, str) else str(given[-1]["content"])
    return printable(text[-SHOWN:]).replace("[", r"\[")

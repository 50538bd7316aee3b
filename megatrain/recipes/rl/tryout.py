"""`megatrain rollout`: answers and rewards of a config, without training."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain.config import Config
from megatrain.data.rows import permutation
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, printable
from megatrain.methods import METHODS
from megatrain.optim import Frozen
from megatrain.recipes.model import read_model, suited
from megatrain.recipes.rl.prompts import read_prompt_rows
from megatrain.recipes.rl.rollouts import NEVER, Rollouts
from megatrain.recipes.setup import quiet_libraries
from megatrain.settings import Settings

SHOWN = 200  # characters of a prompt or an answer


def try_out(config: Config, prompts: int) -> dict[str, Any]:
    """Write grpo.num_generations answers to each of some prompts, the first of a run, and judge
    them. Raises ConfigError for another method."""
    if METHODS[config.method].kind != "prompts":
        words = "writes no answers; name a config of method: grpo"
        raise ConfigError(f"{config.where('method')}: method: {config.method} {words}")
    quiet_libraries()
    model = suited(read_model(config), config)
    rows, _ = read_prompt_rows(config, model)
    chosen: Any = rows.choose(permutation(len(rows), config.train.seed, 0)[:prompts])
    engine = Engine.from_pretrained(
        config.model.source,
        optimizer=Frozen(),
        max_grad_norm=None,
        router_aux_loss_coef=0.0,
        settings=Settings(),
        trust_remote_code=config.model.trust_remote_code,
        precision=config.precision,
        attention=config.attention,
        device=config.device,
    )
    with ExitStack() as stack:
        stack.enter_context(engine)
        rollouts = Rollouts(
            rows=chosen, held_out=None, config=config, model=model, micro_batch_tokens=0
        )
        rollouts.begin(engine, stack)
        began = time.perf_counter()
        found = rollouts.answered(chosen, None, config.grpo.num_generations, NEVER)
        assert found is not None
        figures, groups, judgements = found
        answers = [
            {"prompt": group.prompt, "answer": answer, "rewards": rewards}
            for group, judgement in zip(groups, judgements, strict=True)
            for answer, rewards in zip(
                group.completions, zip(*judgement.rewards, strict=True), strict=True
            )
        ]
        names = rollouts.judges.names if rollouts.judges else []
        return {
            **figures,
            "seconds": time.perf_counter() - began,
            "names": names,
            "answers": answers,
        }


def print_answers(found: dict[str, Any]) -> None:
    """Print the figures, and the first answer to each prompt with its rewards."""
    table, seen = Table("prompt", "answer", *found["names"]), list[Any]()
    for one in found["answers"]:
        if one["prompt"] not in seen:
            seen.append(one["prompt"])
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

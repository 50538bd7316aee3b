"""What a run's evaluations find out besides the held-out loss: tasks, and answers to prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.evaluating import check_prompts
from megatrain.data.prompts import Turns, read_prompts
from megatrain.errors import DataError, MegaTrainError
from megatrain.models.rotary import longest_sequence
from megatrain.models.stops import with_stops
from megatrain.recipes.judging import Figures
from megatrain.recipes.model import Model
from megatrain.recipes.sample import continuation, ids_of
from megatrain.recipes.signals import StopRequest
from megatrain.recipes.tasks import Sizes, TaskOptions, Tasks, load_tasks, run_tasks
from megatrain.reporting.samples import write_samples

if TYPE_CHECKING:
    from megatrain.recipes.loop import Run

TOGETHER_S = 30.0  # within which a task has failed on all ranks, if it does

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Examination:
    """What is asked at evaluations; prompts as turns and as token ids."""

    tasks: Tasks | None = None
    prompts: tuple[tuple[Turns, list[int]], ...] = ()

    @property
    def asks_each_time(self) -> bool:
        return bool(self.prompts or self.tasks_each_time)

    @property
    def tasks_each_time(self) -> Tasks | None:
        return self.tasks if self.tasks and self.tasks.each_time else None

    @property
    def tasks_at_the_end(self) -> Tasks | None:
        return None if self.tasks is None or self.tasks.each_time else self.tasks


NOTHING = Examination()


def open_examination(config: Config, model: Model) -> Examination:
    """Read tasks and prompts. Raises ConfigError and DataError."""
    given, tasks, prompts = config.eval, None, []
    if given.tasks:
        folder = None if given.include_path is None else Path(given.include_path)
        options = TaskOptions(
            given.tasks, given.limit, given.num_fewshot, folder, given.apply_chat_template
        )
        where = config.where("eval.tasks")
        tasks = load_tasks(options, where, each_time=given.tasks_at == "evaluations")
    check_prompts(config)
    if given.prompts is not None:
        where = config.where("eval.prompts")
        longest = longest_sequence(model.config.get_text_config())
        for number, turns in enumerate(read_prompts(given.prompts), 1):
            ids = ids_of(model, turns, f"{where}: prompt {number}")
            if longest is not None and len(ids) + given.max_new_tokens > longest:
                raise DataError(
                    f"{where}: prompt {number} has {len(ids)} tokens, which with an answer of "
                    f"eval.max_new_tokens {given.max_new_tokens} exceed the {longest} that the "
                    "model reads; shorten one of them"
                )
            prompts.append((turns, ids))
    return Examination(tasks, tuple(prompts))


def examine(run: Run, stop: StopRequest) -> Figures | None:
    """What an evaluation finds besides the loss, with the prompts answered; None if asked to stop.

    Before the first step a task that fails raises what it raises; later that is logged.
    """
    found: Figures = {}
    if (tasks := run.examination.tasks_each_time) is not None:
        figures = figures_of(run, tasks, stop)
        if figures is None:
            return None
        found = figures
    answers = []
    for turns, ids in run.examination.prompts:
        if stop.came():
            return None
        text = continuation(run.engine, run.model, ids, run.config.eval.max_new_tokens)
        asked: Any = turns if len(turns) > 1 else turns[0]["content"]
        answers.append({"step": run.step, "prompt": asked, "answer": text})
    if run.engine.world.is_first:
        write_samples(run.config.output, answers)
    return found


def figures_of(run: Run, tasks: Tasks, stop: StopRequest) -> Figures | None:
    """What tasks find in the middle of a run, by their names in metrics.jsonl; None if asked to
    stop.

    A task that fails gives no figures, and is logged. Before the first step it raises; and so it
    does where it fails on some ranks alone, as others may wait for these in a sweep.
    """
    model, world = run.model, run.engine.world
    generation = with_stops(model.config, model.tokenizer, model.generation)[0]
    sizes = Sizes(run.loader.micro_batch_tokens, run.sweep_tokens)
    how: dict[str, Any] = {"generation": generation, "stop": stop.came, "quiet": True}
    try:
        results = run_tasks(tasks, run.engine, model, sizes, errors=False, **how)
    except MegaTrainError as error:
        if run.step == 0 or not world.all_say(f"step {run.step}: a task failed", TOGETHER_S):
            raise
        if world.is_first:
            logger.error(f"step {run.step}: {error}; training goes on without these figures")
        return {}
    # lm-eval has them on the first rank alone, which waits here for any that fails
    results, *_ = world.every(results)
    if results is None:
        return None
    logger.info(f"step {run.step}: {results.in_words()}")
    run.figures = results.figures()
    return run.figures

"""Tasks of lm-evaluation-harness on an engine, for `megatrain eval --tasks` and `eval.tasks`."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatrain.config.evaluating import check_lm_eval
from megatrain.config.values import did_you_mean
from megatrain.engine.engine import Engine
from megatrain.engine.generation import free_bytes
from megatrain.errors import ConfigError, DataError, MegaTrainError
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.recipes.model import Model
from megatrain.reporting.metrics import json_able

# A sweep over a streamed model should carry many tokens: these micro-batches at most, and hidden
# states, old and new, in this share of what a GPU has free.
SWEEP_MICRO_BATCHES, MOST_MICRO_BATCHES, SHARE_FOR_SWEEP = 4, 64, 0.25

# (task, metric, filter) -> value; filter "none" is the usual one
Values = dict[tuple[str, str, str], float]


class AskedToStop(Exception):
    """Somebody asked to stop, in the middle of a task."""


@dataclass(frozen=True)
class Sizes:
    """Padded tokens that are computed at once, and that share one sweep over the weights."""

    micro_batch_tokens: int
    sweep_tokens: int


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how, by the names that lm-eval's own command has for them.

    Attributes:
        names: of tasks, groups and tags, or YAML files.
        limit: of each task's documents: a number, or below 1 a share; None: all.
        num_fewshot: examples before each question; None: as the task says.
        include_path: folder of further tasks.
        apply_chat_template: ask in the model's chat format.
    """

    names: tuple[str, ...]
    limit: float | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    apply_chat_template: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks with their documents read.

    where: what names them, for errors. each_time: a run has them at every evaluation.
    """

    options: TaskOptions
    where: str
    manager: Any
    loaded: Sequence[Any]  # tasks and groups of lm-eval
    asked: frozenset[str]  # names whose figures count: a group's, not those of its tasks
    each_time: bool = True

    def higher_is_better(self) -> dict[str, bool]:
        """Of figures by their names in metrics.jsonl, as far as the tasks say it."""
        found = {}
        for one in self.loaded:
            for task in tasks_in(one):
                for metric, higher in task.higher_is_better().items():
                    for name in (name_of(one), task.task_name):
                        found[figure_name(name, metric)] = bool(higher)
        return found


@dataclass(frozen=True)
class TaskResults:
    """What tasks found.

    Attributes:
        values, errors: of each metric, and its standard error, where there is one.
        documents, fewshot: how many, by task.
        higher: whether more is better, where a task says it.
        asked: as `Tasks` has it.
    """

    values: Values
    errors: Values
    documents: dict[str, int]
    fewshot: dict[str, int]
    higher: dict[tuple[str, str], bool]
    asked: frozenset[str]

    def figures(self) -> dict[str, float]:
        """What metrics.jsonl gets: `eval_<task>_<metric>`, and `_<filter>` if that is not usual."""
        return {
            figure_name(task, metric, filtered): value
            for (task, metric, filtered), value in self.values.items()
            if task in self.asked
        }

    def to_dict(self) -> dict[str, Any]:
        """By task: the values with their errors, as lm-eval's own results have them."""
        found: dict[str, dict[str, Any]] = {}
        for (task, metric, filtered), value in self.values.items():
            row = found.setdefault(task, {})
            row[f"{metric},{filtered}"] = value
            if (error := self.errors.get((task, metric, filtered))) is not None:
                row[f"{metric}_stderr,{filtered}"] = error
        for task, row in found.items():
            row |= {"n-shot": self.fewshot.get(task), "n-samples": self.documents.get(task)}
        return json_able(found)  # type: ignore[no-any-return]

    def in_words(self) -> str:
        """What was asked for, in a line: `quartz acc 0.7100`."""
        shown = [
            f"{task} {metric}{'' if filtered == 'none' else f' ({filtered})'} {value:.4f}"
            for (task, metric, filtered), value in self.values.items()
            if task in self.asked
        ]
        return ", ".join(shown)

    def render(self, console: Console) -> None:
        table = Table(box=None, pad_edge=False)
        for name in ("task", "n-shot", "documents", "filter", "metric"):
            table.add_column(name)
        for name in ("value", "stderr"):
            table.add_column(name, justify="right")
        for (task, metric, filtered), value in self.values.items():
            error = self.errors.get((task, metric, filtered))
            counts = (str(known.get(task, "")) for known in (self.fewshot, self.documents))
            arrow = {True: " ↑", False: " ↓", None: ""}[self.higher.get((task, metric))]
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, *counts, filtered, f"{metric}{arrow}", f"{value:.4f}", shown)
        console.print(table)


def figure_name(task: str, metric: str, filtered: str = "none") -> str:
    return f"eval_{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")


def load_tasks(options: TaskOptions, where: str, *, each_time: bool = True) -> Tasks:
    """Find the tasks and read their documents, from the hub if need be.

    Raises ConfigError for unknown names, DataError for documents that cannot be read.
    """
    check_lm_eval(where)
    if options.limit is not None and not options.limit > 0:
        raise ConfigError(f"{where}: limit must be above 0, not {options.limit}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path is not None and not options.include_path.is_dir():
        raise ConfigError(f"{where}: {options.include_path}: no such folder of tasks")
    from lm_eval.tasks import TaskManager

    own = None if options.include_path is None else str(options.include_path)
    # to look through all tasks of lm-eval takes seconds
    manager = TaskManager(include_path=own, include_defaults=False)
    if not all(is_known(name, manager) for name in options.names):
        manager = TaskManager(include_path=own)
    for name in options.names:
        if not is_known(name, manager):
            near = did_you_mean(name, manager.all_tasks)
            raise ConfigError(
                f"{where}: {name}: lm-eval has no such task{near}; `lm-eval ls tasks` lists those "
                "that there are, and --include-path (eval.include_path) adds a folder of others"
            )
    loaded: list[Any] = []
    for name in options.names:
        with naming(f"{where}: {name}"):
            found = manager._load_spec(name)  # `load` takes groups apart
        loaded += found if isinstance(found, list) else [found]
    asked: set[str] = set()
    for one in loaded:  # a group without a figure of its own has those of its tasks
        whole = one in tasks_in(one) or one.aggregate_metric_list
        asked |= {name_of(one)} if whole else {task.task_name for task in tasks_in(one)}
    return Tasks(options, where, manager, loaded, frozenset(asked), each_time)


def tasks_in(one: Any) -> list[Any]:
    """The tasks of a group of lm-eval; a task itself."""
    return list(one.get_all_tasks()) if hasattr(one, "get_all_tasks") else [one]


def name_of(one: Any) -> str:
    return str(one.name if hasattr(one, "get_all_tasks") else one.task_name)


def is_known(name: str, manager: Any) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise whatever the code of a task, a data set or a metric raises as a DataError."""
    try:
        yield
    except (MegaTrainError, AskedToStop):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{what}: {type(error).__name__}: {reason[:500]}") from error


def run_tasks(
    tasks: Tasks,
    engine: Engine,
    model: Model,
    sizes: Sizes,
    *,
    generation: Any = None,
    stop: Callable[[], bool] = lambda: False,
    quiet: bool = False,
    errors: bool = True,
) -> TaskResults | None:
    """What the tasks find; None if asked to stop, and where lm-eval says nothing, on all ranks of a
    host but the first. The engine and random states stay as they were.

    Args:
        generation, stop, quiet: as `EngineLM` has them. quiet: nothing is written at all.
        errors: estimate the standard errors, too, which takes some metrics seconds.

    Raises DataError for a task that fails, and ConfigError.
    """
    from lm_eval.evaluator import simple_evaluate

    from megatrain.recipes.harness import EngineLM

    options = tasks.options
    if options.apply_chat_template and model.tokenizer.chat_template is None:
        raise ConfigError(f"{tasks.where}: this model has no chat template to apply")
    lm = EngineLM(engine, model, sizes, generation=generation, stop=stop, quiet=quiet)
    try:
        with naming(tasks.where), own_randomness(), silent(quiet):
            found: Any = simple_evaluate(
                model=lm,
                tasks=list(tasks.loaded),
                task_manager=tasks.manager,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
                fewshot_as_multiturn=options.apply_chat_template,  # as its command does
                bootstrap_iters=100_000 if errors else 0,
                log_samples=False,
            )
    except AskedToStop:
        return None
    return None if found is None else results_of(found, tasks.asked)


def results_of(found: Mapping[str, Any], asked: frozenset[str]) -> TaskResults:
    """lm-eval's results, flat."""
    values, errors = Values(), Values()
    for task, row in found["results"].items():
        for name, value in row.items():
            metric, comma, filtered = name.partition(",")
            if not comma or isinstance(value, str):
                continue
            of_error = metric.endswith("_stderr")
            kind = errors if of_error else values
            kind[task, metric.removesuffix("_stderr"), filtered] = float(value)
    counts = {task: count["effective"] for task, count in found.get("n-samples", {}).items()}
    higher = {
        (task, metric): bool(better)
        for task, row in found.get("higher_is_better", {}).items()
        for metric, better in row.items()
        if better is not None
    }
    fewshot = {task: int(n) for task, n in found.get("n-shot", {}).items()}
    return TaskResults(values, errors, counts, fewshot, higher, asked)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Python's, numpy's and torch's random states are afterwards what they were."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if used else []
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


@contextmanager
def silent(wanted: bool) -> Iterator[None]:
    """Nothing is written to stdout or, if wanted, to stderr: lm-eval has bars of its own."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        if wanted:
            stack.enter_context(redirect_stderr(StringIO()))
        yield


def sizes_for(engine: Engine, longest: int) -> Sizes:
    """Batches for an engine that nothing else computes on. longest: tokens of a row, at most."""
    size = max(AUTO_MICRO_BATCH_TOKENS[engine.device.type], longest)
    sweep = SWEEP_MICRO_BATCHES * size
    if engine.device.type == "cuda":
        states = 2 * engine.anatomy.hidden_size * engine.skeleton.dtype.itemsize
        room = int(SHARE_FOR_SWEEP * free_bytes(engine.device)) // states
        sweep = max(sweep, min(room, MOST_MICRO_BATCHES * size))
    return Sizes(size, sweep)

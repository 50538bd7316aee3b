"""Tasks of lm-evaluation-harness on an engine, for `megatrain eval --tasks`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain.config.sections import check_lm_eval
from megatrain.config.values import did_you_mean
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, DataError, MegaTrainError
from megatrain.recipes.model import Model
from megatrain.reporting.metrics import json_able


@dataclass(frozen=True)
class TaskOptions:
    """Options of tasks, named as by lm-eval's own command."""

    names: tuple[str, ...]  # of tasks, groups and tags, or YAML files
    limit: float | None = None  # of each task's documents: a number, or below 1 a share
    num_fewshot: int | None = None  # examples before each question; None: as the task says
    include_path: Path | None = None  # folder of further tasks
    apply_chat_template: bool = False  # ask in the model's chat format


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """Print the results of `run_tasks`."""
    columns = ("task", "n-shot", "documents", "metric", "value", "stderr")
    table = Table(*columns, box=None, pad_edge=False)
    for task, row in results.items():
        counts = str(row["n-shot"] or 0), str(row["n-samples"] or "")
        for name in (name for name in row if "," in name and "_stderr," not in name):
            error = row.get(name.replace(",", "_stderr,"))
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, *counts, name.removesuffix(",none"), f"{row[name]:.4f}", shown)
    console.print(table)


def load_tasks(options: TaskOptions, where: str) -> dict[str, Any]:
    """Find the tasks and read their documents, for lm-eval's `simple_evaluate`: its arguments but
    for the model. where: the flag or argument that names the tasks, for errors. Raises ConfigError
    and DataError."""
    check_lm_eval(where)
    if options.limit is not None and not options.limit > 0:
        raise ConfigError(f"{where}: limit must be above 0, not {options.limit}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path is not None and not options.include_path.is_dir():
        raise ConfigError(f"{where}: {options.include_path}: no such folder of tasks")
    from lm_eval.tasks import TaskManager

    def is_known(name: str) -> bool:
        is_file = name.endswith((".yaml", ".yml")) and Path(name).is_file()
        return is_file or name in manager.task_index

    own = None if options.include_path is None else str(options.include_path)
    # to look through all tasks of lm-eval takes seconds
    manager = TaskManager(include_path=own, include_defaults=False)
    if not all(map(is_known, options.names)):
        manager = TaskManager(include_path=own)
    for name in options.names:
        if not is_known(name):
            near = did_you_mean(name, manager.all_tasks)
            raise ConfigError(
                f"{where}: {name}: lm-eval has no such task{near}; `lm-eval ls tasks` lists its "
                "tasks, and --include-path adds a folder of others"
            )
    loaded: list[Any] = []
    for name in options.names:
        with naming(f"{where}: {name}"):
            found = manager._load_spec(name)  # `load` takes groups apart
        loaded += found if isinstance(found, list) else [found]
    return {
        "tasks": loaded,
        "task_manager": manager,
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "apply_chat_template": options.apply_chat_template,
        "fewshot_as_multiturn": options.apply_chat_template,  # as its command does
    }


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise whatever the code of a task, a data set or a metric raises as a DataError."""
    try:
        yield
    except MegaTrainError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{what}: {type(error).__name__}: {reason[:500]}") from error


def run_tasks(
    tasks: dict[str, Any], where: str, engine: Engine, model: Model, longest: int
) -> dict[str, Any]:
    """Run tasks of `load_tasks`: values and errors by task, with numbers of examples and documents.
    longest: tokens of a row. Raises DataError for one that fails."""
    from lm_eval.evaluator import simple_evaluate

    from megatrain.recipes.harness import EngineLM

    if tasks["apply_chat_template"] and model.tokenizer.chat_template is None:
        raise ConfigError(f"{where}: this model has no chat template to apply")
    lm = EngineLM(engine, model, longest)
    # lm-eval prints progress of its own to stdout
    with naming(where), redirect_stdout(StringIO()):
        found: Any = simple_evaluate(model=lm, log_samples=False, **tasks)

    def count(what: str, task: str) -> int | None:
        number: Any = found.get(what, {}).get(task)
        return int(number["effective"]) if isinstance(number, Mapping) else number

    return {
        task: json_able({k: v for k, v in row.items() if "," in k and not isinstance(v, str)})
        | {what: count(what, task) for what in ("n-shot", "n-samples")}
        for task, row in found["results"].items()
    }

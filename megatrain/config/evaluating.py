"""Keys about saves and evaluations: which are made, what they find, and which is the best."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from megatrain.config import choices as c
from megatrain.config import values as v
from megatrain.config.values import Options, as_texts, key, refuse, wanted
from megatrain.data.prompts import read_prompts
from megatrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatrain.config.fields import Config

EVAL_LOSS = "eval_loss"

TaskNames = Annotated[
    tuple[v.Text, ...], wanted("a task of lm-eval, a list of them, or null", as_texts)
]
Limit = Annotated[
    Annotated[float, Field(gt=0)] | None, wanted("a number of rows, a share below 1, or null")
]
Shots = Annotated[
    Annotated[int, Field(ge=0)] | None, wanted("a whole number of at least 0, or null")
]


class CheckpointOptions(Options):
    """When the run is saved."""

    every: v.CountOrNull = key(
        200, "Steps between checkpoints; the last step is always kept. null saves only at the end."
    )
    keep: v.Count = key(
        2,
        "Newest checkpoints that stay on disk, besides the best, which is saved at any evaluation.",
    )
    patience: v.CountOrNull = key(
        None, "Evaluations without a better figure that end the run; null: it goes on."
    )
    metric: v.Text = key(
        EVAL_LOSS,
        "Figure of an evaluation by which it is the best, as metrics.jsonl names it: eval_loss, or "
        "a task's, eval_TASK_METRIC.",
    )
    greater_is_better: v.FlagOrAuto = key(
        "auto", "Of that figure; auto: as its task says, else unless its name ends with loss."
    )
    final: c.Final = key(
        "model",
        "final/ at the end: model, ready to upload; full, with the state to train on; or none.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.metric.startswith("eval_"):
            near = f"whose names begin with eval_; did you mean eval_{self.metric}?"
            refuse("metric", f"must be a figure of an evaluation, {near}")
        return self


class EvalOptions(Options):
    """What evaluations find out besides the held-out loss. Tasks are those of lm-eval (EleutherAI's
    lm-evaluation-harness), which the extra `megatrain[eval]` installs."""

    tasks: TaskNames = key((), "Tasks, groups or tags of lm-eval, or YAML files of tasks.")
    tasks_at: c.TasksAt = key(
        "end", "When tasks are run: once, at the end, or at every evaluation, the first included."
    )
    limit: Limit = key(None, "Largest number of rows of each task, or a share; null: all.")
    num_fewshot: Shots = key(None, "Examples before each question; null: as the task says.")
    include_path: v.SourceOrNull = key(None, "Folder of YAML files of further tasks.")
    apply_chat_template: v.Flag = key(False, "Ask tasks in the model's chat format.")
    prompts: v.SourceOrNull = key(
        None,
        "File of prompts that every evaluation answers into samples.jsonl: text, one a line, or "
        "jsonl with `prompt` or `messages`.",
    )
    max_new_tokens: v.Count = key(128, "Longest answer to one of them in tokens.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        of_tasks = ("tasks_at", "limit", "num_fewshot", "include_path", "apply_chat_template")
        for owner, names in (("tasks", of_tasks), ("prompts", ("max_new_tokens",))):
            for name in names if not getattr(self, owner) else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, f"has no effect without eval.{owner}; set that, or remove it")
        return self


def refuse_unjudged(checkpoint: CheckpointOptions, given: EvalOptions, holds_out: bool) -> None:
    """Refuse what waits for figures that no evaluation has."""
    of_tasks = bool(given.tasks) and given.tasks_at == "evaluations"
    by_loss = checkpoint.metric == EVAL_LOSS
    if checkpoint.patience is not None and not holds_out and (by_loss or not of_tasks):
        refuse("checkpoint.patience", "counts evaluations of held-out rows; set data.eval too")
    if not of_tasks and any(checkpoint.metric.startswith(f"eval_{one}_") for one in given.tasks):
        refuse(
            "checkpoint.metric", "its task is run at the end alone; set eval.tasks_at: evaluations"
        )


def check_prompts(config: Config) -> None:
    """Read `eval.prompts`, if it is set. Raises DataError with the place of the key."""
    if config.eval.prompts is None:
        return
    try:
        read_prompts(config.eval.prompts)
    except DataError as error:
        raise DataError(f"{config.where('eval.prompts')}: {error}") from None


def check_lm_eval(where: str, wanted: Any = True) -> None:
    """Raise ConfigError if lm-eval is wanted and missing. where: what asks for it."""
    if wanted and find_spec("lm_eval") is None:
        raise ConfigError(f"{where}: lm-eval is not installed; pip install 'megatrain[eval]'")

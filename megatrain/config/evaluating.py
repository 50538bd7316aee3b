"""Keys of checkpoints and evaluations."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from megatrain.config import choices as c
from megatrain.config import values as v
from megatrain.config.values import Options, key, refuse
from megatrain.data.prompts import read_prompts
from megatrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatrain.config.fields import Config

EVAL_LOSS = "eval_loss"
MAX_NEW_TOKENS = 128


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
        "Figure of an evaluation by which it is the best, as metrics.jsonl names it.",
    )
    greater_is_better: v.FlagOrAuto = key(
        "auto", "Of that figure; auto: unless its name ends with loss."
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
    """Prompts that evaluations answer. Tasks of lm-eval are run by `megatrain eval RUN --tasks`."""

    prompts: v.SourceOrNull = key(
        None,
        "File of prompts that every evaluation answers into samples.jsonl: text, one a line, or "
        "jsonl with `prompt` or `messages`.",
    )
    max_new_tokens: v.Count = key(MAX_NEW_TOKENS, "Longest answer to one of them in tokens.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompts is None and self.max_new_tokens != MAX_NEW_TOKENS:
            refuse("max_new_tokens", "has no effect without eval.prompts; set that, or remove it")
        return self


def check_prompts(config: Config) -> None:
    """Read `eval.prompts`, if it is set. Raises DataError with the place of the key."""
    if config.eval.prompts is None:
        return
    try:
        read_prompts(config.eval.prompts)
    except DataError as error:
        raise DataError(f"{config.where('eval.prompts')}: {error}") from None


def check_lm_eval(where: str) -> None:
    """Raise ConfigError if lm-eval is not installed. where: the flag that needs it."""
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{where}: lm-eval is not installed; pip install 'megatrain[eval]'")

"""The rows that `eval` evaluates: those that a run held out, or others."""

from __future__ import annotations

import logging
from os.path import isfile  # whose pathlib counterpart raises for some paths
from pathlib import Path
from typing import Any

from megatrain.config import Config, load_config
from megatrain.config.fields import TrainOptions
from megatrain.config.resuming import (
    CONFIG_FILE,
    RESOLVED_FILE,
    asked_again,
    resumed_configs,
)
from megatrain.data.build import Expected
from megatrain.data.rows import Rows
from megatrain.errors import ConfigError, DataError
from megatrain.models.pretrained import is_classifier
from megatrain.recipes.model import Model
from megatrain.recipes.setup import day_of, read_rows
from megatrain.storage.restore import read_about
from megatrain.storage.saves import STATE, with_state

logger = logging.getLogger("megatrain")

OF_TRAIN = ("seed", "seq_len", "eval_rows")  # keys that say which rows are held out
ALL_ROWS = {"data.eval": None, "data.streaming": False}  # of a source are evaluated
MAY_MOVE = ("train", "processes")  # of the data section: the same rows may lie elsewhere


def rows_to_evaluate(
    run_dir: Path | None, checkpoint: Path, model: Model, data: object
) -> tuple[Config, Rows]:
    """(the config that says how, the rows).

    data: rows of this source, all of them; None: those that the run held out.

    Raises ConfigError and DataError.
    """
    if run_dir is None:
        whole: dict[str, Any] = {"model": str(checkpoint), "train": {"seq_len": longest_row(model)}}
        whole |= {"method": "reward"} if is_classifier(model.config) else {}
        config = load_config(whole, {"data.train": data, **ALL_ROWS})
        return config, read_rows(config, model)[0]
    day = day_of(load_config(run_dir / RESOLVED_FILE, of_run=True))
    if data is not None:
        config = load_config(run_dir / CONFIG_FILE, {"data.train": data, **ALL_ROWS}, of_run=True)
        return config, read_rows(config, model, day)[0]
    config, expected = held_out_by(run_dir, checkpoint)
    try:
        _, rows = read_rows(config, model, day, expected)
    except DataError as error:
        raise DataError(f"{error}; or name rows to evaluate on with --data") from error
    if rows is None:
        raise ConfigError(f"{run_dir}: holds no rows out (data.eval: null); name some with --data")
    return config, rows


def held_out_by(run_dir: Path, checkpoint: Path) -> tuple[Config, Expected | None]:
    """The run's config with what decided which rows are held out when the checkpoint was saved, and
    digests of these rows. Says what was edited since, and where nothing is known."""
    asked, source = asked_again(run_dir, ()), with_state(checkpoint)
    state: dict[str, Any] = read_about(source)["state"] if isfile(source / STATE) else {}
    if "config" not in state:
        logger.warning(
            f"{checkpoint}: no checkpoint is left that says which rows were held out; those that "
            f"{run_dir / CONFIG_FILE} holds out now are evaluated"
        )
        return asked, None
    then, _ = resumed_configs(run_dir, asked, state)
    before, now = about_rows(then), about_rows(asked)
    for key, value in before.items():
        if now.get(key) not in (value, "auto"):
            logger.warning(
                f"{run_dir / CONFIG_FILE}: {key} was changed from {value!r} to {now.get(key)!r}; "
                "rows are evaluated as they were held out"
            )
    # where the held-out rows have a source of their own, others may be trained on by now
    of_source = not isinstance(then.data.eval, int | float | None)
    train = None if of_source else state["position"]["data"]
    expected = Expected(train, state.get("held_out"))
    return asked.with_values(before), expected


def about_rows(config: Config) -> dict[str, Any]:
    """The keys that decide which rows are held out and what their loss is."""
    given = config.model_dump(mode="json")
    data = {f"data.{name}": value for name, value in given["data"].items() if name not in MAY_MOVE}
    train = {f"train.{name}": given["train"][name] for name in OF_TRAIN}
    method = {f"{config.method}.{name}": value for name, value in config.of_method.items()}
    return {"method": config.method, **data, **train, **method}


def longest_row(model: Model) -> int:
    """Tokens of the longest row that a model which no run wrote is evaluated on."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    default: int = TrainOptions().seq_len
    return min(default, positions or default)

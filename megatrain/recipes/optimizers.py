"""The optimizer that a config names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.optim import OPTIMIZERS, Optimizer


def make_optimizer(config: Config) -> Optimizer:
    """The config's optimizer; what is left to it (auto) is its own default.

    Raises ConfigError for a key that it does not have.
    """
    made: type[Any] = OPTIMIZERS[config.optimizer.name]
    known = {field.name for field in fields(made)}
    chosen = {key: value for key, value in config.optimizer if key != "name" and value != "auto"}
    for key in chosen:
        if key not in known:
            where = config.where(f"optimizer.{key}")
            raise ConfigError(f"{where}: {config.optimizer.name} has no {key}; remove the key")
    optimizer: Optimizer = made(lr=config.train.learning_rate, **chosen)
    return optimizer


def decided_of_optimizer(config: Config) -> dict[str, Any]:
    """The values of the optimizer's keys that are left to its own defaults."""
    own = vars(make_optimizer(config))
    left = [key for key, value in config.optimizer if value == "auto"]
    return {f"optimizer.{key}": own[key] for key in left if own.get(key) is not None}

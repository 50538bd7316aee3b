"""The optimizer that a config names, and what the plan needs to know of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.optim import OPTIMIZERS, Optimizer


def optimizer_keys(config: Config) -> tuple[str, ...]:
    """The keys that the config's optimizer has."""
    made: type[Any] = OPTIMIZERS[config.optimizer.name]
    return tuple(field.name for field in fields(made))


def make_optimizer(config: Config) -> Optimizer:
    """The config's optimizer; what is left to it (auto) is its own default. Raises ConfigError for a key that it does not have."""
    made: type[Any] = OPTIMIZERS[config.optimizer.name]
    chosen = {key: value for key, value in config.optimizer if key != "name" and value != "auto"}
    for key in chosen:
        if key not in optimizer_keys(config):
            raise ConfigError(
                f"{config.where(f'optimizer.{key}')}: {config.optimizer.name} has no {key}; remove the key"
            )
    optimizer: Optimizer = made(lr=config.train.learning_rate, **chosen)
    return optimizer

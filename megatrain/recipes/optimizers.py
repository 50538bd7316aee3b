"""From the config's `optimizer` section to an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.optim import OPTIMIZERS, AdamW, Lion, Optimizer
from megatrain.optim.elementwise import MOMENTS


def optimizer_keys(config: Config) -> tuple[str, ...]:
    """The keys that the config's optimizer has."""
    made: type[Any] = OPTIMIZERS[config.optimizer.name]
    return tuple(field.name for field in fields(made))


def make_optimizer(config: Config) -> Optimizer:
    """The config's optimizer; what is left to it (auto) is its own default. Raises ConfigError for a key that it does not have."""
    made = OPTIMIZERS[config.optimizer.name]
    chosen = {key: value for key, value in config.optimizer if key != "name" and value != "auto"}
    for key in chosen:
        if key not in optimizer_keys(config):
            raise ConfigError(f"{config.where(f'optimizer.{key}')}: {config.optimizer.name} has no {key}; remove the key")
    optimizer: Optimizer = made(lr=config.train.learning_rate, **chosen)
    return optimizer


def with_lighter_moments(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizer with every type of moments that is narrower than its own."""
    if isinstance(optimizer, (AdamW, Lion)):
        names = [*MOMENTS]
        for moments in names[names.index(optimizer.moments) + 1 :]:
            yield moments, replace(optimizer, moments=moments)

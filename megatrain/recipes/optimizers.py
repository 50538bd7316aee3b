"""The optimizer that a config names, and what the plan needs to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.models.skeleton import Skeleton, layouts_of
from megatrain.optim import OPTIMIZERS, AdamW, Lion, Optimizer, WholeTensors
from megatrain.optim.elementwise import MOMENTS
from megatrain.planner_job import WholeUpdate


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
            raise ConfigError(f"{config.where(f'optimizer.{key}')}: {config.optimizer.name} has no {key}; remove the key")
    optimizer: Optimizer = made(lr=config.train.learning_rate, **chosen)
    return optimizer


def with_lighter_moments(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizer with every type of moments that is narrower than its own."""
    if isinstance(optimizer, (AdamW, Lion)):
        names = [*MOMENTS]
        for moments in names[names.index(optimizer.moments) + 1 :]:
            yield moments, replace(optimizer, moments=moments)


def state_bytes(optimizer: Optimizer, skeleton: Skeleton) -> tuple[tuple[str, float], ...]:
    """Of each of the optimizer's arrays, bytes a parameter."""
    if isinstance(optimizer, WholeTensors):
        return ()  # blocks differ in them: `whole_update`
    layouts = layouts_of(skeleton.anatomy)
    numel = sum(layout.numel for layout in layouts)
    return tuple(
        (array.name, sum(layout.per(array.per).numel for layout in layouts) * array.dtype.itemsize / numel)
        for array in optimizer.state_arrays
    )


def whole_update(optimizer: Optimizer, skeleton: Skeleton) -> WholeUpdate | None:
    """What an optimizer of whole tensors asks of every block."""
    if not isinstance(optimizer, WholeTensors):
        return None
    layouts = layouts_of(skeleton.anatomy)
    scratch = optimizer.scratch(layouts)
    state = tuple(
        (array.name, tuple(layout.per(array.per).numel * array.dtype.itemsize for layout in layouts)) for array in optimizer.state_arrays
    )
    return WholeUpdate(
        state_bytes=state,
        product_flops=tuple(optimizer.product_flops(layout) for layout in layouts),
        bytes_per_parameter=sum(sum(sizes) for _, sizes in state) / sum(layout.numel for layout in layouts),
        passes_bytes=optimizer.passes_bytes,
        host_scratch=scratch.host,
        device_scratch=scratch.device,
    )

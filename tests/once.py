"""What is found out about equal models once in a process, where tests build the same tiny ones
again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.chunked import chunks_of
from megatrain.planner.cost.shape import ModelShape, shape_of


def key_of(skeleton: Skeleton, *more: Any) -> str:
    attention = getattr(skeleton.config, "_attn_implementation", None)
    chunked = [
        name
        for layer in skeleton.layers
        for name, module in layer.named_modules()
        if chunks_of(module)
    ]
    return repr(
        (skeleton.model, skeleton.dtype, attention, skeleton.config.to_dict(), chunked, more)
    )


@contextmanager
def products_left_out_are_found_once() -> Iterator[None]:
    """Which products recomputation may leave out: half of the time to build a tiny engine."""
    known: dict[str, list[tuple[str, ...]]] = {}
    find = Skeleton.find_skippable

    def find_skippable(skeleton: Skeleton) -> None:
        key = key_of(skeleton)
        if key not in known:
            find(skeleton)
            known[key] = skeleton._skippable
        skeleton._skippable = known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Skeleton, "find_skippable", find_skippable)
        yield


@contextmanager
def commands_dry_run_models_once() -> Iterator[None]:
    """What the planner knows of a model: half of the time of a short run."""
    known: dict[str, ModelShape] = {}

    def found_once(skeleton: Skeleton, *positional: Any, **named: Any) -> ModelShape:
        key = key_of(skeleton, positional, named)
        if key not in known:
            known[key] = shape_of(skeleton, *positional, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.engine.resolved.shape_of", found_once)
        yield

"""What is found out about equal models once in a session, where tests build the same tiny ones
again and again, in several processes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatrain.models.probe import Findings, probe_model
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.chunked import chunks_of
from megatrain.planner.cost.shape import ModelShape, shape_of
from tests.kernel_packages import kernels_there

SAMPLE_TOKENS = 4  # of the answer that ends every run: each takes a forward of its own


def key_of(skeleton: Skeleton, *more: Any) -> str:
    attention = getattr(skeleton.config, "_attn_implementation", None)
    chunked = [
        name
        for layer in skeleton.layers
        for name, module in layer.named_modules()
        if chunks_of(module)
    ]
    hooked = [
        name
        for layer in skeleton.layers
        for name, module in layer.named_modules()
        if module._forward_hooks
    ]
    config = skeleton.config.to_dict()
    frozen = skeleton.anatomy.frozen
    return repr((skeleton.model, skeleton.dtype, attention, config, chunked, hooked, frozen, more))


class Once:
    """Values by a key, for all processes of a session: files in its temporary folder."""

    def __init__(self, kind: str) -> None:
        self.folder = Path(os.environ["MEGATRAIN_TEST_HF_HOME"]) / "once" / kind
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Any] = {}

    def get(self, key: str, find: Callable[[], Any]) -> Any:
        if key not in self.known:
            file = self.folder / hashlib.sha256(key.encode()).hexdigest()
            if not file.exists():
                mine = file.with_suffix(f".{os.getpid()}")
                mine.write_bytes(pickle.dumps(find()))
                mine.replace(file)  # whole, whoever else writes or reads it
            self.known[key] = pickle.loads(file.read_bytes())
        return self.known[key]


@contextmanager
def products_left_out_are_found_once() -> Iterator[None]:
    """Which products recomputation may leave out: half of the time to build a tiny engine."""
    once, find = Once("products"), Skeleton.find_skippable

    def found(skeleton: Skeleton) -> list[tuple[str, ...]]:
        find(skeleton)
        return skeleton._skippable

    def find_skippable(skeleton: Skeleton) -> None:
        skeleton._skippable = once.get(key_of(skeleton), lambda: found(skeleton))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Skeleton, "find_skippable", find_skippable)
        yield


@contextmanager
def models_are_probed_once() -> Iterator[None]:
    """How a model is put together: a third of the time to build a tiny skeleton."""
    once = Once("findings")

    def probed_once(model: nn.Module, layers: nn.ModuleList) -> Findings:
        config: Any = model.config
        changed = (
            [name for name, _ in model.named_parameters()],
            [name for name, module in model.named_modules() if module._forward_hooks],
            kernels_there(model),
        )
        key = repr((type(model), config._attn_implementation, config.to_dict(), changed))
        findings: Findings = once.get(key, lambda: probe_model(model, layers))
        return findings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.models.skeleton.probe_model", probed_once)
        yield


@contextmanager
def commands_dry_run_models_once() -> Iterator[None]:
    """What the planner knows of a model: half of the time of a short run."""
    once = Once("shapes")

    def found_once(skeleton: Skeleton, *positional: Any, **named: Any) -> ModelShape:
        of_what = {name: getattr(value, "__qualname__", value) for name, value in named.items()}
        shape: ModelShape = once.get(
            key_of(skeleton, positional, of_what),
            lambda: shape_of(skeleton, *positional, **named),
        )
        return shape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.engine.resolved.shape_of", found_once)
        yield


@contextmanager
def answers_are_short() -> Iterator[None]:
    """What the model says at the end of every run: a quarter of the time of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.recipes.sample.SAMPLE_TOKENS", SAMPLE_TOKENS)
        yield


@contextmanager
def engines_are_built_fast() -> Iterator[None]:
    with models_are_probed_once(), products_left_out_are_found_once():
        yield


@contextmanager
def commands_are_short() -> Iterator[None]:
    with engines_are_built_fast(), commands_dry_run_models_once(), answers_are_short():
        yield

"""Runs of engines, and what they leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import weights_of
from megatrain.optim.split import join_master
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from tests.helpers.compare import differing
from tests.helpers.support import Batch

Steps = Sequence[Sequence[Batch]]
State = dict[tuple[str, int], Tensor]  # by array and block


@dataclass
class Trace:
    """What a run leaves behind.

    Attributes:
        losses, norms: of every step; the norms are those before clipping.
        weights: the final tensors by name.
        state: every array that must survive, if `run` ended it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: State = field(default_factory=dict)


def train_engine(engine: Engine, steps: Steps, rates: Sequence[float] | None = None) -> Trace:
    """Take these steps; the engine stays open."""
    trace = Trace()
    for batches, lr in zip(steps, rates or [engine.optimizer.lr] * len(steps), strict=True):
        result = engine.train_step(batches, lr=lr)
        assert result.grad_norm is not None
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights = weights_of(engine)
    return trace


def run(engine: Engine, steps: Steps) -> Trace:
    """Take these steps, keep the state, and close the engine."""
    with engine:
        trace = train_engine(engine, steps)
        trace.state = state_of(engine)
    return trace


def assert_same(found: Trace, expected: Trace, *, losses: float = 0.0) -> None:
    """The same norms and arrays, bit for bit; losses too, but for this relative difference."""
    if losses:
        assert found.losses == pytest.approx(expected.losses, rel=losses)
    else:
        assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert differing(found.state, expected.state) == []


def train_serially(engine: Engine, steps: Steps) -> Trace:
    """Take these steps, but nothing else begins before an update is over."""
    trace = Trace()
    for batches in steps:
        trace.losses.append(engine.forward_backward(batches).loss)
        trace.norms.append(engine.step())
        wait_for_updates(engine)
    trace.state = state_of(engine)
    return trace


def train_with_a_break(make: Callable[[], Engine], steps: Steps, folder: Path) -> Trace:
    """Train half of the steps, save, and let a new engine load and train the rest."""
    half = len(steps) // 2
    with make() as engine:
        first = train_engine(engine, steps[:half])
        checkpoint = save_checkpoint(folder, half, engine, None, {"position": half})
    with make() as engine:
        assert load_checkpoint(checkpoint, engine) == {"position": half}
        trace = run(engine, steps[half:])
    trace.losses, trace.norms = first.losses + trace.losses, first.norms + trace.norms
    return trace


def cosine(steps: int, lr: float) -> list[float]:
    """A learning rate for each step, falling from `lr` towards zero."""
    return [lr * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


def wait_for_updates(engine: Engine) -> None:
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)


def state_of(engine: Engine, names: Iterable[str] | None = None) -> State:
    """A copy of every array that must survive, or of these, after each block's update."""
    chosen = names or [n for n in engine.store.arrays if n not in ("grad", "grad_sum")]
    state = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        for name in chosen:
            with engine.store.lease(block.index, [name]) as arrays:
                state[name, block.index] = arrays[name].cpu().clone()
    return state


def masters_of(engine: Engine) -> dict[str, Tensor]:
    """The fp32 master weights of a bfloat16 engine, by tensor name; not frozen ones."""
    named: dict[str, Tensor] = {}
    for block in engine.anatomy.blocks:
        engine.wait_ready(block.index)
        layout = block.layout.trained
        with engine.store.lease(block.index, ["weight", "remainder"]) as arrays:
            master = join_master(*(array.cpu()[: layout.numel] for array in arrays.values()))
        named |= layout.views(master)
    return named

"""Every elementwise optimizer, with moments of every type, through the engine: what must not change a bit, and plain PyTorch's result."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatrain.errors import ConfigError
from megatrain.memory.layout import GROUP
from megatrain.models.anatomy import decays
from megatrain.optim import AdamW, Lion, Optimizer
from megatrain.settings import ALL, Settings
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.restore import load_checkpoint
from tests.optim.test_lion import PlainLion
from tests.support import (
    LANES,
    State,
    cosine,
    count_targets,
    delay,
    differing,
    distance,
    engine_of,
    full_batches,
    micro_batches,
    plain_gradients,
    plain_model,
    state_of,
    tiny_config,
    train_engine,
    train_with_a_break,
)

OPTIMIZERS: list[Optimizer] = [
    AdamW(lr=1e-3, weight_decay=0.1, moments="bfloat16"),
    AdamW(lr=1e-3, weight_decay=0.1, moments="int8"),
    Lion(lr=1e-4, weight_decay=0.1),
    Lion(lr=1e-4, weight_decay=0.1, moments="bfloat16"),
    Lion(lr=1e-4, weight_decay=0.1, moments="int8"),
]
STEPS = [full_batches(seed, [(1, 8), (2, 5)]) for seed in range(6)]
every_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.name}-{optimizer.moments}"
)


def make(optimizer: Optimizer, **options: Any) -> Any:
    return engine_of(
        tiny_config("qwen2-tied"), optimizer=optimizer, precision="bfloat16", **options
    )


@cache
def straight(optimizer: Optimizer) -> tuple[list[float], State]:
    """The run that others are compared with."""
    with make(optimizer) as engine:
        return train_engine(engine, STEPS).losses, state_of(engine)


@every_optimizer
def test_deferred_updates_residency_and_the_cut_into_pieces_change_no_bit(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, state = straight(optimizer)
    with make(optimizer) as engine:
        for name, block in state:
            per = engine.store.arrays[name].per
            assert len(state[name, block]) == engine.store.layouts[block].numel // (
                GROUP if per == "group" else 1
            )
    monkeypatch.setattr("megatrain.engine.update.CHUNK_ELEMENTS", 1024)
    monkeypatch.setattr("megatrain.engine.update.CHUNK_MINIMUM", 1024)
    with make(optimizer) as serial:
        losses = []
        for batches in STEPS:
            losses.append(serial.forward_backward(batches).loss)
            serial.step()
            for block in serial.anatomy.blocks:
                serial.wait_ready(block.index)
        assert losses == expected
        assert differing(state_of(serial), state) == []
    for resident in (2, ALL):
        with make(optimizer, settings=Settings(resident=resident, head_chunk_tokens=7)) as engine:
            assert train_engine(engine, STEPS).losses == expected
            assert differing(state_of(engine), state) == []


@every_optimizer
def test_groups_and_a_late_update_follow_the_same_course(optimizer: Any) -> None:
    """Groups sum gradients in fp32, which rounds them otherwise: their losses are near, and those of a delayed update the same."""
    expected, _ = straight(optimizer)
    with delay(make(optimizer), LANES, longest_s=0.003) as engine:
        assert train_engine(engine, STEPS).losses == expected
    with make(optimizer, settings=Settings(groups=2, head_chunk_tokens=7)) as engine:
        assert train_engine(engine, STEPS).losses == pytest.approx(expected, rel=2e-2)


@every_optimizer
def test_six_steps_equal_three_and_three_after_a_resume(optimizer: Any, tmp_path: Path) -> None:
    expected, state = straight(optimizer)
    losses, again = train_with_a_break(lambda: make(optimizer), STEPS, tmp_path)
    assert losses == expected
    assert differing(state, again) == []


def test_a_checkpoint_is_of_its_moments(tmp_path: Path) -> None:
    with make(AdamW(moments="int8")) as engine:
        train_engine(engine, STEPS[:1])
        path = save_checkpoint(tmp_path, 1, engine, None, {})
    for other in (AdamW(), AdamW(moments="bfloat16"), Lion(moments="int8")):
        with make(other) as engine, pytest.raises(ConfigError, match="was saved with"):
            load_checkpoint(path, engine)


def test_lion_equals_a_plain_loop() -> None:
    """Twenty steps in float32 with clipping, decay and a schedule. Of a sum next to zero the sign is a matter of rounding."""
    config, rates = tiny_config("llama"), cosine(20, 1e-4)
    steps = [micro_batches(seed) for seed in range(20)]
    model = plain_model(config)
    named = list(model.named_parameters())
    decaying = [p for n, p in named if decays(n, tuple(p.shape))]
    others = [p for n, p in named if not decays(n, tuple(p.shape))]
    optimizer = PlainLion(decaying, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    losses = []
    for batches, lr in zip(steps, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses.append(plain_gradients(model, batches, count_targets(batches)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with engine_of(config, optimizer=Lion(weight_decay=0.1), max_grad_norm=0.5) as engine:
        ours = train_engine(engine, steps, rates)
    assert ours.losses == pytest.approx(losses, rel=1e-5)
    assert max(distance(ours.weights[name], weight.detach()) for name, weight in named) <= 1e-4

"""Every elementwise optimizer, with moments of every type, through the engine: what must not change
a bit, and plain PyTorch's result."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.memory.layout import GROUP
from megatrain.optim import AdamW, Lion, Muon, Optimizer
from megatrain.settings import Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from tests.helpers.compare import apart
from tests.helpers.plain import plain_optimizer, train_plain
from tests.helpers.runs import Trace, assert_same, cosine, run, train_engine, train_serially
from tests.helpers.runs import train_with_a_break as with_a_break
from tests.helpers.support import engine_of, full_batches, micro_batches, plain_model, tiny_config
from tests.optim.test_lion import PlainLion

OPTIMIZERS: list[Optimizer] = [
    AdamW(lr=1e-3, weight_decay=0.1, moments="bfloat16"),
    AdamW(lr=1e-3, weight_decay=0.1, moments="int8"),
    Lion(lr=1e-4, weight_decay=0.1),
    Lion(lr=1e-4, weight_decay=0.1, moments="bfloat16"),
    Lion(lr=1e-4, weight_decay=0.1, moments="int8"),
]
STEPS = [full_batches(seed, [(1, 8), (2, 5)]) for seed in range(4)]
every_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.name}-{optimizer.moments}"
)


def make(optimizer: Optimizer, **options: Any) -> Engine:
    return engine_of("qwen2-tied", optimizer=optimizer, precision="bfloat16", **options)


@cache
def straight(optimizer: Optimizer) -> Trace:
    """The run that others are compared with."""
    return run(make(optimizer), STEPS)


@pytest.mark.slow
@every_optimizer
def test_deferred_updates_residency_and_the_cut_into_pieces_change_no_bit(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = straight(optimizer)
    monkeypatch.setattr("megatrain.engine.update.CHUNK_ELEMENTS", 1024)
    monkeypatch.setattr("megatrain.engine.update.CHUNK_MINIMUM", 1024)
    with make(optimizer) as engine:
        for name, block in expected.state:
            per = GROUP if engine.store.arrays[name].per == "group" else 1
            assert len(expected.state[name, block]) == engine.store.layouts[block].numel // per
        assert_same(train_serially(engine, STEPS), expected)
    settings = Settings(resident=2, head_chunk_tokens=7)
    assert_same(run(make(optimizer, settings=settings), STEPS), expected)


@pytest.mark.slow
@every_optimizer
def test_four_steps_equal_two_and_two_after_a_resume(optimizer: Any, tmp_path: Path) -> None:
    assert_same(with_a_break(lambda: make(optimizer), STEPS, tmp_path), straight(optimizer))


def test_a_checkpoint_is_of_its_optimizer_and_moments(tmp_path: Path) -> None:
    int8, others = AdamW(moments="int8"), (AdamW(moments="bfloat16"), Lion(moments="int8"), Muon())
    for saved, refused in ((int8, (AdamW(), *others)), (Muon(), (AdamW(), int8))):
        with make(saved) as engine:
            train_engine(engine, STEPS[:1])
            path = save_checkpoint(tmp_path / saved.name, 1, engine, None, {})
        for other in refused:
            with make(other) as engine, pytest.raises(ConfigError, match="was saved with"):
                load_checkpoint(path, engine)


@pytest.mark.slow
def test_lion_equals_a_plain_loop() -> None:
    """With clipping, decay and a schedule. A sign next to zero is a matter of rounding."""
    rates, steps = cosine(10, 1e-4), [micro_batches(seed) for seed in range(10)]
    model = plain_model(tiny_config("llama"))
    plain = train_plain(model, steps, rates, [plain_optimizer(model, 1e-4, PlainLion)])
    with engine_of("llama", optimizer=Lion(weight_decay=0.1)) as engine:
        ours = train_engine(engine, steps, rates)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert apart(ours.weights, plain.weights, 1e-4, of_largest=0.0) == []

"""Moments in bfloat16: fp32 arithmetic between them, rounding that keeps their mean, chance that element and step alone decide."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.optim import AdamW
from tests.engine.test_fp8_engine import SIZES
from tests.optim.test_adamw import (
    PRECISIONS,
    Views,
    assert_same_bits,
    clone,
    master_of,
    random_grad,
    random_views,
    reference,
)
from tests.support import (
    State,
    differing,
    engine_of,
    full_batches,
    state_of,
    tiny_config,
    train_engine,
)

OPTIMIZER = AdamW(moments="bfloat16")
MOMENTS = ("exp_avg", "exp_avg_sq")


def views_of(precision: str, n: int, seed: int = 0) -> Views:
    views = random_views(precision, n, seed)
    return views | {name: views[name].bfloat16() for name in MOMENTS}


def neighbours(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 values at or below, and above, in magnitude."""
    bits = exact.view(torch.int32)
    below, above = (bits >> 16) << 16, ((bits >> 16) + 1) << 16
    return below.view(torch.float32), above.view(torch.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_those_of_the_formula_and_moments_one_of_two_neighbours(precision: str) -> None:
    n = 20_011
    views = views_of(precision, n)
    for step in range(1, 9):
        views["grad"] = random_grad(precision, n, seed=step)
        exact = clone(views) | {name: views[name].float() for name in MOMENTS}
        OPTIMIZER.update(views, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37)
        reference(OPTIMIZER, exact, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37)
        assert torch.equal(master_of(views), master_of(exact))
        for name in MOMENTS:
            below, above = neighbours(exact[name])
            found = views[name].float()
            assert torch.all((found == below) | (found == above) & (below != exact[name])), name


def test_rounding_keeps_the_mean_where_the_nearest_would_stand_still() -> None:
    """A second moment without gradients falls by a thousandth a step: after 700 steps to half. To the nearest it would not fall at all."""
    n = 4096
    views = views_of("float32", n)
    views |= {
        "exp_avg": torch.zeros(n).bfloat16(),
        "exp_avg_sq": torch.ones(n).bfloat16(),
        "grad": torch.zeros(n),
    }
    assert torch.equal((views["exp_avg_sq"].float() * 0.999).bfloat16(), views["exp_avg_sq"])
    for step in range(1, 694):
        OPTIMIZER.update(views, lr=0.0, weight_decay=0.0, step=step, grad_scale=1.0)
    found = views["exp_avg_sq"].float()
    assert float(found.mean()) == pytest.approx(0.999**693, rel=0.01)
    assert 0.01 < float(found.std()) < 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_cut_into_ranges_gives_the_same_bits_and_another_place_others(precision: str) -> None:
    n = 9001
    whole = views_of(precision, n)
    cut, elsewhere = clone(whole), clone(whole)
    OPTIMIZER.update(whole, lr=1e-3, weight_decay=0.1, step=2, grad_scale=0.7, first=5_000_000_000)
    for start, stop in pairwise([0, 1, 2, 19, 1024, 5000, n]):
        part = {key: view[start:stop] for key, view in cut.items()}
        OPTIMIZER.update(
            part, lr=1e-3, weight_decay=0.1, step=2, grad_scale=0.7, first=5_000_000_000 + start
        )
    assert_same_bits(cut, whole)
    OPTIMIZER.update(elsewhere, lr=1e-3, weight_decay=0.1, step=2, grad_scale=0.7)
    changed = (elsewhere["exp_avg_sq"] != whole["exp_avg_sq"]).float().mean()
    assert 0.2 < float(changed) < 0.6
    assert torch.equal(elsewhere["weight"], whole["weight"])


def test_each_step_has_chances_of_its_own() -> None:
    def rounded(step: int) -> Tensor:
        views = views_of("float32", 4096)
        OPTIMIZER.update(views, lr=0.0, weight_decay=0.0, step=step, grad_scale=0.0)
        return views["exp_avg_sq"]

    assert torch.equal(rounded(3), rounded(3))
    assert 0.1 < float((rounded(3) != rounded(4)).float().mean()) < 0.6


def test_an_engine_keeps_ten_bytes_a_parameter_and_learns_as_with_fp32_moments() -> None:
    config, steps = tiny_config("llama", **SIZES), [full_batches(0)] * 40
    losses = []
    for moments in ("float32", "bfloat16"):
        with engine_of(
            config, precision="bfloat16", optimizer=AdamW(lr=3e-3, moments=moments)
        ) as engine:
            arrays = sum(engine.store.array(name, 0).element_size() for name in engine.store.arrays)
            assert arrays == {"float32": 14, "bfloat16": 10}[moments]
            losses.append(train_engine(engine, steps).losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.02)
    assert losses[1] != losses[0]


def test_threads_and_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [full_batches(seed) for seed in range(3)]

    def run() -> State:
        with engine_of(
            tiny_config("llama", **SIZES), precision="bfloat16", optimizer=OPTIMIZER
        ) as engine:
            train_engine(engine, steps)
            return state_of(engine)

    whole = run()
    monkeypatch.setattr("megatrain.engine.update.CHUNK_ELEMENTS", 256)
    assert differing(run(), whole) == []


def test_other_types_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.moments: 'float16' is none of float32, bfloat16, int8"
    ):
        AdamW(moments="float16")

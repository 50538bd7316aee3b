"""Moments in bfloat16: fp32 arithmetic between them, stochastic rounding that keeps their mean,
with seeds that element and step alone decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.optim import AdamW, Lion
from tests.optim import test_adamw, test_lion
from tests.optim.arrays import (
    PLAIN,
    PRECISIONS,
    Views,
    assert_neighbours,
    clone,
    master_of,
    random_grad,
    random_views,
)

OPTIMIZER = AdamW(moments="bfloat16")
MOMENTS = ("exp_avg", "exp_avg_sq")


def views_of(precision: str, n: int) -> Views:
    views = random_views(precision, n)
    return views | {name: views[name].bfloat16() for name in MOMENTS}


@PRECISIONS
@pytest.mark.parametrize(
    ("kind", "reference", "names"),
    [(AdamW, test_adamw.reference, MOMENTS), (Lion, test_lion.reference, MOMENTS[:1])],
)
def test_weights_are_those_of_the_formula_and_moments_one_of_two_neighbours(
    precision: str, kind: Any, reference: Any, names: tuple[str, ...]
) -> None:
    n, optimizer = 20_011, kind(moments="bfloat16")
    views = views_of(precision, n)
    for step in range(1, 9):
        views["grad"] = random_grad(precision, n, seed=step)
        exact = clone(views) | {name: views[name].float() for name in names}
        optimizer.update(views, step=step, **PLAIN)
        reference(optimizer, exact, step=step, **PLAIN)
        assert torch.equal(master_of(views), master_of(exact))
        for name in names:
            assert_neighbours(views[name].float(), exact[name])


def test_rounding_keeps_the_mean_where_the_nearest_would_stand_still() -> None:
    """Without gradients a second moment falls by a thousandth a step: after 700 steps to half."""
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


def test_each_step_has_seeds_of_its_own() -> None:
    def rounded(step: int) -> Tensor:
        views = views_of("float32", 4096)
        OPTIMIZER.update(views, lr=0.0, weight_decay=0.0, step=step, grad_scale=0.0)
        return views["exp_avg_sq"]

    assert torch.equal(rounded(3), rounded(3))
    assert 0.1 < float((rounded(3) != rounded(4)).float().mean()) < 0.6

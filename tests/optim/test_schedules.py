"""Schedules are transformers' where it has them, and plain arithmetic everywhere."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from transformers import optimization

from megatrain.errors import ConfigError
from megatrain.optim.schedules import SCHEDULES, warmup_steps

BASE, TOTAL = 3e-4, 40


def rates(
    name: str,
    *,
    total_steps: int = TOTAL,
    warmup: int = 0,
    min_ratio: float = 0.0,
    decay_share: float = 0.25,
) -> list[float]:
    rate = partial(
        SCHEDULES[name],
        base=BASE,
        total_steps=total_steps,
        warmup_steps=warmup,
        min_ratio=min_ratio,
        decay_share=decay_share,
    )
    return [rate(step) for step in range(total_steps + 3)]


def rates_of_transformers(schedule) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(TOTAL + 3):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, TOTAL, TOTAL + 10])
def test_schedules_equal_those_of_transformers(warmup):
    """But for the warm-up, which is theirs a step sooner: they begin with a step of rate 0."""
    of = partial(partial, num_warmup_steps=warmup)
    theirs = {
        "constant": of(optimization.get_constant_schedule_with_warmup),
        "linear": of(optimization.get_linear_schedule_with_warmup, num_training_steps=TOTAL),
        "cosine": of(optimization.get_cosine_schedule_with_warmup, num_training_steps=TOTAL),
    }
    for name, schedule in theirs.items():
        expected = rates_of_transformers(schedule)[:TOTAL]
        same = partial(pytest.approx, rel=1e-12, abs=1e-18)
        ramp = [BASE * step / warmup for step in range(1, min(warmup, TOTAL) + 1)]
        assert rates(name, warmup=warmup)[:TOTAL] == same(ramp + expected[len(ramp) :]), name


def test_wsd_equals_that_of_transformers_with_linear_decay():
    schedule = partial(
        optimization.get_wsd_schedule,
        num_warmup_steps=5,
        num_training_steps=TOTAL,
        num_decay_steps=10,
        decay_type="linear",
    )
    expected = rates_of_transformers(schedule)[5:]
    assert rates("wsd", warmup=5)[5:] == pytest.approx(expected, rel=1e-12)


def test_a_floor_and_the_shortest_runs():
    assert rates("wsd", warmup=4, min_ratio=0.2)[40:] == pytest.approx([BASE * 0.2] * 3)
    assert rates("cosine", min_ratio=0.1)[20] == pytest.approx(BASE * 0.55)
    for name, steps, warmup in product(SCHEDULES, [0, 1, 2], [0, 1, 5]):
        found = rates(name, total_steps=steps, warmup=warmup, decay_share=1.0)
        assert all(0 <= rate <= BASE for rate in found)


def test_warm_up_below_one_is_a_share():
    shares = [(0, 100, 0), (0.03, 20, 1), (0.5, 7, 4), (1, 100, 1), (10.0, 100, 10)]
    for warmup, total, steps in shares:
        assert warmup_steps(warmup, total) == steps
    for refused in [-0.1, -3, 2.5, float("nan"), float("inf")]:
        with pytest.raises(ConfigError, match=r"train\.warmup"):
            warmup_steps(refused, 100)

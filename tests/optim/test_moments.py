"""Moments in few bits: fp32 arithmetic between them, and stochastic rounding that keeps their mean,
with seeds that element and step alone decide; no second moment of 8 bits is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.memory.layout import GROUP
from megatrain.optim import AdamW, Lion
from tests.optim.arrays import (
    PLAIN,
    PRECISIONS,
    REFERENCES,
    Views,
    clone,
    master_of,
    new_views,
    random_grad,
)

NAMES = ("exp_avg", "exp_avg_sq")
OPTIMIZER = AdamW(moments="int8")
N = 300 * GROUP
NARROW = pytest.mark.parametrize("moments", ["bfloat16", "int8"])


def values(views: Views, name: str) -> Tensor:
    """What moments mean: of 8 bits by the format's definition and without its bits.

    c + a is 1 to 15 eighths of a power of two.
    """
    if views[name].dtype == torch.bfloat16:
        return views[name].float()
    codes, exponents = views[name].int(), views[f"{name}_scale"].repeat_interleave(GROUP).double()
    signed = name == "exp_avg"
    magnitudes = codes % 128 if signed else codes
    power, eighths = magnitudes // 8 + exponents, (magnitudes % 8).double() / 8
    sum_with_c = torch.where(power > 0, 2.0 ** (power - 127) * (1 + eighths), 2.0**-126 * eighths)
    found = (sum_with_c - torch.where(exponents > 0, 2.0 ** (exponents - 127), 0.0)).float()
    return torch.where(codes >= 128, -found, found) if signed else found


def step_of(views: Views, name: str, at: Tensor) -> Tensor:
    """The distance of neighbouring moments at a value."""
    if views[name].dtype == torch.bfloat16:
        return 2.0 ** (torch.floor(torch.log2(at.abs().double())) - 7)
    c = (2.0 ** (views[f"{name}_scale"].double() - 127)).repeat_interleave(GROUP)
    return 2.0 ** torch.floor(torch.log2(at.abs().double() + c)) / 8


@PRECISIONS
@NARROW
@pytest.mark.parametrize("kind", [AdamW, Lion])
def test_weights_are_those_of_the_formula_and_moments_next_to_it(
    precision: str, moments: str, kind: Any
) -> None:
    optimizer = kind(moments=moments)
    names = [name for name in NAMES if name in optimizer.moment_names]
    views = new_views(optimizer, precision, N)
    for step in range(1, 9):
        views["grad"] = random_grad(precision, N, seed=step)
        exact = clone(views) | {name: values(views, name) for name in names}
        optimizer.update(views, step=step, **PLAIN)
        REFERENCES[kind](optimizer, exact, step=step, **PLAIN)
        assert torch.equal(master_of(views), master_of(exact))
        for name in names:
            apart, size = (values(views, name) - exact[name]).abs(), exact[name].abs()
            rounding = 1.001 * step_of(views, name, exact[name])
            assert torch.all(apart <= rounding.clamp(min=2.0**-133)), (name, step)
            largest = size.view(-1, GROUP).amax(1).repeat_interleave(GROUP)
            assert torch.all(apart <= size / 8 + largest / 2**17)


@pytest.mark.parametrize(("name", "binades"), [("exp_avg", 15), ("exp_avg_sq", 31)])
def test_a_scale_is_that_of_the_largest_and_a_lone_element_keeps_its_moments(
    name: str, binades: int
) -> None:
    """Beside zeros, and at every magnitude of gradients: three bits of mantissa."""
    views = new_views(OPTIMIZER, "float32", 130 * GROUP)
    grads = torch.zeros(130, GROUP)
    grads[:, 5] = 10.0 ** torch.linspace(-15, 15, 130)
    views["grad"] = grads.flatten()
    OPTIMIZER.update(views, lr=1e-3, weight_decay=0.0, step=1, grad_scale=1.0)
    g = grads[:, 5].double()
    exact = 0.1 * g if name == "exp_avg" else 0.001 * g**2
    found = values(views, name).view(-1, GROUP)
    assert torch.all((found[:, 5] / exact - 1).abs() <= 1 / 8)
    assert torch.count_nonzero(found) == 130
    scale = views[f"{name}_scale"]
    above = scale.double() - 127 + binades - torch.floor(torch.log2(exact))
    assert torch.all((above == 0) | (above == 1) | (scale == 0))


@NARROW
def test_rounding_keeps_the_mean_of_both_moments(moments: str) -> None:
    """Without gradients they fall by a thousandth a step, which the nearest would not see."""
    optimizer = AdamW(betas=(0.999, 0.999), moments=moments)
    views = new_views(optimizer, "float32", 256 * GROUP)
    views["grad"] = torch.full((256 * GROUP,), -3.0)
    optimizer.update(views, lr=0.0, weight_decay=0.0, step=1, grad_scale=1.0)
    views["grad"].zero_()
    before = {name: float(values(views, name).mean()) for name in NAMES}
    for step in range(2, 695):
        optimizer.update(views, lr=0.0, weight_decay=0.0, step=step, grad_scale=1.0)
    for name in NAMES:
        found = values(views, name)
        assert float(found.mean()) / before[name] == pytest.approx(0.999**693, rel=0.02), name
        assert 0.01 < float(found.std() / found.mean().abs()) < 0.5


def test_each_step_has_seeds_of_its_own() -> None:
    def rounded(step: int) -> Tensor:
        views = new_views(AdamW(moments="bfloat16"), "float32", N)
        views["exp_avg_sq"] = torch.linspace(1e-6, 1e-5, N).bfloat16()
        options = {"lr": 0.0, "weight_decay": 0.0, "grad_scale": 0.0}
        AdamW(moments="bfloat16").update(views, step=step, **options)  # type: ignore[arg-type]
        return views["exp_avg_sq"]

    assert torch.equal(rounded(3), rounded(3))
    assert 0.1 < float((rounded(3) != rounded(4)).float().mean()) < 0.6


def test_a_second_moment_above_zero_is_never_lost() -> None:
    """Beside a gradient a million times larger: the first must not outlive it."""
    optimizer = AdamW(eps=1e-15, moments="int8")
    views = new_views(optimizer, "float32", 64 * GROUP)
    for step in range(1, 200):
        grad = torch.full((64, GROUP), 1e-8)
        grad[:, 0] = 10.0
        views["grad"] = grad.flatten()
        before = views["weight"].clone()
        optimizer.update(views, lr=1e-3, weight_decay=0.0, step=step, grad_scale=1.0)
        assert views["exp_avg_sq"].min() >= 1
        moved = float((views["weight"] - before).abs().max())
        assert moved <= 1.5e-3  # Adam's 1e-3, and the rounding's noise
    found = values(views, "exp_avg_sq")
    assert torch.all(found[1:GROUP] <= 2 * found[0] / 2**34 * 8)


def test_a_range_that_cuts_a_group_is_a_mistake() -> None:
    views = new_views(OPTIMIZER, "float32", N)
    update = OPTIMIZER.updating(views, lr=1e-3, weight_decay=0.0, step=1, grad_scale=1.0)
    with pytest.raises(AssertionError, match="32"):
        update(32, 128)

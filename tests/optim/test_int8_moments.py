"""Moments in 8 bits: fp32 arithmetic between codes, codes next to what they stand for, and no second moment that is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.memory.layout import GROUP
from megatrain.optim import AdamW, Lion, Optimizer
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
from tests.support import engine_of, full_batches, tiny_config, train_engine

OPTIMIZER = AdamW(moments="int8")
NAMES = ("exp_avg", "exp_avg_sq")
N = 300 * GROUP


def new_views(optimizer: Optimizer, precision: str, n: int = N, seed: int = 0) -> Views:
    """Weights, a first gradient, and the optimizer's state before its first update."""
    views = {
        name: view for name, view in random_views(precision, n, seed).items() if name not in NAMES
    }
    return views | {
        s.name: torch.zeros(n // (GROUP if s.per == "group" else 1), dtype=s.dtype)
        for s in optimizer.state_arrays
    }


def values(views: Views, name: str) -> Tensor:
    """What codes and scales mean, by the format's definition and without its bits: c + a is 1 to 15 eighths of a power of two."""
    codes, exponents = views[name].int(), views[f"{name}_scale"].repeat_interleave(GROUP).double()
    signed = name == "exp_avg"
    magnitudes = codes % 128 if signed else codes
    power, eighths = magnitudes // 8 + exponents, (magnitudes % 8).double() / 8
    sum_with_c = torch.where(power > 0, 2.0 ** (power - 127) * (1 + eighths), 2.0**-126 * eighths)
    found = (sum_with_c - torch.where(exponents > 0, 2.0 ** (exponents - 127), 0.0)).float()
    return torch.where(codes >= 128, -found, found) if signed else found


def step_of(views: Views, name: str, at: Tensor) -> Tensor:
    """The distance of neighbouring codes at a value."""
    c = (2.0 ** (views[f"{name}_scale"].double() - 127)).repeat_interleave(GROUP)
    return 2.0 ** torch.floor(torch.log2(at.abs().double() + c)) / 8


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_those_of_the_formula_and_moments_within_a_step(precision: str) -> None:
    views = new_views(OPTIMIZER, precision)
    for step in range(1, 9):
        views["grad"] = random_grad(precision, N, seed=step)
        exact = clone(views) | {name: values(views, name) for name in NAMES}
        OPTIMIZER.update(views, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37)
        reference(OPTIMIZER, exact, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37)
        assert torch.equal(master_of(views), master_of(exact))
        for name in NAMES:
            apart = (values(views, name) - exact[name]).abs()
            assert torch.all(apart <= 1.001 * step_of(views, name, exact[name])), (name, step)
            assert torch.all(
                apart
                <= exact[name].abs() / 8
                + exact[name].abs().view(-1, GROUP).amax(1).repeat_interleave(GROUP) / 2**17
            )


@pytest.mark.parametrize(("name", "binades"), [("exp_avg", 15), ("exp_avg_sq", 31)])
def test_a_scale_is_that_of_the_largest_and_a_lone_element_keeps_its_moments(
    name: str, binades: int
) -> None:
    """Beside zeros, and at every magnitude that a gradient may have: three bits of mantissa, and no code beyond the last."""
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
    exponents, largest = (
        views[f"{name}_scale"].double() - 127 + binades,
        torch.floor(torch.log2(exact)),
    )
    assert torch.all(
        (exponents == largest) | (exponents == largest + 1) | (views[f"{name}_scale"] == 0)
    )


def test_rounding_keeps_the_mean_of_both_moments() -> None:
    """Without gradients the second moment falls by a thousandth a step, which the nearest code would never see."""
    optimizer = AdamW(betas=(0.999, 0.999), moments="int8")
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
        assert 0.05 < float(found.std() / found.mean().abs()) < 0.5


def test_a_second_moment_above_zero_is_never_lost() -> None:
    """An element whose gradient is a millionth of its neighbour's: its first moment may outlive what it is divided by, and must not."""
    optimizer = AdamW(eps=1e-15, moments="int8")
    views = new_views(optimizer, "float32", 64 * GROUP)
    for step in range(1, 200):
        grad = torch.full((64, GROUP), 1e-8)
        grad[:, 0] = 10.0
        views["grad"] = grad.flatten()
        before = views["weight"].clone()
        optimizer.update(views, lr=1e-3, weight_decay=0.0, step=step, grad_scale=1.0)
        assert views["exp_avg_sq"].min() >= 1
        assert (
            float((views["weight"] - before).abs().max()) <= 1.5e-3
        )  # Adam's 1e-3, and the rounding's noise
    assert torch.all(
        values(views, "exp_avg_sq")[1:GROUP] <= 2 * values(views, "exp_avg_sq")[0] / 2**34 * 8
    )


@pytest.mark.parametrize("spread", [1e-3, 1e-6])
def test_steps_stay_near_those_of_fp32_moments_where_a_group_s_scales_differ(spread: float) -> None:
    """Gradients whose size grows from the first element of a group to the last by so much: the update is Adam's all the same."""
    sizes = torch.logspace(float(torch.log10(torch.tensor(spread))), 0, GROUP).repeat(N // GROUP)
    runs = []
    for optimizer in (AdamW(eps=1e-15), AdamW(eps=1e-15, moments="int8")):
        views, generator = new_views(optimizer, "float32"), torch.Generator().manual_seed(1)
        before = views["weight"].clone()
        for step in range(1, 101):
            views["grad"] = sizes * (torch.randn(N, generator=generator) + 0.5)
            optimizer.update(views, lr=1e-3, weight_decay=0.0, step=step, grad_scale=1.0)
        runs.append((views["weight"] - before).view(-1, GROUP))
    exact, found = runs
    # the smallest elements take smaller steps where their second moment is below what the group resolves, never larger ones
    assert torch.all(found.abs().mean(0) <= 1.1 * exact.abs().mean(0))
    resolved = slice(None) if spread == 1e-3 else slice(GROUP // 2, None)
    assert float((found - exact)[:, resolved].norm() / exact[:, resolved].norm()) < 0.15


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [AdamW, Lion])
def test_any_cut_into_groups_gives_the_same_bits_and_another_place_others(
    kind: type[AdamW] | type[Lion], precision: str
) -> None:
    optimizer = kind(moments="int8")
    whole = new_views(optimizer, precision)
    optimizer.update(whole, lr=1e-3, weight_decay=0.1, step=1, grad_scale=0.7)
    cut, elsewhere = clone(whole), clone(whole)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "step": 2, "grad_scale": 0.7}
    optimizer.update(whole, **options, first=5_000_000_000)
    for start, stop in pairwise(GROUP * edge for edge in (0, 1, 2, 19, 64, 299, 300)):
        grouped = {s.name for s in optimizer.state_arrays if s.per == "group"}
        part = {
            k: v[start // GROUP : stop // GROUP] if k in grouped else v[start:stop]
            for k, v in cut.items()
        }
        optimizer.update(part, **options, first=5_000_000_000 + start)
    assert_same_bits(cut, whole)
    optimizer.update(elsewhere, **options)
    assert 0.05 < float((elsewhere["exp_avg"] != whole["exp_avg"]).float().mean()) < 0.6
    assert torch.equal(elsewhere["weight"], whole["weight"])


@pytest.mark.parametrize(
    "optimizer", [OPTIMIZER, Lion(moments="int8")], ids=lambda optimizer: optimizer.name
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padding_stays_zero_within_a_group_and_beyond(optimizer: Any, precision: str) -> None:
    views = new_views(optimizer, precision, 32 * GROUP)
    for step in (1, 2, 100_000):
        views["grad"] = random_grad(precision, 32 * GROUP, step)
        for name, view in views.items():
            view[1000 if len(view) > 32 else 16 :] = (
                0
                if name in ("weight", "remainder", "grad")
                else view[1000 if len(view) > 32 else 16 :]
            )
        optimizer.update(views, lr=1e-2, weight_decay=0.1, step=step, grad_scale=0.5)
    for name, view in views.items():
        assert not view[16 if len(view) == 32 else 1000 :].any(), name


def test_a_range_that_cuts_a_group_is_a_mistake() -> None:
    views = new_views(OPTIMIZER, "float32")
    update = OPTIMIZER.updating(views, lr=1e-3, weight_decay=0.0, step=1, grad_scale=1.0)
    with pytest.raises(AssertionError, match="32"):
        update(32, 128)


def test_an_engine_keeps_eight_bytes_a_parameter_and_learns_as_with_fp32_moments() -> None:
    config, steps = tiny_config("llama", **SIZES), [full_batches(0)] * 40
    losses = []
    for moments in ("float32", "int8"):
        with engine_of(
            config, precision="bfloat16", optimizer=AdamW(lr=3e-3, moments=moments)
        ) as engine:
            nbytes = (
                sum(engine.store.array(name, 0).nbytes for name in engine.store.arrays)
                / engine.store.layouts[0].numel
            )
            assert nbytes == {"float32": 14, "int8": 8 + 2 / GROUP}[moments]
            losses.append(train_engine(engine, steps).losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.1, abs=0.03)
    assert losses[1] != losses[0]

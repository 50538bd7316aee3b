"""Lion against plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.optim import Lion
from megatrain.optim.split import split_master
from tests.engine.test_fp8_engine import SIZES
from tests.optim.test_adamw import (
    PRECISIONS,
    Views,
    assert_same_bits,
    clone,
    fma,
    master_of,
    random_grad,
    random_views,
)
from tests.optim.test_bf16_moments import neighbours
from tests.support import engine_of, full_batches, tiny_config, train_engine


def views_of(precision: str, n: int) -> Views:
    return {name: view for name, view in random_views(precision, n).items() if name != "exp_avg_sq"}


def reference(
    optimizer: Lion, views: Views, *, lr: float, weight_decay: float, grad_scale: float
) -> None:
    """The paper's update in torch, every operation on its own but for the additions with a factor, which are rounded once."""
    b1, b2, c1, c2, scale, decay = (
        torch.tensor(value, dtype=torch.float32)
        for value in (
            *optimizer.betas,
            *(1 - beta for beta in optimizer.betas),
            grad_scale,
            1 - lr * weight_decay,
        )
    )
    m, g = views["exp_avg"], views["grad"].float() * scale
    updated = master_of(views) * decay + torch.tensor(-lr, dtype=torch.float32) * torch.sign(
        fma(c1, g, m * b1)
    )
    m.copy_(fma(c2, g, m * b2))
    if "remainder" in views:
        split_master(updated, out=(views["weight"], views["remainder"]))
    else:
        views["weight"].copy_(updated)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("optimizer", "weight_decay", "grad_scale"),
    [
        (Lion(), 0.0, 1.0),
        (Lion(betas=(0.95, 0.98)), 0.1, 0.37),
        (Lion(betas=(0.0, 0.0)), 0.01, 1e-3),
    ],
)
def test_updates_equal_the_formula_bit_for_bit(
    precision: str, optimizer: Lion, weight_decay: float, grad_scale: float
) -> None:
    n = 20_011
    views = views_of(precision, n)
    expected = clone(views)
    for step in range(1, 13):
        lr = 1e-3 / step
        views["grad"] = expected["grad"] = random_grad(precision, n, seed=step)
        optimizer.update(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale)
        reference(optimizer, expected, lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)
        assert_same_bits(views, expected)


class PlainLion(torch.optim.Optimizer):
    """As anybody would write it."""

    def __init__(
        self, parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                m: Tensor = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_((m * beta1).add_(parameter.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fifty_updates_follow_plain_pytorch(precision: str) -> None:
    n = 1 << 14
    views = views_of(precision, n)
    views["exp_avg"].zero_()
    before = master_of(views).double()
    parameter = master_of(views).clone().requires_grad_()
    theirs = PlainLion([parameter], lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 51):
        views["grad"] = random_grad(precision, n, seed=step)
        parameter.grad = views["grad"].float()
        theirs.step()
        Lion().update(views, lr=1e-4, weight_decay=0.1, step=step, grad_scale=1.0)
    torch.testing.assert_close(
        views["exp_avg"], theirs.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-12
    )
    expected = parameter.detach().double() - before
    assert (
        master_of(views).double() - before - expected
    ).norm() / expected.norm() <= 1e-3  # a sign may differ where the sum is next to 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_moment_in_bfloat16_is_one_of_two_neighbours(precision: str) -> None:
    n = 20_011
    views = views_of(precision, n)
    views["exp_avg"] = views["exp_avg"].bfloat16()
    optimizer = Lion(moments="bfloat16")
    for step in range(1, 9):
        views["grad"] = random_grad(precision, n, seed=step)
        exact = clone(views) | {"exp_avg": views["exp_avg"].float()}
        optimizer.update(views, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37)
        reference(optimizer, exact, lr=1e-3, weight_decay=0.1, grad_scale=0.37)
        assert torch.equal(master_of(views), master_of(exact))
        below, above = neighbours(exact["exp_avg"])
        found = views["exp_avg"].float()
        assert torch.all((found == below) | (found == above) & (below != exact["exp_avg"]))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_an_engine_learns(moments: str) -> None:
    config, steps = tiny_config("llama", **SIZES), [full_batches(0)] * 40
    with engine_of(
        config, precision="bfloat16", optimizer=Lion(lr=1e-3, moments=moments)
    ) as engine:
        losses = train_engine(engine, steps).losses
    assert losses[-1] < 0.2 * losses[0]


def test_values_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.betas\[1\]: 1.0 .* below 1"):
        Lion(betas=(0.9, 1.0))
    with pytest.raises(
        ConfigError, match=r"optimizer\.moments: 'int4' is none of float32, bfloat16, int8"
    ):
        Lion(moments="int4")

"""Lion against plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.optim import Lion
from tests.helpers.compare import differing, distance
from tests.optim.arrays import (
    PRECISIONS,
    Views,
    clone,
    f32,
    fma,
    master_of,
    random_grad,
    random_views,
    write_master,
)


def views_of(precision: str, n: int) -> Views:
    views = random_views(precision, n)
    del views["exp_avg_sq"]
    return views


def reference(
    optimizer: Lion,
    views: Views,
    *,
    lr: float,
    weight_decay: float,
    grad_scale: float,
    step: int = 1,
) -> None:
    """The paper's update in torch, every operation on its own, but multiply-adds rounded once."""
    (b1, b2), m, g = optimizer.betas, views["exp_avg"], views["grad"].float() * f32(grad_scale)
    direction = torch.sign(fma(f32(1 - b1), g, m * f32(b1)))
    write_master(views, master_of(views) * f32(1 - lr * weight_decay) + f32(-lr) * direction)
    m.copy_(fma(f32(1 - b2), g, m * f32(b2)))


@PRECISIONS
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
    options: dict[str, Any] = {"weight_decay": weight_decay, "grad_scale": grad_scale}
    for step in range(1, 13):
        views["grad"] = expected["grad"] = random_grad(precision, n, seed=step)
        optimizer.update(views, lr=1e-3 / step, step=step, **options)
        reference(optimizer, expected, lr=1e-3 / step, **options)
        assert differing(views, expected) == []


class PlainLion(torch.optim.Optimizer):
    """As anybody would write it."""

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
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


@PRECISIONS
def test_fifty_updates_follow_plain_pytorch(precision: str) -> None:
    n = 1 << 14
    views = views_of(precision, n)
    views["exp_avg"].zero_()
    before = master_of(views).double()
    parameter = master_of(views).clone().requires_grad_()
    theirs = PlainLion([parameter], lr=1e-4, weight_decay=0.1)
    for step in range(1, 51):
        views["grad"] = random_grad(precision, n, seed=step)
        parameter.grad = views["grad"].float()
        theirs.step()
        Lion().update(views, lr=1e-4, weight_decay=0.1, step=step, grad_scale=1.0)
    moment = theirs.state[parameter]["exp_avg"]
    torch.testing.assert_close(views["exp_avg"], moment, rtol=1e-5, atol=1e-12)
    # a sign may differ where the sum is next to 0
    assert distance(master_of(views).double() - before, parameter.double() - before) <= 1e-3

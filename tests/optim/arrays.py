"""A range of a block as an optimizer sees it: weights, state and gradient; and the optimizers in
torch, with exact arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.memory.layout import GROUP
from megatrain.optim import AdamW, Lion, Optimizer
from megatrain.optim.split import join_master, split_master

Views = dict[str, Tensor]
PRECISIONS = pytest.mark.parametrize("precision", ["bfloat16", "float32"])
PLAIN: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "grad_scale": 0.37}


def random_grad(precision: str, n: int, seed: int) -> Tensor:
    """Gradients over many magnitudes, exact zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(n, generator=generator)
    grad *= 10.0 ** torch.randint(-9, 0, (n,), generator=generator)
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, 1e4, -1e4])
    grad[: len(special)] = special[: len(grad)]
    return grad.to(getattr(torch, precision))


def random_views(precision: str, n: int, seed: int = 0) -> Views:
    """Weights of a trained model's size, fp32 moments of some updates, and a first gradient."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(n, generator=generator) * 0.02
    views = {"weight": master}
    if precision == "bfloat16":
        views["weight"], views["remainder"] = split_master(master)
    views["exp_avg"] = torch.randn(n, generator=generator) * 1e-3
    views["exp_avg_sq"] = torch.rand(n, generator=generator) * 1e-6
    views["grad"] = random_grad(precision, n, seed + 1)
    return views


def new_views(optimizer: Optimizer, precision: str, n: int, seed: int = 0) -> Views:
    """Weights, a first gradient, and the optimizer's state before its first update."""
    views = random_views(precision, n, seed)
    del views["exp_avg"], views["exp_avg_sq"]
    for array in optimizer.state_arrays:
        views[array.name] = torch.zeros(n // per(optimizer, array.name), dtype=array.dtype)
    return views


def per(optimizer: Optimizer, name: str) -> int:
    """Elements of the block for each of this array."""
    grouped = {array.name for array in optimizer.state_arrays if array.per == "group"}
    return GROUP if name in grouped else 1


def clone(views: Views) -> Views:
    return {name: view.clone() for name, view in views.items()}


def master_of(views: Views) -> Tensor:
    if "remainder" in views:
        return join_master(views["weight"], views["remainder"])
    return views["weight"]


def write_master(views: Views, master: Tensor) -> None:
    if "remainder" in views:
        split_master(master, out=(views["weight"], views["remainder"]))
    else:
        views["weight"].copy_(master)


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once: the product of two float32 is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def sqrt(x: Tensor) -> Tensor:
    """The nearest float32, which torch's float32 sqrt (MKL's) does not always give."""
    return x.double().sqrt().float()


def adamw(
    optimizer: AdamW, views: Views, *, lr: float, weight_decay: float, step: int, grad_scale: float
) -> None:
    """AdamW in torch, every operation on its own, in the order of torch.optim.AdamW."""
    beta1, beta2 = optimizer.betas
    m, v, g = views["exp_avg"], views["exp_avg_sq"], views["grad"].float() * f32(grad_scale)
    decayed = master_of(views) * f32(1 - lr * weight_decay)
    m.copy_(fma(g - m, f32(1 - beta1), m))
    v.copy_(fma(f32(1 - beta2) * g, g, v * f32(beta2)))
    denominator = sqrt(v) / f32((1 - beta2**step) ** 0.5) + f32(optimizer.eps)
    write_master(views, decayed + (f32(-lr / (1 - beta1**step)) * m) / denominator)


def lion(
    optimizer: Lion, views: Views, *, lr: float, weight_decay: float, step: int, grad_scale: float
) -> None:
    """The paper's update in torch, every operation on its own, but multiply-adds rounded once."""
    (b1, b2), m, g = optimizer.betas, views["exp_avg"], views["grad"].float() * f32(grad_scale)
    direction = torch.sign(fma(f32(1 - b1), g, m * f32(b1)))
    write_master(views, master_of(views) * f32(1 - lr * weight_decay) + f32(-lr) * direction)
    m.copy_(fma(f32(1 - b2), g, m * f32(b2)))


REFERENCES: dict[type, Any] = {AdamW: adamw, Lion: lion}

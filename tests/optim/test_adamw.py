"""The update kernels against their formula in torch (bit for bit) and against torch.optim.AdamW."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.optim import OPTIMIZERS, AdamW, WholeTensors
from megatrain.optim.split import join_master, split_master

OF_RANGES: dict[str, Any] = {
    name: kind for name, kind in OPTIMIZERS.items() if not issubclass(kind, WholeTensors)
}
PRECISIONS = ("bfloat16", "float32")
Views = dict[str, Tensor]


def random_views(precision: str, n: int, seed: int = 0) -> Views:
    """Weights of a trained model's size, moments of some updates, and a first gradient."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(n, generator=generator) * 0.02
    views = {"weight": master}
    if precision == "bfloat16":
        views["weight"], views["remainder"] = split_master(master)
    views["exp_avg"] = torch.randn(n, generator=generator) * 1e-3
    views["exp_avg_sq"] = torch.rand(n, generator=generator) * 1e-6
    views["grad"] = random_grad(precision, n, seed + 1)
    return views


def random_grad(precision: str, n: int, seed: int) -> Tensor:
    """Gradients over many magnitudes, exact zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(n, generator=generator) * 10.0 ** torch.randint(
        -9, 0, (n,), generator=generator
    )
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, 1e4, -1e4])
    grad[: len(special)] = special[: len(grad)]
    return grad.to(getattr(torch, precision))


def clone(views: Views) -> Views:
    return {name: view.clone() for name, view in views.items()}


def master_of(views: Views) -> Tensor:
    return (
        join_master(views["weight"], views["remainder"])
        if "remainder" in views
        else views["weight"]
    )


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once, as torch.lerp does inside: the product of two float32 is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def sqrt(x: Tensor) -> Tensor:
    """The nearest float32 to the root, which torch's float32 sqrt (MKL's) does not always give."""
    return x.double().sqrt().float()


def reference(
    optimizer: AdamW, views: Views, *, lr: float, weight_decay: float, step: int, grad_scale: float
) -> None:
    """AdamW in torch, every operation on its own, in the order of torch.optim.AdamW."""
    f32 = torch.float32
    beta1, beta2 = optimizer.betas
    master, m, v = master_of(views), views["exp_avg"], views["exp_avg_sq"]
    g = views["grad"].float() * torch.tensor(grad_scale, dtype=f32)
    decayed = master * torch.tensor(1 - lr * weight_decay, dtype=f32)
    m.copy_(fma(g - m, torch.tensor(1 - beta1, dtype=f32), m))
    v.copy_(fma(torch.tensor(1 - beta2, dtype=f32) * g, g, v * torch.tensor(beta2, dtype=f32)))
    denominator = sqrt(v) / torch.tensor((1 - beta2**step) ** 0.5, dtype=f32) + torch.tensor(
        optimizer.eps, dtype=f32
    )
    updated = decayed + (torch.tensor(-lr / (1 - beta1**step), dtype=f32) * m) / denominator
    if "remainder" in views:
        split_master(updated, out=(views["weight"], views["remainder"]))
    else:
        views["weight"].copy_(updated)


def assert_same_bits(views: Views, expected: Views) -> None:
    for name, view in views.items():
        as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
        assert torch.equal(view.view(as_int), expected[name].view(as_int)), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("optimizer", "weight_decay", "grad_scale"),
    [
        (AdamW(), 0.0, 1.0),
        (AdamW(betas=(0.9, 0.95), eps=1e-6), 0.1, 0.37),
        (AdamW(betas=(0.0, 0.0)), 0.01, 1e-3),
        (AdamW(betas=(0.99, 0.9999), eps=1e-15), 0.3, 1.0),
    ],
)
def test_updates_equal_the_formula_bit_for_bit(precision, optimizer, weight_decay, grad_scale):
    n = 20_011  # not a multiple of any vector length
    views = random_views(precision, n)
    expected = clone(views)
    for step in range(1, 13):
        lr = 1e-3 / step
        views["grad"] = expected["grad"] = random_grad(precision, n, seed=step)
        optimizer.update(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale)
        reference(
            optimizer, expected, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale
        )
        assert_same_bits(views, expected)


def torch_optimizer_in_state(
    views: Views, steps: int, **options: Any
) -> tuple[torch.optim.AdamW, Tensor]:
    """torch.optim.AdamW after `steps` updates with the weights and moments of `views`, and its parameter."""
    parameter = master_of(views).clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], **options)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(steps)),
        "exp_avg": views["exp_avg"].clone(),
        "exp_avg_sq": views["exp_avg_sq"].clone(),
    }
    return optimizer, parameter


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_update_is_that_of_torch(precision, step, weight_decay):
    views = random_views(precision, 1 << 16)
    before = master_of(views).double()
    theirs, parameter = torch_optimizer_in_state(
        views, step - 1, lr=3e-4, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8
    )
    parameter.grad = views["grad"].float() * 0.5
    theirs.step()
    AdamW().update(views, lr=3e-4, weight_decay=weight_decay, step=step, grad_scale=0.5)
    expected = parameter.detach().double() - before
    error = (master_of(views).double() - before - expected).norm() / expected.norm()
    assert error <= 1e-6
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(views[name], theirs.state[parameter][name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fifty_updates_follow_torch(precision):
    n = 1 << 14
    views = random_views(precision, n)
    views["exp_avg"].zero_()
    views["exp_avg_sq"].zero_()
    before = master_of(views).double()
    theirs, parameter = torch_optimizer_in_state(views, 0, lr=1e-3, weight_decay=0.1)
    for step in range(1, 51):
        views["grad"] = random_grad(precision, n, seed=step)
        parameter.grad = views["grad"].float()
        theirs.step()
        AdamW().update(views, lr=1e-3, weight_decay=0.1, step=step, grad_scale=1.0)
    expected = parameter.detach().double() - before
    assert (master_of(views).double() - before - expected).norm() / expected.norm() <= 1e-6


def test_updates_too_small_for_bfloat16_are_kept():
    n = 4096
    master = torch.linspace(0.5, 1.0, n)
    zeros = {"exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
    weight, remainder = split_master(master)
    views: Views = {"weight": weight, "remainder": remainder, **clone(zeros)}
    exact: Views = {"weight": master.clone(), **clone(zeros)}
    rounded = master.to(torch.bfloat16)
    for step in range(1, 101):
        grad = torch.ones(n, dtype=torch.bfloat16)
        views["grad"], exact["grad"] = grad, grad.float()
        was = master_of(views)
        for one in (views, exact):
            AdamW().update(one, lr=1e-6, weight_decay=0.0, step=step, grad_scale=1.0)
        rounded = (rounded.float() + (master_of(views) - was)).to(torch.bfloat16)
    assert torch.equal(
        rounded, master.to(torch.bfloat16)
    )  # what a bf16 weight without a remainder would have learnt: nothing
    assert torch.equal(
        master_of(views), exact["weight"]
    )  # the same as float32 training with these gradients
    moved = master - master_of(views)
    torch.testing.assert_close(
        moved, torch.full_like(moved, 1e-4), rtol=0.1, atol=0
    )  # 100 updates of about 1e-6


def test_grad_scale_multiplies_the_gradient_first():
    views = random_views("float32", 5000)
    scaled = clone(views)
    scaled["grad"] *= 0.125
    AdamW().update(views, lr=1e-3, weight_decay=0.1, step=3, grad_scale=0.125)
    AdamW().update(scaled, lr=1e-3, weight_decay=0.1, step=3, grad_scale=1.0)
    assert torch.equal(views["weight"], scaled["weight"])
    assert torch.equal(views["exp_avg_sq"], scaled["exp_avg_sq"])


@pytest.mark.parametrize("name", OF_RANGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_cut_into_ranges_gives_the_same_bits(name, precision):
    n = 9001
    whole = random_views(precision, n)
    cut = clone(whole)
    optimizer = OF_RANGES[name]()
    optimizer.update(whole, lr=1e-3, weight_decay=0.1, step=2, grad_scale=0.7)
    edges = [0, 1, 2, 19, 1024, 1087, 5000, n]
    for start, stop in pairwise(edges):
        part = {key: view[start:stop] for key, view in cut.items()}
        optimizer.update(part, lr=1e-3, weight_decay=0.1, step=2, grad_scale=0.7)
    assert_same_bits(cut, whole)


@pytest.mark.parametrize("name", OF_RANGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padding_stays_zero_and_the_gradient_is_only_read(name, precision):
    views = random_views(precision, 2048)
    for view in views.values():
        view[1000:] = 0
    grad = views["grad"].clone()
    for step in (1, 2, 100_000):
        OF_RANGES[name]().update(views, lr=1e-2, weight_decay=0.1, step=step, grad_scale=0.5)
    assert torch.equal(views["grad"], grad)
    for key, view in views.items():
        assert not view[1000:].any(), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_declares_what_the_store_needs(name):
    optimizer = OPTIMIZERS[name]()
    assert optimizer.name == name
    names = [state.name for state in optimizer.state_arrays]
    assert len(set(names)) == len(names)
    assert not {"weight", "remainder", "grad"} & set(names)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"lr": -1e-5}, "optimizer.lr: -1e-05 "),
        ({"lr": float("nan")}, "optimizer.lr"),
        ({"lr": float("inf")}, "optimizer.lr"),
        ({"lr": "1e-5"}, "optimizer.lr: expected a number"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas\[1\]: 1.0 .* below 1"),
        ({"betas": (-0.1, 0.9)}, r"optimizer.betas\[0\]"),
        ({"betas": (0.9,)}, "optimizer.betas: expected two numbers"),
        ({"betas": 0.9}, "optimizer.betas: expected two numbers"),
        ({"eps": 0.0}, "optimizer.eps"),
        ({"eps": 1e-50}, "optimizer.eps"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"weight_decay": True}, "optimizer.weight_decay: expected a number"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options, key):
    with pytest.raises(ConfigError, match=key):
        AdamW(**options)


def test_betas_from_a_list_are_a_value():
    betas: Any = [0.9, 0.95]
    assert AdamW(betas=betas) == AdamW(betas=(0.9, 0.95))
    assert hash(AdamW(betas=betas)) == hash(AdamW(betas=(0.9, 0.95)))

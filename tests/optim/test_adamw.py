"""AdamW's kernels against torch.optim.AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.optim import AdamW
from megatrain.optim.split import split_master
from tests.helpers.compare import distance
from tests.optim.arrays import PRECISIONS, Views, clone, master_of, random_views


def torch_optimizer_in_state(
    views: Views, steps: int, **options: Any
) -> tuple[torch.optim.AdamW, Tensor]:
    """torch's after `steps` updates with the weights and moments of `views`, and its parameter."""
    parameter = master_of(views).clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], **options)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(steps)),
        "exp_avg": views["exp_avg"].clone(),
        "exp_avg_sq": views["exp_avg_sq"].clone(),
    }
    return optimizer, parameter


@PRECISIONS
@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_update_is_that_of_torch(precision, step, weight_decay):
    views = random_views(precision, 1 << 16)
    before = master_of(views).double()
    theirs, parameter = torch_optimizer_in_state(
        views, step - 1, lr=3e-4, weight_decay=weight_decay
    )
    parameter.grad = views["grad"].float() * 0.5
    theirs.step()
    AdamW().update(views, lr=3e-4, weight_decay=weight_decay, step=step, grad_scale=0.5)
    assert distance(master_of(views).double() - before, parameter.double() - before) <= 1e-6
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(views[name], theirs.state[parameter][name], rtol=1e-6, atol=0)


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
    # a bf16 weight without a remainder would have learnt nothing
    assert torch.equal(rounded, master.to(torch.bfloat16))
    assert torch.equal(master_of(views), exact["weight"])
    moved = master - master_of(views)  # 100 updates of about 1e-6
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), rtol=0.1, atol=0)

"""The split of the master weight is exact: every pattern comes back, and the weight is the nearest
bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.optim import AdamW, split
from megatrain.optim.split import join_master, split_master
from tests.helpers.compare import bits

# exact, just above, below, at and above a tie, just below the next
LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_high_half() -> Tensor:
    """All 65,536 upper halves with each of LOW_HALVES: zeros, denormals, infinities, every NaN."""
    high = torch.arange(1 << 16, dtype=torch.int64)
    patterns = torch.cat([(high << 16) + low for low in LOW_HALVES])
    return patterns.to(torch.int32).view(torch.float32)  # narrowing keeps the low 32 bits


def sampled(count: int = 1 << 22) -> Tensor:
    """Random patterns over the whole range of 32 bits."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator)
    return patterns.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("patterns", [every_high_half, sampled])
def test_the_halves_are_those_of_the_definition_and_every_pattern_comes_back(patterns):
    master = patterns()
    weight, remainder = split_master(master)
    assert torch.equal(bits(join_master(weight, remainder)), bits(master))
    u = bits(master).to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(bits(weight).to(torch.int64) & 0xFFFF, ((u + 0x8000) >> 16) & 0xFFFF)
    assert torch.equal(remainder.to(torch.int64) & 0xFFFF, u & 0xFFFF)


def test_chunks_do_not_show(monkeypatch):
    master = sampled(10_007)
    whole = split_master(master)
    monkeypatch.setattr(split, "CHUNK", 1000)
    for in_chunks, at_once in zip(split_master(master), whole, strict=True):
        assert torch.equal(bits(in_chunks), bits(at_once))


def test_shapes_are_kept_and_strides_are_not_trusted():
    master = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).t()
    weight, remainder = split_master(master)
    assert weight.shape == remainder.shape == master.shape
    assert torch.equal(join_master(weight, remainder), master)
    assert torch.equal(join_master(weight.t(), remainder.t()), master.t())
    assert join_master(*split_master(torch.tensor(1.5))).item() == 1.5
    assert split_master(torch.empty(0, 3))[0].shape == (0, 3)


def test_the_kernel_splits_as_this_module_does():
    """An update with rate zero rewrites every finite master as it was."""
    master = every_high_half()
    master = master[master.abs() < torch.finfo(torch.bfloat16).max]
    weight, remainder = split_master(master)
    views = {"weight": weight.clone(), "remainder": remainder.clone()}
    views |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    views["grad"] = torch.zeros_like(weight)
    AdamW().update(views, lr=0.0, weight_decay=0.0, step=1, grad_scale=1.0)
    assert torch.equal(bits(views["weight"]), bits(weight))
    assert torch.equal(views["remainder"], remainder)

"""Every elementwise optimizer is its formula, bit for bit; with moments of every type any cut into
ranges gives the same bits, padding stays zero, and values out of range are refused."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.memory.layout import GROUP
from megatrain.optim import OPTIMIZERS, AdamW, Lion, Muon
from megatrain.optim.optimizer import MOMENTS
from tests.helpers.compare import differing
from tests.optim.arrays import (
    PLAIN,
    PRECISIONS,
    REFERENCES,
    clone,
    new_views,
    per,
    random_grad,
    random_views,
)

KINDS: list[Any] = [kind for kind in OPTIMIZERS.values() if not kind.whole_tensors]
every_optimizer = pytest.mark.parametrize(
    "optimizer",
    [kind(moments=moments) for kind, moments in product(KINDS, MOMENTS)],
    ids=lambda optimizer: f"{optimizer.name}-{optimizer.moments}",
)
FAR = 5_000_000_000  # beyond 32 bits


@PRECISIONS
@pytest.mark.parametrize(
    ("optimizer", "weight_decay", "grad_scale"),
    [
        (AdamW(), 0.0, 1.0),
        (AdamW(betas=(0.9, 0.95), eps=1e-6), 0.1, 0.37),
        (AdamW(betas=(0.0, 0.0)), 0.01, 1e-3),
        (AdamW(betas=(0.99, 0.9999), eps=1e-15), 0.3, 1.0),
        (Lion(), 0.0, 1.0),
        (Lion(betas=(0.95, 0.98)), 0.1, 0.37),
        (Lion(betas=(0.0, 0.0)), 0.01, 1e-3),
    ],
)
def test_updates_equal_the_formula_bit_for_bit(precision, optimizer, weight_decay, grad_scale):
    n = 20_011  # not a multiple of any vector length
    views = random_views(precision, n)
    views = {name: view for name, view in views.items() if name != "exp_avg_sq"} | {
        name: views[name] for name in optimizer.moment_names
    }
    expected = clone(views)
    options: dict[str, Any] = {"weight_decay": weight_decay, "grad_scale": grad_scale}
    for step in range(1, 13):
        views["grad"] = expected["grad"] = random_grad(precision, n, seed=step)
        optimizer.update(views, lr=1e-3 / step, step=step, **options)
        REFERENCES[type(optimizer)](optimizer, expected, lr=1e-3 / step, step=step, **options)
        assert differing(views, expected) == []


@PRECISIONS
@every_optimizer
def test_any_cut_into_ranges_gives_the_same_bits_and_another_place_others(optimizer, precision):
    n = 300 * GROUP
    whole = new_views(optimizer, precision, n)
    optimizer.update(whole, **PLAIN, step=1)
    whole["grad"] = random_grad(precision, n, seed=7)
    cut, elsewhere = clone(whole), clone(whole)
    optimizer.update(whole, **PLAIN, step=2, first=FAR)
    edges = [GROUP * edge for edge in (0, 1, 2, 19, 64, 299, 300)]
    if optimizer.moments != "int8":
        edges += [1, 2, 19, 1024, 1087, 5000]
    for start, stop in pairwise(sorted(set(edges))):
        part = {
            key: view[start // per(optimizer, key) : stop // per(optimizer, key)]
            for key, view in cut.items()
        }
        optimizer.update(part, **PLAIN, step=2, first=FAR + start)
    assert differing(cut, whole) == []
    optimizer.update(elsewhere, **PLAIN, step=2)
    changed = float((elsewhere["exp_avg"] != whole["exp_avg"]).float().mean())
    assert changed == 0 if optimizer.moments == "float32" else 0.05 < changed < 0.6
    assert torch.equal(elsewhere["weight"], whole["weight"])


@PRECISIONS
@every_optimizer
def test_padding_stays_zero_and_the_gradient_is_only_read(optimizer, precision):
    """Within a group and beyond."""
    n, end = 32 * GROUP, 1000
    views = new_views(optimizer, precision, n)
    for step in (1, 2, 100_000):
        views["grad"] = random_grad(precision, n, step)
        for name in {"weight", "remainder", "grad"} & views.keys():
            views[name][end:] = 0
        grad = views["grad"].clone()
        optimizer.update(views, lr=1e-2, weight_decay=0.1, step=step, grad_scale=0.5)
        assert torch.equal(views["grad"], grad)
    for name, view in views.items():
        assert not view[-(-end // per(optimizer, name)) :].any(), name


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (AdamW, {"lr": -1e-5}, "optimizer.lr: -1e-05 "),
    (AdamW, {"lr": float("nan")}, "optimizer.lr"),
    (AdamW, {"lr": float("inf")}, "optimizer.lr"),
    (AdamW, {"lr": "1e-5"}, "optimizer.lr: expected a number"),
    (AdamW, {"betas": (0.9, 1.0)}, r"optimizer.betas\[1\]: 1.0 .* below 1"),
    (AdamW, {"betas": (-0.1, 0.9)}, r"optimizer.betas\[0\]"),
    (AdamW, {"betas": 0.9}, "optimizer.betas: expected two numbers"),
    (AdamW, {"eps": 1e-50}, "optimizer.eps"),
    (AdamW, {"weight_decay": True}, "optimizer.weight_decay: expected a number"),
    (Lion, {"betas": (0.9, 1.0)}, r"optimizer.betas\[1\]: 1.0 .* below 1"),
    (Lion, {"weight_decay": -0.1}, "optimizer.weight_decay"),
    (Lion, {"moments": "int4"}, "moments: 'int4' is none of float32, bfloat16, int8"),
    (AdamW, {"moments": "int4"}, "moments: 'int4' is none of float32, bfloat16, int8"),
    (Muon, {"lr": -1.0}, "optimizer.lr"),
    (Muon, {"adamw_lr": -1.0}, "optimizer.adamw_lr"),
    (Muon, {"momentum": 1.0}, "optimizer.momentum"),
    (Muon, {"betas": (0.9, 1.0)}, "optimizer.betas"),
    (Muon, {"ns_steps": 0}, "optimizer.ns_steps"),
    (Muon, {"adjust_lr_fn": "moonshot"}, "adjust_lr_fn: 'moonshot' is none of match_rms"),
    (Muon, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
]


def test_values_out_of_range_are_refused_by_name():
    for kind, options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            kind(**options)
    betas: Any = [0.9, 0.95]  # of YAML
    assert hash(AdamW(betas=betas)) == hash(AdamW(betas=(0.9, 0.95)))

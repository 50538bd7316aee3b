"""Lion on the host, compiled by Numba; kernels.py says what keeps its loop fast.

The arithmetic is that of plain PyTorch on a CPU, operation by operation: `mul_`, then `add_` with
alpha, which is one fused multiply-add.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types, void

from megatrain.optim.kernels import (
    FULL,
    HALF,
    Kernel,
    compiled,
    constants,
    float_of,
    fma,
    inlined,
    kept_as,
    low_half,
    master_of,
    random_bits,
    store_master,
)


@inlined
def lion_of(g: Any, m: Any, scalars: Any) -> Any:
    """The sign that the weight moves against, and the next moment, from the scaled gradient."""
    _, _, beta1, beta2, one_minus_beta1, one_minus_beta2, _ = scalars
    towards = fma(one_minus_beta1, g, m * beta1)
    sign = np.float32(towards > 0) - np.float32(towards < 0)
    return sign, fma(one_minus_beta2, g, m * beta2)


def _lion(
    weight: Any, remainder: Any, exp_avg: Any, grad: Any, first: Any, seed: Any, scalars: Any
) -> None:
    grad_scale, decay, _, _, _, _, minus_lr = scalars
    for i in range(weight.size):
        g = float_of(grad[i]) * grad_scale
        sign, m = lion_of(g, float_of(exp_avg[i]), scalars)
        exp_avg[i] = kept_as(exp_avg[i], m, low_half(random_bits(first + i, seed)))
        master = master_of(weight, remainder, i) * decay + minus_lr * sign
        store_master(weight, remainder, i, master)


@cache
def lion(split: bool, bf16_moments: bool) -> Kernel:
    """Lion over flat arrays of equal length: `kernels.adamw` without exp_avg_sq."""
    weight, remainder = (HALF, HALF) if split else (FULL, types.none)
    moment = HALF if bf16_moments else FULL
    return compiled(_lion, void(weight, remainder, moment, weight, *constants(7)))

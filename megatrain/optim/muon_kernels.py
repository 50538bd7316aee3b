"""Muon's element-wise parts on the host, compiled by Numba (kernels.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float32, types, uint32, void

from megatrain.optim.kernels import (
    FULL,
    HALF,
    Kernel,
    bits_of_float,
    compiled,
    float_of,
    fma,
    master_of,
    store_master,
)


def _direct(
    exp_avg: Any, grad: Any, direction: Any, grad_scale: Any, one_minus_momentum: Any, share: Any
) -> None:
    for i in range(grad.size):
        g = float_of(grad[i]) * grad_scale
        m = fma(g - exp_avg[i], one_minus_momentum, exp_avg[i])
        exp_avg[i] = m
        bits = uint32(bits_of_float(fma(g - m, share, m)))
        even = uint32(0x7FFF) + (uint32(bits >> uint32(16)) & uint32(1))
        direction[i] = np.int16(uint32(bits + even) >> uint32(16))


def _apply(weight: Any, remainder: Any, direction: Any, decay: Any, minus_step_size: Any) -> None:
    for i in range(weight.size):
        master = master_of(weight, remainder, i) * decay
        master = fma(minus_step_size, float_of(direction[i]), master)
        store_master(weight, remainder, i, master)


@cache
def direct(split: bool) -> Kernel:
    """The next momentum, and the direction to be made orthogonal, over arrays of equal length.

    Arguments: exp_avg (float32), grad (if `split` int16: bits of bfloat16, else float32), direction
    (int16), and as float32 grad_scale, 1 - momentum, share. The direction is a mean of momentum and
    gradient, in which the gradient has `share`, rounded to the nearest bfloat16.
    """
    grad = HALF if split else FULL
    return compiled(_direct, void(FULL, grad, HALF, float32, float32, float32))


@cache
def apply(split: bool) -> Kernel:
    """The update by an orthogonal direction.

    Arguments: weight and remainder as `kernels.adamw`'s, direction (int16: bits of bfloat16), and
    as float32 1 - lr * weight_decay and -lr times the rate of the matrix's shape.
    """
    weight, remainder = (HALF, HALF) if split else (FULL, types.none)
    return compiled(_apply, void(weight, remainder, HALF, float32, float32))

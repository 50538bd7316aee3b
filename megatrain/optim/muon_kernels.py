"""Muon's element-wise parts over ranges of host memory, compiled by Numba: bfloat16 as int16 views, rounding as in kernels.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float32, int16, uint32, void

from megatrain.optim.kernels import Kernel, bits_of_float, compiled, float_of_bits, fma


def _direct_split(exp_avg: Any, grad: Any, direction: Any, grad_scale: Any, one_minus_momentum: Any, share: Any) -> None:
    for i in range(grad.size):
        g = float_of_bits(np.int32(np.int32(grad[i]) << 16)) * grad_scale
        m = fma(g - exp_avg[i], one_minus_momentum, exp_avg[i])
        exp_avg[i] = m
        bits = uint32(bits_of_float(fma(g - m, share, m)))
        direction[i] = np.int16(uint32(bits + uint32(0x7FFF) + (uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16))


def _direct_float32(exp_avg: Any, grad: Any, direction: Any, grad_scale: Any, one_minus_momentum: Any, share: Any) -> None:
    for i in range(grad.size):
        g = grad[i] * grad_scale
        m = fma(g - exp_avg[i], one_minus_momentum, exp_avg[i])
        exp_avg[i] = m
        bits = uint32(bits_of_float(fma(g - m, share, m)))
        direction[i] = np.int16(uint32(bits + uint32(0x7FFF) + (uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16))


def _apply_split(weight: Any, remainder: Any, direction: Any, decay: Any, minus_step_size: Any) -> None:
    for i in range(weight.size):
        master = float_of_bits(np.int32((np.int32(weight[i]) << 16) + np.int32(remainder[i])))
        bits = bits_of_float(fma(minus_step_size, float_of_bits(np.int32(np.int32(direction[i]) << 16)), master * decay))
        weight[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
        remainder[i] = np.int16(bits)


def _apply_float32(weight: Any, direction: Any, decay: Any, minus_step_size: Any) -> None:
    for i in range(weight.size):
        weight[i] = fma(minus_step_size, float_of_bits(np.int32(np.int32(direction[i]) << 16)), weight[i] * decay)


HALF, FULL = int16[::1], float32[::1]


@cache
def direct(split: bool) -> Kernel:
    """(exp_avg, grad, direction, grad_scale, 1 - momentum, share): the next momentum, and into `direction`, to the nearest bfloat16, a mean
    of it and the gradient, whose part is `share`."""
    if split:
        return compiled(_direct_split, void(FULL, HALF, HALF, float32, float32, float32))
    return compiled(_direct_float32, void(FULL, FULL, HALF, float32, float32, float32))


@cache
def apply(split: bool) -> Kernel:
    """(weight, [remainder,] direction, decay, minus_step_size): the update."""
    if split:
        return compiled(_apply_split, void(HALF, HALF, HALF, float32, float32))
    return compiled(_apply_float32, void(FULL, HALF, float32, float32))

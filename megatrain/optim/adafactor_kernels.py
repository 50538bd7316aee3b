"""The three passes of Adafactor over a piece of a matrix in host memory, compiled by Numba: bfloat16 weights and gradients as int16 views.

A pass is bound by DRAM if its sums are vectorised, for which the compiler must take them in an order of its own ("reassoc"): the same on
every run of a machine, but not on every machine, as in torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import float32, float64, int16, void

from megatrain.optim.kernels import Kernel, bits_of_float, compiled, float_of_bits


def _measure_split(weight: Any, remainder: Any, grad: Any, grad_scale: Any, row_sq: Any, column_sq: Any, weight_sq: Any) -> None:
    total: Any = 0.0
    for i in range(grad.shape[0]):
        w_row, r_row, g_row = weight[i], remainder[i], grad[i]
        of_row, of_weights = np.float32(0), np.float32(0)
        for j in range(g_row.size):
            master = float_of_bits(np.int32((np.int32(w_row[j]) << 16) + np.int32(r_row[j])))
            g = float_of_bits(np.int32(np.int32(g_row[j]) << 16)) * grad_scale
            of_row += g * g
            of_weights += master * master
            column_sq[j] += g * g
        row_sq[i] = of_row
        total += of_weights
    weight_sq[0] = total


def _measure_float32(weight: Any, grad: Any, grad_scale: Any, row_sq: Any, column_sq: Any, weight_sq: Any) -> None:
    total: Any = 0.0
    for i in range(grad.shape[0]):
        w_row, g_row = weight[i], grad[i]
        of_row, of_weights = np.float32(0), np.float32(0)
        for j in range(g_row.size):
            g = g_row[j] * grad_scale
            of_row += g * g
            of_weights += w_row[j] * w_row[j]
            column_sq[j] += g * g
        row_sq[i] = of_row
        total += of_weights
    weight_sq[0] = total


def _weigh_split(grad: Any, grad_scale: Any, rows: Any, columns: Any, ceiling: Any, update_sq: Any) -> None:
    total: Any = 0.0
    for i in range(grad.shape[0]):
        g_row, row, of_row = grad[i], rows[i], np.float32(0)
        for j in range(g_row.size):
            g = float_of_bits(np.int32(np.int32(g_row[j]) << 16)) * grad_scale
            u = g * min(row * columns[j], ceiling)
            of_row += u * u
        total += of_row
    update_sq[0] = total


def _weigh_float32(grad: Any, grad_scale: Any, rows: Any, columns: Any, ceiling: Any, update_sq: Any) -> None:
    total: Any = 0.0
    for i in range(grad.shape[0]):
        g_row, row, of_row = grad[i], rows[i], np.float32(0)
        for j in range(g_row.size):
            u = g_row[j] * grad_scale * min(row * columns[j], ceiling)
            of_row += u * u
        total += of_row
    update_sq[0] = total


def _apply_split(
    weight: Any, remainder: Any, grad: Any, grad_scale: Any, rows: Any, columns: Any, ceiling: Any, decay: Any, minus_step_size: Any
) -> None:
    for i in range(grad.shape[0]):
        w_row, r_row, g_row, row = weight[i], remainder[i], grad[i], rows[i]
        for j in range(g_row.size):
            master = float_of_bits(np.int32((np.int32(w_row[j]) << 16) + np.int32(r_row[j])))
            g = float_of_bits(np.int32(np.int32(g_row[j]) << 16)) * grad_scale
            bits = bits_of_float(master * decay + minus_step_size * (g * min(row * columns[j], ceiling)))
            w_row[j] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
            r_row[j] = np.int16(bits)


def _apply_float32(
    weight: Any, grad: Any, grad_scale: Any, rows: Any, columns: Any, ceiling: Any, decay: Any, minus_step_size: Any
) -> None:
    for i in range(grad.shape[0]):
        w_row, g_row, row = weight[i], grad[i], rows[i]
        for j in range(g_row.size):
            u = g_row[j] * grad_scale * min(row * columns[j], ceiling)
            w_row[j] = w_row[j] * decay + minus_step_size * u


HALF, FULL, LINE, SUM = int16[:, ::1], float32[:, ::1], float32[::1], float64[::1]
SUMMING: dict[str, Any] = {"fastmath": {"reassoc", "nsz"}}


@cache
def measure(split: bool) -> Kernel:
    """(weight, [remainder,] grad, grad_scale, row_sq, column_sq, weight_sq): sums of squares of each row's gradients (written), of each
    column's (added), of all weights (written)."""
    if split:
        return compiled(_measure_split, void(HALF, HALF, HALF, float32, LINE, LINE, SUM), **SUMMING)
    return compiled(_measure_float32, void(FULL, FULL, float32, LINE, LINE, SUM), **SUMMING)


@cache
def weigh(split: bool) -> Kernel:
    """(grad, grad_scale, rows, columns, ceiling, update_sq): the sum of squares of gradient * min(row * column, ceiling)."""
    of_grad = HALF if split else FULL
    return compiled(_weigh_split if split else _weigh_float32, void(of_grad, float32, LINE, LINE, float32, SUM), **SUMMING)


@cache
def apply(split: bool) -> Kernel:
    """(weight, [remainder,] grad, grad_scale, rows, columns, ceiling, decay, minus_step_size): the update."""
    if split:
        return compiled(_apply_split, void(HALF, HALF, HALF, float32, LINE, LINE, float32, float32, float32))
    return compiled(_apply_float32, void(FULL, FULL, float32, LINE, LINE, float32, float32, float32))

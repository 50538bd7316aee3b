"""Lion over flat host arrays in one pass, compiled by Numba as kernels.py's AdamW is, whose module says what keeps loops fast.

The arithmetic is that of plain PyTorch on a CPU, operation by operation: `mul_`, then `add_` with alpha, which is one fused multiply-add.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int16, int64, njit, uint32, void
from numba.extending import intrinsic

from megatrain.optim.kernels import Kernel, bits_of_float, compiled, float_of_bits, fma, hash_of


def _float_of(typingctx: Any, moment: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if moment == float32:
            return args[0]
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return float32(moment), codegen


def _kept_as(typingctx: Any, like: Any, value: Any, chance: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == float32:
            return args[1]
        bits = builder.add(builder.bitcast(args[1], ir.IntType(32)), args[2])
        return builder.trunc(builder.lshr(bits, ir.Constant(ir.IntType(32), 16)), ir.IntType(16))

    return like(like, float32, uint32), codegen


float_of: Any = intrinsic(_float_of)  # a moment as float32: itself, or what bits of bfloat16 mean
kept_as: Any = intrinsic(_kept_as)  # (like, value, chance) -> value as `like` is: float32, or bits of bfloat16, up or down as 16 bits say


def _lion(m: Any, g: Any, beta1: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any) -> Any:
    """The sign that the weight moves against, and the next moment."""
    towards = fma(one_minus_beta1, g, m * beta1)
    return np.float32(towards > 0) - np.float32(towards < 0), fma(one_minus_beta2, g, m * beta2)


lion_of = njit(_lion, inline="always")


def _lion_split(
    weight: Any, remainder: Any, exp_avg: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta1: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any, minus_lr: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        master = float_of_bits(np.int32((np.int32(weight[i]) << 16) + np.int32(remainder[i])))
        g = float_of_bits(np.int32(np.int32(grad[i]) << 16)) * grad_scale
        sign, m = lion_of(float_of(exp_avg[i]), g, beta1, beta2, one_minus_beta1, one_minus_beta2)
        bits = bits_of_float(master * decay + minus_lr * sign)
        exp_avg[i] = kept_as(exp_avg[i], m, uint32(hash_of(first + i, key) & uint32(0xFFFF)))
        weight[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
        remainder[i] = np.int16(bits)


def _lion_float32(
    weight: Any, exp_avg: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta1: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any, minus_lr: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        sign, m = lion_of(float_of(exp_avg[i]), grad[i] * grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2)
        exp_avg[i] = kept_as(exp_avg[i], m, uint32(hash_of(first + i, key) & uint32(0xFFFF)))
        weight[i] = weight[i] * decay + minus_lr * sign


LION_SCALARS = (float32,) * 7


@cache
def lion_split() -> Kernel:
    """The compiled kernel for bfloat16 precision.

    Arguments: weight, remainder (int16 views of equal length n), exp_avg (float32), grad (int16 view of bfloat16), the number of the first
    element and the step's key (which an fp32 moment leaves unused), then as float32 grad_scale, 1 - lr * weight_decay, beta1, beta2,
    1 - beta1, 1 - beta2, -lr.
    """
    return compiled(_lion_split, void(int16[::1], int16[::1], float32[::1], int16[::1], int64, uint32, *LION_SCALARS))


@cache
def lion_float32() -> Kernel:
    """The compiled kernel for float32 precision, whose weight is the master itself."""
    return compiled(_lion_float32, void(float32[::1], float32[::1], float32[::1], int64, uint32, *LION_SCALARS))


@cache
def lion_split_bf16() -> Kernel:
    """`lion_split` with the moment as an int16 view of bfloat16."""
    return compiled(_lion_split, void(int16[::1], int16[::1], int16[::1], int16[::1], int64, uint32, *LION_SCALARS))


@cache
def lion_float32_bf16() -> Kernel:
    """`lion_float32` with the moment as an int16 view of bfloat16."""
    return compiled(_lion_float32, void(float32[::1], int16[::1], float32[::1], int64, uint32, *LION_SCALARS))

"""AdamW over flat host arrays in one pass, compiled by Numba.

Every array is read and written once: the update is bound by DRAM, and nothing but that traffic counts. What keeps the loop
vectorised: contiguous arrays from their first element (an index range with offsets costs a factor of six), float32
constants computed outside, `error_model="numpy"` (no branch for a division by zero), and no call inside.

The arithmetic is that of `torch.optim.AdamW` on CPU, operation by operation: `lerp` and `addcmul` end in one fused multiply-add,
everything else is rounded after each operation. Given the same gradients the moments have its bits; the weights may differ
by a rounding, because torch takes its square roots from MKL, which are not always the nearest, and these are. No fastmath: a
contraction that the compiler chooses would change the last bit from machine to machine.

Moments in bfloat16 are rounded up or down at random, with the odds that keep their mean: the second moment moves by a thousandth a step,
less than half a step of bfloat16, and to the nearest it would never move. Chance is a hash of the element's number and the step, so that
threads, cuts into ranges and devices change nothing.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int16, int32, int64, njit, uint32, void
from numba.extending import intrinsic

log = logging.getLogger(__name__)

Kernel = Callable[..., None]


def _float_of_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return float32(int32), codegen


def _bits_of_float(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return int32(float32), codegen


def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return float32(float32, float32, float32), codegen


float_of_bits: Any = intrinsic(_float_of_bits)  # int32 -> the float32 with these bits
bits_of_float: Any = intrinsic(_bits_of_float)  # float32 -> its bits as int32
fma: Any = intrinsic(_fma)  # a * b + c in float32, rounded once; a function call, but still right, on processors without it


def _adamw_split(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        master = float_of_bits(np.int32((np.int32(weight[i]) << 16) + np.int32(remainder[i])))
        g = float_of_bits(np.int32(np.int32(grad[i]) << 16)) * grad_scale
        m = fma(g - exp_avg[i], one_minus_beta1, exp_avg[i])
        v = fma(one_minus_beta2 * g, g, exp_avg_sq[i] * beta2)
        denominator = math.sqrt(v) / root_correction2 + eps
        bits = bits_of_float(master * decay + (minus_step_size * m) / denominator)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        weight[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
        remainder[i] = np.int16(bits)


def _adamw_float32(
    weight: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        g = grad[i] * grad_scale
        m = fma(g - exp_avg[i], one_minus_beta1, exp_avg[i])
        v = fma(one_minus_beta2 * g, g, exp_avg_sq[i] * beta2)
        denominator = math.sqrt(v) / root_correction2 + eps
        exp_avg[i] = m
        exp_avg_sq[i] = v
        weight[i] = weight[i] * decay + (minus_step_size * m) / denominator


def _hash(number: Any, key: Any) -> Any:
    """32 bits of chance for an element in a step: Wellons' lowbias32, whose every bit depends on every bit of `number`."""
    x = uint32(uint32(number) ^ key)
    x = uint32(uint32(x ^ uint32(x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ uint32(x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ uint32(x >> uint32(16)))


hash_of = njit(_hash, inline="always")


def _moments(exp_avg: Any, exp_avg_sq: Any, g: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any) -> Any:
    """The next moments in float32, from bits of bfloat16."""
    m = float_of_bits(np.int32(np.int32(exp_avg) << 16))
    v = float_of_bits(np.int32(np.int32(exp_avg_sq) << 16))
    return fma(g - m, one_minus_beta1, m), fma(one_minus_beta2 * g, g, v * beta2)


def _rounded(value: Any, chance: Any) -> Any:
    """Bits of bfloat16, up or down as 16 bits of chance say."""
    return np.int16(uint32(uint32(bits_of_float(value)) + chance) >> uint32(16))


moments_of, rounded_by = njit(_moments, inline="always"), njit(_rounded, inline="always")


def _adamw_split_bf16(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        master = float_of_bits(np.int32((np.int32(weight[i]) << 16) + np.int32(remainder[i])))
        g = float_of_bits(np.int32(np.int32(grad[i]) << 16)) * grad_scale
        m, v = moments_of(exp_avg[i], exp_avg_sq[i], g, beta2, one_minus_beta1, one_minus_beta2)
        denominator = math.sqrt(v) / root_correction2 + eps
        bits = bits_of_float(master * decay + (minus_step_size * m) / denominator)
        chance = hash_of(first + i, key)
        exp_avg[i] = rounded_by(m, uint32(chance & uint32(0xFFFF)))
        exp_avg_sq[i] = rounded_by(v, uint32(chance >> uint32(16)))
        weight[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
        remainder[i] = np.int16(bits)


def _adamw_float32_bf16(
    weight: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for i in range(weight.size):
        g = grad[i] * grad_scale
        m, v = moments_of(exp_avg[i], exp_avg_sq[i], g, beta2, one_minus_beta1, one_minus_beta2)
        denominator = math.sqrt(v) / root_correction2 + eps
        chance = hash_of(first + i, key)
        exp_avg[i] = rounded_by(m, uint32(chance & uint32(0xFFFF)))
        exp_avg_sq[i] = rounded_by(v, uint32(chance >> uint32(16)))
        weight[i] = weight[i] * decay + (minus_step_size * m) / denominator


SCALARS = (float32,) * 8


@cache
def adamw_split() -> Kernel:
    """The compiled kernel for bfloat16 precision.

    Arguments: weight, remainder (int16 views of equal length n), exp_avg, exp_avg_sq (float32), grad (int16 view of bfloat16), the number
    of the first element and the step's key (which fp32 moments leave unused), then as float32 grad_scale, 1 - lr * weight_decay, beta2,
    1 - beta1, 1 - beta2, sqrt(1 - beta2^step), eps, -lr / (1 - beta1^step).
    """
    return compiled(_adamw_split, void(int16[::1], int16[::1], float32[::1], float32[::1], int16[::1], int64, uint32, *SCALARS))


@cache
def adamw_float32() -> Kernel:
    """The compiled kernel for float32 precision, whose weight is the master itself.

    Arguments: weight, exp_avg, exp_avg_sq, grad (float32 of equal length n), then what `adamw_split` takes behind its arrays.
    """
    return compiled(_adamw_float32, void(float32[::1], float32[::1], float32[::1], float32[::1], int64, uint32, *SCALARS))


@cache
def adamw_split_bf16() -> Kernel:
    """`adamw_split` with moments as int16 views of bfloat16."""
    return compiled(_adamw_split_bf16, void(int16[::1], int16[::1], int16[::1], int16[::1], int16[::1], int64, uint32, *SCALARS))


@cache
def adamw_float32_bf16() -> Kernel:
    """`adamw_float32` with moments as int16 views of bfloat16."""
    return compiled(_adamw_float32_bf16, void(float32[::1], int16[::1], int16[::1], float32[::1], int64, uint32, *SCALARS))


def key_of(step: int) -> np.uint32:
    """What a step's chance hangs on."""
    with np.errstate(over="ignore"):
        return np.uint32(_hash(step, np.uint32(0)))


def compiled(function: Kernel, signature: Any, **more: Any) -> Kernel:
    """`function` as machine code that runs without the GIL, kept on disk between runs where some folder can be written. `more`: for njit.

    Numba looks for a folder next to this file, then in the user's cache. That none can be written (RuntimeError), that the disk is full, or
    that a power cut left half a file must not stop a run: compiling anew costs a second.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    try:
        kernel: Kernel = njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        log.warning("the compiled optimizer kernel cannot be cached on disk (%s); set NUMBA_CACHE_DIR to an empty folder to mend it", error)
        kernel = njit(signature, **options)(function)
    return kernel

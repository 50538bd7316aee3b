"""Updates whose moments take 8 bits: AdamW and Lion over flat host arrays in one pass, compiled by Numba as kernels.py's are.

A GROUP of 64 consecutive elements shares a scale, a power of two c. A magnitude a is kept as what a + c has above c: with the bits of
float32 read as integers,

    code = (bits(a + c) - bits(c)) >> 20        three bits of mantissa over as many binades as codes reach
    a    = float(bits(c) + (code << 20)) - c

so that codes are even steps of c / 8 below c, grow by an eighth of a binade above it, and 0 is zero: no branch, no table. c follows the
largest magnitude M of the group: a moment with a sign has 127 codes above zero, from M / 2^18 on, one without has 255, from M / 2^34
on. Scales are kept as c's exponent, so a group of zeros has scale 0 and stays zero.

Codes are rounded up or down by chance, as kernels.py says why, with the odds that keep the mean. One exception: a second moment above zero
never becomes zero. The first moment would then be divided by eps alone; so it is divided by M / 2^34 at least, and the update of such an
element is too small instead of enormous.

An update of weights uses the moments before they are rounded. The largest magnitude is needed before the first code can be written, so
moments are computed twice: their bytes are in the nearest cache by then.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import float32, int16, int64, njit, uint8, uint32, void

from megatrain.memory.layout import GROUP
from megatrain.optim.kernels import SCALARS, Kernel, bits_of_float, compiled, float_of_bits, fma, hash_of
from megatrain.optim.lion_kernels import LION_SCALARS, lion_of

SIGNED_BINADES, UNSIGNED_BINADES = 15, 31  # from c to the largest magnitude's
# Added to the largest magnitude before its exponent is taken: neither chance nor c can then push a code past the last.
MARGIN = 0x1FFFFF


def _unsigned(code: Any, scale: Any) -> Any:
    """The float32 that `code` stands for, `scale` being bits of c."""
    return float_of_bits(np.int32((np.int32(code) << 20) + scale)) - float_of_bits(scale)


def _signed(code: Any, scale: Any) -> Any:
    """The same with the sign in the highest of eight bits."""
    magnitude = _unsigned_of(np.int32(code) & 0x7F, scale)
    return float_of_bits(np.int32(bits_of_float(magnitude) | ((np.int32(code) & 0x80) << 24)))


def _scale(largest: Any, binades: Any) -> Any:
    """c's exponent, for the bits of the largest magnitude."""
    return max(((largest + MARGIN) >> 23) - binades, 0)


def _code(magnitude: Any, scale: Any, chance: Any) -> Any:
    """The code of a magnitude, up or down as 16 bits of chance say."""
    above = np.int32(bits_of_float(magnitude + float_of_bits(scale)) - scale)
    return np.int32(above + np.int32((chance << uint32(4)) | uint32(8))) >> 20


def _signed_code(value: Any, scale: Any, chance: Any) -> Any:
    return np.uint8(_code_of(abs(value), scale, chance) | ((bits_of_float(value) >> 24) & 0x80))


def _positive_code(value: Any, scale: Any, chance: Any) -> Any:
    """Of a second moment: not zero unless the value is."""
    return np.uint8(max(_code_of(value, scale, chance), np.int32(value > 0)))


_unsigned_of, _signed_of = njit(_unsigned, inline="always"), njit(_signed, inline="always")
scale_of, _code_of = njit(_scale, inline="always"), njit(_code, inline="always")
signed_code, positive_code = njit(_signed_code, inline="always"), njit(_positive_code, inline="always")


def _moments(m: Any, v: Any, scale_m: Any, scale_v: Any, g: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any) -> Any:
    """The next moments in float32, from codes."""
    m, v = _signed_of(m, scale_m), _unsigned_of(v, scale_v)
    return fma(g - m, one_minus_beta1, m), fma(one_minus_beta2 * g, g, v * beta2)


moments_of = njit(_moments, inline="always")


def _adamw_split_int8(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_scale: Any, exp_avg_sq: Any, exp_avg_sq_scale: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for group in range(weight.shape[0]):
        w, r, m8, v8, g16 = weight[group], remainder[group], exp_avg[group], exp_avg_sq[group], grad[group]
        was_m, was_v = np.int32(np.int32(exp_avg_scale[group]) << 23), np.int32(np.int32(exp_avg_sq_scale[group]) << 23)
        largest_m = largest_v = np.int32(0)
        for i in range(GROUP):
            g = float_of_bits(np.int32(np.int32(g16[i]) << 16)) * grad_scale
            m, v = moments_of(m8[i], v8[i], was_m, was_v, g, beta2, one_minus_beta1, one_minus_beta2)
            largest_m, largest_v = max(largest_m, bits_of_float(abs(m))), max(largest_v, bits_of_float(v))
        exp_avg_scale[group] = scale_m = scale_of(largest_m, SIGNED_BINADES)
        exp_avg_sq_scale[group] = scale_v = scale_of(largest_v, UNSIGNED_BINADES)
        now_m, now_v = np.int32(scale_m << 23), np.int32(scale_v << 23)
        number = first + group * GROUP
        for i in range(GROUP):
            master = float_of_bits(np.int32((np.int32(w[i]) << 16) + np.int32(r[i])))
            g = float_of_bits(np.int32(np.int32(g16[i]) << 16)) * grad_scale
            m, v = moments_of(m8[i], v8[i], was_m, was_v, g, beta2, one_minus_beta1, one_minus_beta2)
            denominator = math.sqrt(v) / root_correction2 + eps
            bits = bits_of_float(master * decay + (minus_step_size * m) / denominator)
            chance = hash_of(number + i, key)
            m8[i] = signed_code(m, now_m, uint32(chance & uint32(0xFFFF)))
            v8[i] = positive_code(v, now_v, uint32(chance >> uint32(16)))
            w[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
            r[i] = np.int16(bits)


def _adamw_float32_int8(
    weight: Any, exp_avg: Any, exp_avg_scale: Any, exp_avg_sq: Any, exp_avg_sq_scale: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any,
    root_correction2: Any, eps: Any, minus_step_size: Any,
) -> None:  # fmt: skip
    for group in range(weight.shape[0]):
        w, m8, v8, g32 = weight[group], exp_avg[group], exp_avg_sq[group], grad[group]
        was_m, was_v = np.int32(np.int32(exp_avg_scale[group]) << 23), np.int32(np.int32(exp_avg_sq_scale[group]) << 23)
        largest_m = largest_v = np.int32(0)
        for i in range(GROUP):
            g = g32[i] * grad_scale
            m, v = moments_of(m8[i], v8[i], was_m, was_v, g, beta2, one_minus_beta1, one_minus_beta2)
            largest_m, largest_v = max(largest_m, bits_of_float(abs(m))), max(largest_v, bits_of_float(v))
        exp_avg_scale[group] = scale_m = scale_of(largest_m, SIGNED_BINADES)
        exp_avg_sq_scale[group] = scale_v = scale_of(largest_v, UNSIGNED_BINADES)
        now_m, now_v = np.int32(scale_m << 23), np.int32(scale_v << 23)
        number = first + group * GROUP
        for i in range(GROUP):
            g = g32[i] * grad_scale
            m, v = moments_of(m8[i], v8[i], was_m, was_v, g, beta2, one_minus_beta1, one_minus_beta2)
            denominator = math.sqrt(v) / root_correction2 + eps
            chance = hash_of(number + i, key)
            m8[i] = signed_code(m, now_m, uint32(chance & uint32(0xFFFF)))
            v8[i] = positive_code(v, now_v, uint32(chance >> uint32(16)))
            w[i] = w[i] * decay + (minus_step_size * m) / denominator


def _lion_split_int8(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_scale: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta1: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any, minus_lr: Any,
) -> None:  # fmt: skip
    for group in range(weight.shape[0]):
        w, r, m8, g16 = weight[group], remainder[group], exp_avg[group], grad[group]
        was = np.int32(np.int32(exp_avg_scale[group]) << 23)
        largest = np.int32(0)
        for i in range(GROUP):
            g = float_of_bits(np.int32(np.int32(g16[i]) << 16)) * grad_scale
            _, m = lion_of(_signed_of(m8[i], was), g, beta1, beta2, one_minus_beta1, one_minus_beta2)
            largest = max(largest, bits_of_float(abs(m)))
        exp_avg_scale[group] = scale = scale_of(largest, SIGNED_BINADES)
        now, number = np.int32(scale << 23), first + group * GROUP
        for i in range(GROUP):
            master = float_of_bits(np.int32((np.int32(w[i]) << 16) + np.int32(r[i])))
            g = float_of_bits(np.int32(np.int32(g16[i]) << 16)) * grad_scale
            sign, m = lion_of(_signed_of(m8[i], was), g, beta1, beta2, one_minus_beta1, one_minus_beta2)
            bits = bits_of_float(master * decay + minus_lr * sign)
            m8[i] = signed_code(m, now, uint32(hash_of(number + i, key) & uint32(0xFFFF)))
            w[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
            r[i] = np.int16(bits)


def _lion_float32_int8(
    weight: Any, exp_avg: Any, exp_avg_scale: Any, grad: Any, first: Any, key: Any,
    grad_scale: Any, decay: Any, beta1: Any, beta2: Any, one_minus_beta1: Any, one_minus_beta2: Any, minus_lr: Any,
) -> None:  # fmt: skip
    for group in range(weight.shape[0]):
        w, m8, g32 = weight[group], exp_avg[group], grad[group]
        was = np.int32(np.int32(exp_avg_scale[group]) << 23)
        largest = np.int32(0)
        for i in range(GROUP):
            _, m = lion_of(_signed_of(m8[i], was), g32[i] * grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2)
            largest = max(largest, bits_of_float(abs(m)))
        exp_avg_scale[group] = scale = scale_of(largest, SIGNED_BINADES)
        now, number = np.int32(scale << 23), first + group * GROUP
        for i in range(GROUP):
            sign, m = lion_of(_signed_of(m8[i], was), g32[i] * grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2)
            m8[i] = signed_code(m, now, uint32(hash_of(number + i, key) & uint32(0xFFFF)))
            w[i] = w[i] * decay + minus_lr * sign


HALVES, BYTES, SINGLES, SCALES = int16[:, ::1], uint8[:, ::1], float32[:, ::1], uint8[::1]


@cache
def adamw_split_int8() -> Kernel:
    """`kernels.adamw_split` over rows of a GROUP: arrays are [groups, GROUP], moments uint8, behind each its scales, uint8 [groups]."""
    arrays = (HALVES, HALVES, BYTES, SCALES, BYTES, SCALES, HALVES)
    return compiled(_adamw_split_int8, void(*arrays, int64, uint32, *SCALARS))


@cache
def adamw_float32_int8() -> Kernel:
    """`kernels.adamw_float32`, over rows as `adamw_split_int8`."""
    return compiled(_adamw_float32_int8, void(SINGLES, BYTES, SCALES, BYTES, SCALES, SINGLES, int64, uint32, *SCALARS))


@cache
def lion_split_int8() -> Kernel:
    """`lion_kernels.lion_split`, over rows as `adamw_split_int8`."""
    return compiled(_lion_split_int8, void(HALVES, HALVES, BYTES, SCALES, HALVES, int64, uint32, *LION_SCALARS))


@cache
def lion_float32_int8() -> Kernel:
    """`lion_kernels.lion_float32`, over rows as `adamw_split_int8`."""
    return compiled(_lion_float32_int8, void(SINGLES, BYTES, SCALES, SINGLES, int64, uint32, *LION_SCALARS))

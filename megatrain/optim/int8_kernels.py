"""AdamW and Lion on the host with moments of 8 bits, compiled by Numba as kernels.py's are.

A GROUP of 64 consecutive elements shares a scale, a power of two c. A magnitude a is kept as what
a + c has above c: with the bits of float32 read as integers,

    code = (bits(a + c) - bits(c)) >> 20        three bits of mantissa
    a    = float(bits(c) + (code << 20)) - c

so that codes are even steps of c / 8 below c, grow by an eighth of a binade above it, and 0 is
zero: no branch, no table. c follows the largest magnitude M of the group: a moment with a sign has
127 codes above zero, from M / 2^18 on, one without has 255, from M / 2^34 on. Scales are kept as
c's exponent, so a group of zeros has scale 0 and stays zero.

Codes are rounded stochastically, as kernels.py says why. One exception: a second moment above zero
never becomes zero. The first moment would then be divided by eps alone; so it is divided by
M / 2^34 at least, and the update of such an element is too small instead of enormous.

An update of weights uses the moments before they are rounded. The largest magnitude is needed
before the first code can be written, so moments are computed twice: their bytes are in the nearest
cache by then. The order of the lines in the second loop is the one measured to be fastest.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import float32, int16, types, uint8, uint32, void

from megatrain.memory.layout import GROUP
from megatrain.optim.kernels import (
    Kernel,
    adamw_moments,
    bits_of_float,
    compiled,
    constants,
    float_of,
    float_of_bits,
    inlined,
    lion_of,
    low_half,
    master_of,
    random_bits,
    store_master,
)

# why: decision 0019
SIGNED_BINADES, UNSIGNED_BINADES = 15, 31  # from c to the largest magnitude's
# Added to the largest magnitude before its exponent is taken: then neither noise nor c can push a
# code past the last.
MARGIN = 0x1FFFFF


@inlined
def unsigned_of(code: Any, scale: Any) -> Any:
    """The float32 that `code` stands for, `scale` being bits of c."""
    return float_of_bits(np.int32((np.int32(code) << 20) + scale)) - float_of_bits(scale)


@inlined
def signed_of(code: Any, scale: Any) -> Any:
    """The same with the sign in the highest of eight bits."""
    magnitude = unsigned_of(np.int32(code) & 0x7F, scale)
    return float_of_bits(np.int32(bits_of_float(magnitude) | ((np.int32(code) & 0x80) << 24)))


@inlined
def bits_of_scale(exponent: Any) -> Any:
    """Bits of c."""
    return np.int32(np.int32(exponent) << 23)


@inlined
def scale_of(largest: Any, binades: Any) -> Any:
    """c's exponent, for the bits of the largest magnitude."""
    return max(((largest + MARGIN) >> 23) - binades, 0)


@inlined
def code_of(magnitude: Any, scale: Any, noise: Any) -> Any:
    """The code of a magnitude, rounded stochastically by 16 bits of `noise`."""
    above = np.int32(bits_of_float(magnitude + float_of_bits(scale)) - scale)
    return np.int32(above + np.int32((noise << uint32(4)) | uint32(8))) >> 20


@inlined
def signed_code(value: Any, scale: Any, noise: Any) -> Any:
    return np.uint8(code_of(abs(value), scale, noise) | ((bits_of_float(value) >> 24) & 0x80))


@inlined
def positive_code(value: Any, scale: Any, noise: Any) -> Any:
    """A second moment's: not zero unless the value is."""
    return np.uint8(max(code_of(value, scale, noise), np.int32(value > 0)))


def _adamw(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_scale: Any, exp_avg_sq: Any,
    exp_avg_sq_scale: Any, grad: Any, first: Any, seed: Any, scalars: Any,
) -> None:  # fmt: skip
    grad_scale, decay, _, _, _, root_correction2, eps, minus_step_size = scalars
    for group in range(weight.shape[0]):
        m8, v8, grads = exp_avg[group], exp_avg_sq[group], grad[group]
        was_m, was_v = bits_of_scale(exp_avg_scale[group]), bits_of_scale(exp_avg_sq_scale[group])
        largest_m = largest_v = np.int32(0)
        for i in range(GROUP):
            g = float_of(grads[i]) * grad_scale
            m, v = adamw_moments(g, signed_of(m8[i], was_m), unsigned_of(v8[i], was_v), scalars)
            largest_m = max(largest_m, bits_of_float(abs(m)))
            largest_v = max(largest_v, bits_of_float(v))
        exp_avg_scale[group] = scale_m = scale_of(largest_m, SIGNED_BINADES)
        exp_avg_sq_scale[group] = scale_v = scale_of(largest_v, UNSIGNED_BINADES)
        now_m, now_v = bits_of_scale(scale_m), bits_of_scale(scale_v)
        number = first + group * GROUP
        for i in range(GROUP):
            master = master_of(weight, remainder, (group, i))
            g = float_of(grads[i]) * grad_scale
            m, v = adamw_moments(g, signed_of(m8[i], was_m), unsigned_of(v8[i], was_v), scalars)
            denominator = math.sqrt(v) / root_correction2 + eps
            master = master * decay + (minus_step_size * m) / denominator
            noise = random_bits(number + i, seed)
            m8[i] = signed_code(m, now_m, low_half(noise))
            v8[i] = positive_code(v, now_v, uint32(noise >> uint32(16)))
            store_master(weight, remainder, (group, i), master)


def _lion(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_scale: Any, grad: Any,
    first: Any, seed: Any, scalars: Any,
) -> None:  # fmt: skip
    grad_scale, decay, _, _, _, _, minus_lr = scalars
    for group in range(weight.shape[0]):
        m8, grads = exp_avg[group], grad[group]
        was, largest = bits_of_scale(exp_avg_scale[group]), np.int32(0)
        for i in range(GROUP):
            g = float_of(grads[i]) * grad_scale
            _, m = lion_of(g, signed_of(m8[i], was), scalars)
            largest = max(largest, bits_of_float(abs(m)))
        exp_avg_scale[group] = scale = scale_of(largest, SIGNED_BINADES)
        now, number = bits_of_scale(scale), first + group * GROUP
        for i in range(GROUP):
            m = signed_of(m8[i], was)
            sign, m = lion_of(float_of(grads[i]) * grad_scale, m, scalars)
            m8[i] = signed_code(m, now, low_half(random_bits(number + i, seed)))
            master = master_of(weight, remainder, (group, i)) * decay + minus_lr * sign
            store_master(weight, remainder, (group, i), master)


HALVES, FULLS = int16[:, ::1], float32[:, ::1]
MOMENT = uint8[:, ::1], uint8[::1]  # codes and scales


@cache
def int8_adamw_kernel(split: bool) -> Kernel:
    """`adamw_kernel` over rows of a GROUP.

    Arrays are [groups, GROUP], moments uint8; behind each moment come its scales, uint8 [groups].
    """
    weight, remainder = (HALVES, HALVES) if split else (FULLS, types.none)
    return compiled(_adamw, void(weight, remainder, *MOMENT, *MOMENT, weight, *constants(8)))


@cache
def int8_lion_kernel(split: bool) -> Kernel:
    """`lion_kernels.lion` over rows of a GROUP, as `int8_adamw_kernel` here."""
    weight, remainder = (HALVES, HALVES) if split else (FULLS, types.none)
    return compiled(_lion, void(weight, remainder, *MOMENT, weight, *constants(7)))

"""Host update kernels of AdamW, Lion and Muon, compiled by Numba.

A kernel reads and writes every array once, so DRAM bounds its speed. What keeps its loop
vectorised: contiguous arrays from their first element (an index range with offsets costs a factor
of six), float32 constants computed outside, `error_model="numpy"` (no branch for a division by
zero), and no call inside: a function is copied into its callers (`inlined`).

One body serves both precisions and several types of moments, as Numba compiles it for each: by its
array's type an element is widened to float32 (`float_of`) and narrowed again (`kept_as`), and where
the weight is the float32 master itself, `remainder` is None and its branches fall away.

AdamW's arithmetic is that of `torch.optim.AdamW` on CPU, operation by operation: `lerp` and
`addcmul` end in one fused multiply-add, everything else is rounded after each operation. Given the
same gradients the moments have its bits; the weights may differ by a rounding, because torch takes
its square roots from MKL, which are not always the nearest, and these are. Lion's arithmetic is
plain PyTorch's: `mul_`, then `add_` with alpha, which is one fused multiply-add. No fastmath: a
contraction that the compiler chooses would change the last bit from machine to machine.

Moments in bfloat16 are rounded stochastically, which keeps their mean: the second moment moves by a
thousandth a step, less than half a step of bfloat16, and to the nearest it would never move. The
random bits are a hash of the element's number and the step, so that threads, cuts into ranges and
devices change nothing.

Moments of 8 bits: a GROUP of 64 consecutive elements shares a scale, a power of two c. A magnitude
a is kept as what a + c has above c: with the bits of float32 read as integers,

    code = (bits(a + c) - bits(c)) >> 20        three bits of mantissa
    a    = float(bits(c) + (code << 20)) - c

so that codes are even steps of c / 8 below c, grow by an eighth of a binade above it, and 0 is
zero: no branch, no table. c follows the largest magnitude M of the group: a moment with a sign has
127 codes above zero, from M / 2^18 on, one without has 255, from M / 2^34 on. Scales are kept as
c's exponent, so a group of zeros has scale 0 and stays zero.

Codes are rounded stochastically, too. One exception: a second moment above zero
never becomes zero. The first moment would then be divided by eps alone; so it is divided by
M / 2^34 at least, and the update of such an element is too small instead of enormous.

An update of weights uses the moments before they are rounded. The largest magnitude is needed
before the first code can be written, so moments are computed twice: their bytes are in the nearest
cache by then. The order of the lines in the second loop is the one measured to be fastest.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int16, int32, int64, njit, types, uint8, uint32, void
from numba.extending import intrinsic

from megatrain.errors import logger
from megatrain.memory.layout import GROUP

Kernel = Callable[..., None]

I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def in_llvm(function: Callable[..., Any]) -> Any:
    """A function whose LLVM instructions are written by hand, from (signature, builder of them)."""
    return intrinsic(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A function that Numba copies into its callers."""
    return njit(function, inline="always")


@in_llvm
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """int32 -> the float32 with these bits."""
    return float32(int32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)


@in_llvm
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """float32 -> its bits as int32."""
    return int32(float32), lambda context, builder, sig, args: builder.bitcast(args[0], I32)


@in_llvm
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once; slow, but still right, on processors without it."""
    signature = float32(float32, float32, float32)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


@in_llvm
def float_of(typingctx: Any, element: Any) -> Any:
    """An element as float32: itself, or the bfloat16 value of an int16's bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if element == float32:
            return args[0]
        wide = builder.shl(builder.zext(args[0], I32), I32(16))
        return builder.bitcast(wide, F32)

    return float32(element), codegen


@in_llvm
def kept_as(typingctx: Any, like: Any, value: Any, noise: Any) -> Any:
    """float32 `value` in the type of `like`: itself, or as int16 the bits of bfloat16. `noise`,
    uint32 below 2^16, is added below them: random for stochastic rounding."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if like == float32:
            return args[1]
        bits = builder.add(builder.bitcast(args[1], I32), args[2])
        return builder.trunc(builder.lshr(bits, I32(16)), I16)

    return like(like, float32, uint32), codegen


@inlined
def master_of(weight: Any, remainder: Any, i: Any) -> Any:
    """Element `i` of the float32 master weight: split in two halves (split.py), or `weight`'s."""
    if remainder is None:
        return float_of(weight[i])
    return float_of_bits(np.int32((np.int32(weight[i]) << 16) + np.int32(remainder[i])))


@inlined
def store_master(weight: Any, remainder: Any, i: Any, master: Any) -> None:
    """The reverse of `master_of`."""
    if remainder is None:
        weight[i] = kept_as(weight[i], master, uint32(0))
    else:
        bits = bits_of_float(master)
        weight[i] = np.int16(np.int32(bits + np.int32(0x8000)) >> 16)
        remainder[i] = np.int16(bits)


# why: decision 0018
@inlined
def random_bits(number: Any, seed: Any) -> Any:
    """32 bits for an element: Wellons' lowbias32, each depends on every bit of `number`."""
    x = uint32(uint32(number) ^ seed)
    x = uint32(uint32(x ^ uint32(x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ uint32(x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ uint32(x >> uint32(16)))


def seed_of(step: int) -> np.uint32:
    """Stochastic-rounding seed of a step."""
    with np.errstate(over="ignore"):
        return np.uint32(random_bits.py_func(step, np.uint32(0)))


@inlined
def low_half(bits: Any) -> Any:
    return uint32(bits & uint32(0xFFFF))


@inlined
def adamw_moments(g: Any, m: Any, v: Any, scalars: Any) -> Any:
    """The next moments, from the scaled gradient."""
    _, _, beta2, one_minus_beta1, one_minus_beta2, _, _, _ = scalars
    return fma(g - m, one_minus_beta1, m), fma(one_minus_beta2 * g, g, v * beta2)


def _adamw(
    weight: Any, remainder: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any,
    first: Any, seed: Any, scalars: Any,
) -> None:  # fmt: skip
    grad_scale, decay, _, _, _, root_correction2, eps, minus_step_size = scalars
    for i in range(weight.size):
        g = float_of(grad[i]) * grad_scale
        m, v = adamw_moments(g, float_of(exp_avg[i]), float_of(exp_avg_sq[i]), scalars)
        denominator = math.sqrt(v) / root_correction2 + eps
        noise = random_bits(first + i, seed)
        exp_avg[i] = kept_as(exp_avg[i], m, low_half(noise))
        exp_avg_sq[i] = kept_as(exp_avg_sq[i], v, uint32(noise >> uint32(16)))
        master = master_of(weight, remainder, i) * decay + (minus_step_size * m) / denominator
        store_master(weight, remainder, i, master)


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


# -- moments of 8 bits --

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
def _code_of(magnitude: Any, scale: Any, noise: Any) -> Any:
    """The code of a magnitude, rounded stochastically by 16 bits of `noise`."""
    above = np.int32(bits_of_float(magnitude + float_of_bits(scale)) - scale)
    return np.int32(above + np.int32((noise << uint32(4)) | uint32(8))) >> 20


@inlined
def signed_code(value: Any, scale: Any, noise: Any) -> Any:
    return np.uint8(_code_of(abs(value), scale, noise) | ((bits_of_float(value) >> 24) & 0x80))


@inlined
def positive_code(value: Any, scale: Any, noise: Any) -> Any:
    """A second moment's: not zero unless the value is."""
    return np.uint8(max(_code_of(value, scale, noise), np.int32(value > 0)))


def _adamw_int8(
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


def _lion_int8(
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


# -- Muon --


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


HALF, FULL = int16[::1], float32[::1]
HALVES, FULLS = int16[:, ::1], float32[:, ::1]
CODES = uint8[:, ::1], uint8[::1]  # and scales
# By name: the body with moments in floating point, with moments of 8 bits; moments, scalars.
BODIES: dict[str, tuple[Kernel, Kernel, int, int]] = {
    "adamw": (_adamw, _adamw_int8, 2, 8),
    "lion": (_lion, _lion_int8, 1, 7),
}


@cache
def range_kernel(name: str, split: bool, moments: str) -> Kernel:
    """An update of flat arrays of equal length.

    Arguments: weight and remainder (int16, the weight's being bits of bfloat16; if not `split` the
    float32 master and None), each of the moments (float32, or int16: bits of bfloat16), grad (of
    the weight's type), the number of the first element in the model, the step's seed, and the
    optimizer's `scalars`. With int8 moments arrays are [groups, GROUP], and behind each moment,
    uint8, come its scales, uint8 [groups].
    """
    plain, of_codes, count, scalars = BODIES[name]
    scaled = moments == "int8"
    half, full = (HALVES, FULLS) if scaled else (HALF, FULL)
    weight, remainder = (half, half) if split else (full, types.none)
    moment = CODES if scaled else (HALF if moments == "bfloat16" else FULL,)
    constants = int64, uint32, types.UniTuple(float32, scalars)  # type: ignore[no-untyped-call]
    body = of_codes if scaled else plain
    return _compiled(body, void(weight, remainder, *moment * count, weight, *constants))


@cache
def muon_direction_kernel(split: bool) -> Kernel:
    """The next momentum, and the direction to be made orthogonal, over arrays of equal length.
    Arguments: exp_avg (float32), grad (if `split` int16: bits of bfloat16, else float32), direction
    (int16), and as float32 grad_scale, 1 - momentum, share. The direction is a mean of momentum and
    gradient, in which the gradient has `share`, rounded to the nearest bfloat16."""
    grad = HALF if split else FULL
    return _compiled(_direct, void(FULL, grad, HALF, float32, float32, float32))


@cache
def muon_update_kernel(split: bool) -> Kernel:
    """The update by an orthogonal direction. Arguments: weight and remainder as those of
    `range_kernel`, direction (int16: bits of bfloat16), and as float32 1 - lr * weight_decay and
    -lr times the rate of the matrix's shape."""
    weight, remainder = (HALF, HALF) if split else (FULL, types.none)
    return _compiled(_apply, void(weight, remainder, HALF, float32, float32))


def _compiled(function: Kernel, signature: Any) -> Kernel:
    """`function` as machine code that runs without the GIL.

    It is kept on disk between runs: Numba looks for a folder next to this file, then in the user's
    cache. That none can be written (RuntimeError), that the disk is full, or that a power cut left
    half a file must not stop a run: compiling anew costs a second.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        kernel: Kernel = njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        logger.warning(
            f"the compiled optimizer kernel cannot be cached on disk ({error}); "
            "set NUMBA_CACHE_DIR to an empty folder to mend it"
        )
        kernel = njit(signature, **options)(function)
    return kernel

"""AdamW on the GPU, for blocks whose state lives there: the formula of kernels.py, operation by operation, and so its bits.

Every intrinsic below names its rounding, so no contraction can change a bit between the two. A thread takes four elements, loaded and
stored as vectors; arrays are read and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatrain import cuda

VECTOR = 4  # elements a thread; the layouts' alignment of 64 makes every range a multiple of it

SOURCE = r"""
struct __align__(8) Half4 { unsigned short x[4]; };
struct __align__(16) Float4 { float x[4]; };

// Scalars come as the bits of float32, which any launcher passes unchanged.
struct Scalars { float grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, root_correction2, eps, minus_step_size; };

__device__ float updated(float master, float g, float& m, float& v, const Scalars& s) {
    g = __fmul_rn(g, s.grad_scale);
    m = __fmaf_rn(__fsub_rn(g, m), s.one_minus_beta1, m);
    v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(v, s.beta2));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction2), s.eps);
    return __fadd_rn(__fmul_rn(master, s.decay), __fdiv_rn(__fmul_rn(s.minus_step_size, m), denominator));
}

__device__ float of_bfloat16(unsigned int bits) { return __uint_as_float(bits << 16); }

// To the nearest bfloat16, ties to even, as the gradients of blocks on the host are rounded before they travel. Of finite values.
__device__ float rounded_to_bfloat16(float value) {
    unsigned int bits = __float_as_uint(value);
    return __uint_as_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

template <typename Grad4> __device__ float gradient(const Grad4& grad, int k);
template <> __device__ float gradient(const Half4& grad, int k) { return of_bfloat16(grad.x[k]); }
template <> __device__ float gradient(const Float4& grad, int k) { return rounded_to_bfloat16(grad.x[k]); }

__device__ float moment(const Half4& moments, int k) { return of_bfloat16(moments.x[k]); }
__device__ float moment(const Float4& moments, int k) { return moments.x[k]; }
__device__ void keep(Half4& moments, int k, float value, unsigned int chance) {
    moments.x[k] = (unsigned short)((__float_as_uint(value) + chance) >> 16);
}
__device__ void keep(Float4& moments, int k, float value, unsigned int chance) { moments.x[k] = value; }

__device__ unsigned int hash_of(unsigned int number, unsigned int key) {
    unsigned int x = number ^ key;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

template <typename Moments4>
__device__ float next(float master, float g, Moments4& exp_avg, Moments4& exp_avg_sq, int k,
                      unsigned int number, unsigned int key, const Scalars& s) {
    float m = moment(exp_avg, k), v = moment(exp_avg_sq, k);
    float result = updated(master, g, m, v, s);
    unsigned int chance = hash_of(number, key);
    keep(exp_avg, k, m, chance & 0xFFFFu);
    keep(exp_avg_sq, k, v, chance >> 16);
    return result;
}

template <typename Grad4, typename Moments4>
__device__ void split(Half4* weight, Half4* remainder, Moments4* exp_avg, Moments4* exp_avg_sq, const Grad4* grad,
                      unsigned int n, unsigned int first, unsigned int key, Scalars s) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Half4 w = weight[i], r = remainder[i];
    Moments4 m = exp_avg[i], v = exp_avg_sq[i];
    Grad4 g = grad[i];
    for (int k = 0; k < 4; ++k) {
        float master = __uint_as_float(((unsigned int)w.x[k] << 16) + (unsigned int)(int)(short)r.x[k]);
        unsigned int bits = __float_as_uint(next(master, gradient(g, k), m, v, k, first + 4 * i + k, key, s));
        w.x[k] = (unsigned short)((bits + 0x8000u) >> 16);
        r.x[k] = (unsigned short)bits;
    }
    weight[i] = w; remainder[i] = r; exp_avg[i] = m; exp_avg_sq[i] = v;
}

template <typename Moments4>
__device__ void whole(Float4* weight, Moments4* exp_avg, Moments4* exp_avg_sq, const Float4* grad,
                      unsigned int n, unsigned int first, unsigned int key, Scalars s) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Float4 w = weight[i], g = grad[i];
    Moments4 m = exp_avg[i], v = exp_avg_sq[i];
    for (int k = 0; k < 4; ++k) w.x[k] = next(w.x[k], g.x[k], m, v, k, first + 4 * i + k, key, s);
    weight[i] = w; exp_avg[i] = m; exp_avg_sq[i] = v;
}

#define NUMBERS int n, int first, int key, int a, int b, int c, int d, int e, int f, int g, int h
#define F(x) __int_as_float(x)
#define GIVEN n, first, key, Scalars{F(a), F(b), F(c), F(d), F(e), F(f), F(g), F(h)}
#define SPLIT(name, Moments4, Grad4) \
    extern "C" __global__ void name( \
        Half4* weight, Half4* remainder, Moments4* exp_avg, Moments4* exp_avg_sq, const Grad4* grad, NUMBERS) { \
        split(weight, remainder, exp_avg, exp_avg_sq, grad, GIVEN); \
    }
#define WHOLE(name, Moments4) \
    extern "C" __global__ void name(Float4* weight, Moments4* exp_avg, Moments4* exp_avg_sq, const Float4* grad, NUMBERS) { \
        whole(weight, exp_avg, exp_avg_sq, grad, GIVEN); \
    }

SPLIT(adamw_split, Float4, Half4)
SPLIT(adamw_split_of_sums, Float4, Float4)
SPLIT(adamw_split_bf16, Half4, Half4)
SPLIT(adamw_split_bf16_of_sums, Half4, Float4)
WHOLE(adamw_float32, Float4)
WHOLE(adamw_float32_bf16, Half4)
"""


def launch(name: str, arrays: Sequence[Tensor], first: int, key: int, scalars: Sequence[Any]) -> None:
    """Enqueue kernel `name` over equally long CUDA `arrays` on the current stream.

    Kernels are named as kernels.py's, and take the same arrays; with "_of_sums" behind the name the gradient is fp32, and is rounded to
    bfloat16 first. `first` and `key` are what stochastic rounding hangs on, `scalars` the eight float32 constants.
    """
    count = cuda.vectors(arrays, VECTOR)
    assert count is not None, [(tuple(array.shape), array.dtype) for array in arrays]
    numbers = [count, *map(cuda.signed, (first, key)), *map(cuda.float_bits, scalars)]
    cuda.launch(SOURCE, name, count, arrays, numbers)

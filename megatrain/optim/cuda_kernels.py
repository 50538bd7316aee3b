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

template <typename Grad4>
__device__ void split(Half4* weight, Half4* remainder, Float4* exp_avg, Float4* exp_avg_sq, const Grad4* grad, unsigned int n, Scalars s) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Half4 w = weight[i], r = remainder[i];
    Float4 m = exp_avg[i], v = exp_avg_sq[i];
    Grad4 g = grad[i];
    for (int k = 0; k < 4; ++k) {
        float master = __uint_as_float(((unsigned int)w.x[k] << 16) + (unsigned int)(int)(short)r.x[k]);
        unsigned int bits = __float_as_uint(updated(master, gradient(g, k), m.x[k], v.x[k], s));
        w.x[k] = (unsigned short)((bits + 0x8000u) >> 16);
        r.x[k] = (unsigned short)bits;
    }
    weight[i] = w; remainder[i] = r; exp_avg[i] = m; exp_avg_sq[i] = v;
}

#define SCALARS int a, int b, int c, int d, int e, int f, int g, int h
#define F(x) __int_as_float(x)
#define GIVEN Scalars{F(a), F(b), F(c), F(d), F(e), F(f), F(g), F(h)}

extern "C" __global__ void adamw_split(
    Half4* weight, Half4* remainder, Float4* exp_avg, Float4* exp_avg_sq, const Half4* grad, int n, SCALARS) {
    split(weight, remainder, exp_avg, exp_avg_sq, grad, n, GIVEN);
}

extern "C" __global__ void adamw_split_of_sums(
    Half4* weight, Half4* remainder, Float4* exp_avg, Float4* exp_avg_sq, const Float4* grad, int n, SCALARS) {
    split(weight, remainder, exp_avg, exp_avg_sq, grad, n, GIVEN);
}

extern "C" __global__ void adamw_float32(Float4* weight, Float4* exp_avg, Float4* exp_avg_sq, const Float4* grad, int n, SCALARS) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)n) return;
    Scalars s = GIVEN;
    Float4 w = weight[i], m = exp_avg[i], v = exp_avg_sq[i], g_ = grad[i];
    for (int k = 0; k < 4; ++k) w.x[k] = updated(w.x[k], g_.x[k], m.x[k], v.x[k], s);
    weight[i] = w; exp_avg[i] = m; exp_avg_sq[i] = v;
}
"""


def launch(name: str, arrays: Sequence[Tensor], scalars: Sequence[Any]) -> None:
    """Enqueue kernel `name` over equally long CUDA `arrays` on the current stream; `scalars` are its eight float32 constants.

    Kernels: "adamw_split" and "adamw_split_of_sums" take weight, remainder, exp_avg, exp_avg_sq and a gradient in bfloat16 or fp32 (which
    is rounded to bfloat16 first); "adamw_float32" takes weight, exp_avg, exp_avg_sq, grad.
    """
    count = cuda.vectors(arrays, VECTOR)
    assert count is not None, [(tuple(array.shape), array.dtype) for array in arrays]
    cuda.launch(SOURCE, name, count, arrays, [count, *map(cuda.float_bits, scalars)])

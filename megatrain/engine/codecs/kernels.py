"""The codecs on CUDA: the package's formula, operation by operation, with the same bits.

Each element is read once, and its code written once. A thread takes eight elements, whose codes
fill as many bytes as a code has bits; neighbouring threads find a group's largest magnitude
together. Every intrinsic names its rounding.
"""

from __future__ import annotations

from torch import Tensor

from megatrain import cuda
from megatrain.schedule import Form

ELEMENTS = 8  # a thread's

SOURCE = r"""
typedef unsigned int word;
typedef unsigned long long codes;  // of eight elements
struct __align__(16) Word4 { word x[4]; };

__device__ float value(const unsigned short* values, int i) {
    return __uint_as_float((word)values[i] << 16);
}
__device__ float value(const float* values, int i) { return values[i]; }

__device__ unsigned short bfloat16(float x) {
    word bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
__device__ void keep(unsigned short* values, int i, float x) { values[i] = bfloat16(x); }
__device__ void keep(float* values, int i, float x) { values[i] = x; }

// Eight from `first` on: as vectors where all are there, else one by one, and zeros beyond the end.
template <typename T> struct __align__(16) Eight { T x[8]; };
template <typename T>
__device__ void load(Eight<T>& eight, const T* values, long long first, int n) {
    if (first + 8 <= n) {
        const Word4* from = (const Word4*)(values + first);
        for (int i = 0; i < sizeof(Eight<T>) / 16; ++i) ((Word4*)&eight)[i] = from[i];
    } else {
        for (int i = 0; i < 8; ++i) eight.x[i] = first + i < n ? values[first + i] : (T)0;
    }
}
template <typename T>
__device__ void store(T* values, const Eight<T>& eight, long long first, int n) {
    if (first + 8 <= n) {
        Word4* to = (Word4*)(values + first);
        for (int i = 0; i < sizeof(Eight<T>) / 16; ++i) to[i] = ((const Word4*)&eight)[i];
    } else {
        for (int i = 0; i < 8 && first + i < n; ++i) values[first + i] = eight.x[i];
    }
}

// A group, of which each of `sharing` neighbouring threads has eight, times the Hadamard matrix.
__device__ void turn(float* x, int sharing) {
    for (int distance = 1; distance < 8; distance *= 2) {
        for (int k = 0; k < 8; ++k) {
            if (k & distance) continue;
            float low = x[k], high = x[k + distance];
            x[k] = __fadd_rn(low, high);
            x[k + distance] = __fsub_rn(low, high);
        }
    }
    for (int distance = 1; distance < sharing; distance *= 2) {
        for (int k = 0; k < 8; ++k) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, x[k], distance);
            x[k] = threadIdx.x & distance ? __fsub_rn(other, x[k]) : __fadd_rn(x[k], other);
        }
    }
}

template <typename Unit, int BITS> __device__ void write(unsigned char* to, codes packed) {
    for (int i = 0; i < BITS; i += sizeof(Unit)) *(Unit*)(to + i) = (Unit)(packed >> (8 * i));
}
template <typename Unit, int BITS> __device__ codes read(const unsigned char* from) {
    codes packed = 0;
    for (int i = 0; i < BITS; i += sizeof(Unit)) {
        packed |= (codes)*(const Unit*)(from + i) << (8 * i);
    }
    return packed;
}

template <typename T, typename Unit, int BITS>
__device__ void encode(unsigned char* out, unsigned short* scales, const T* hidden, int n,
                       int group, int inverse, int smallest, int cap) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, sharing = group / 8;
    int groups = (n + (long long)group - 1) / group;
    long long first = 8LL * i;
    Eight<T> eight;
    load(eight, hidden, first, n);
    float x[8];
    for (int k = 0; k < 8; ++k) x[k] = __fmul_rn(value(eight.x, k), 1.0f / group);
    turn(x, sharing);
    word most = 0;  // bits of magnitudes are ordered as these are, with infinity and NaN on top
    for (int k = 0; k < 8; ++k) most = max(most, __float_as_uint(x[k]) & 0x7FFFFFFFu);
    for (int distance = sharing / 2; distance; distance /= 2) {
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
    }
    if (i / sharing >= groups) return;  // only now: all threads take part in the shuffles
    float wanted = __fmul_rn(__uint_as_float(most), __int_as_float(inverse));
    wanted = fminf(fmaxf(wanted, __int_as_float(smallest)), __int_as_float(cap));
    word scale = most < 0x7F800000u ? (__float_as_uint(wanted) + 0xFFFFu) >> 16 : 0x7FC0u;
    float factor = __frcp_rn(__uint_as_float(scale << 16));
    codes packed = 0;
    for (int k = 0; k < 8; ++k) {
        float scaled = __fmul_rn(x[k], factor);
        const int largest = (1 << (BITS - 1)) - 1;
        word code = (word)min(max(__float2int_rn(scaled), -largest), largest);
        packed |= (codes)(code & ((1u << BITS) - 1)) << (BITS * k);
    }
    write<Unit, BITS>(out + first / 8 * BITS, packed);
    if (i % sharing == 0) scales[i / sharing] = scale;
}

template <typename T, typename Unit, int BITS>
__device__ void decode(T* hidden, const unsigned char* from, const unsigned short* scales, int n,
                       int group) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, sharing = group / 8;
    int groups = (n + (long long)group - 1) / group;
    long long first = 8LL * i;
    bool inside = i / sharing < groups;
    codes packed = inside ? read<Unit, BITS>(from + first / 8 * BITS) : 0;
    float scale = inside ? __uint_as_float((word)scales[i / sharing] << 16) : 0.0f, x[8];
    for (int k = 0; k < 8; ++k) {
        word code = (word)(packed >> (BITS * k)) & ((1u << BITS) - 1);
        float number = (float)((int)(code << (32 - BITS)) >> (32 - BITS));  // with its sign
        x[k] = __fmul_rn(number, scale);
    }
    turn(x, sharing);  // all threads take part in its shuffles
    if (!inside) return;
    Eight<T> eight;
    for (int k = 0; k < 8; ++k) keep(eight.x, k, x[k]);
    store(hidden, eight, first, n);
}

#define CODEC(T, type, Unit, BITS) \
    extern "C" __global__ void encode_int##BITS##_##type( \
            unsigned char* out, unsigned short* scales, const T* hidden, int n, int group, \
            int a, int b, int c) { \
        encode<T, Unit, BITS>(out, scales, hidden, n, group, a, b, c); \
    } \
    extern "C" __global__ void decode_int##BITS##_##type( \
            T* hidden, const unsigned char* from, const unsigned short* scales, \
            int n, int group) { \
        decode<T, Unit, BITS>(hidden, from, scales, n, group); \
    }
#define BOTH(Unit, BITS) \
    CODEC(unsigned short, bfloat16, Unit, BITS) \
    CODEC(float, float32, Unit, BITS)

BOTH(codes, 8)
BOTH(unsigned short, 6)
BOTH(word, 4)
"""


def encode(
    hidden: Tensor, codes: Tensor, scales: Tensor, form: Form, limits: tuple[float, float, float]
) -> None:
    """Write flat bf16 or fp32 `hidden`, of less than 2^31 elements, to `codes` and `scales`.

    limits: (inverse, smallest, cap): a scale is a group's largest magnitude times `inverse`, from
        `smallest` to `cap`.
    """
    hidden = hidden if hidden.data_ptr() % 16 == 0 else hidden.clone()  # vectors are loaded
    numbers = [hidden.numel(), form.group, *map(cuda.float_bits, limits)]
    _launch("encode", form, hidden, [codes, scales, hidden], numbers)


def decode(codes: Tensor, scales: Tensor, hidden: Tensor, form: Form) -> None:
    """Write to flat `hidden` what `encode` kept of it."""
    _launch("decode", form, hidden, [hidden, codes, scales], [hidden.numel(), form.group])


def _launch(
    verb: str, form: Form, hidden: Tensor, tensors: list[Tensor], numbers: list[int]
) -> None:
    assert hidden.numel() < 1 << 31  # kernels count elements in 32 bits
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    name = f"{verb}_int{form.bits}_{str(hidden.dtype).removeprefix('torch.')}"
    cuda.launch(
        SOURCE, name, form.groups(hidden.numel()) * form.group // ELEMENTS, tensors, numbers
    )

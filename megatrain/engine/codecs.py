"""Codecs: hidden states in fewer bits between forward and backward.

Elements are taken in groups, row after row, and every group has a scale: its largest magnitude over
the largest code, as a bfloat16 that is rounded up, so that no code is cut off. Codes are integers,
rounded to the nearest, ties to even. A group is first rotated by a Hadamard transform, which
spreads its few large elements over all (Ashkboos et al., 2024: QuaRot). A group with an element
that is not finite comes back as NaN, whole. On the CPU this is plain PyTorch; on CUDA two kernels
have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatrain import cuda
from megatrain.schedule import FORMS, SCALE_BYTES, Form

SMALLEST_SCALE = 1e-30  # what is smaller than half of it becomes zero; inverses stay finite
NAN = 0x7FC0  # bfloat16
ELEMENTS = 8  # their codes are packed together, into as many bytes as a code has bits
AT_ONCE = 1 << 30  # elements, whole groups of every form: kernels count them in 32 bits


# The formula on CUDA, operation by operation, with the same bits. A thread takes eight elements,
# whose codes fill as many bytes as a code has bits; neighbouring threads find a group's largest
# magnitude together. Every intrinsic names its rounding.
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


@dataclass(frozen=True)
class GroupScaled:
    """Hidden states of any shape, bfloat16 or float32, as integers of `form.bits` bits and back."""

    form: Form

    @property
    def largest(self) -> float:
        """The code of a group's largest magnitude."""
        return float((1 << self.form.bits - 1) - 1)

    @property
    def scale_cap(self) -> float:
        """The largest scale, a bfloat16: with it the largest code is still a finite bfloat16."""
        cap = torch.finfo(torch.bfloat16).max / self.largest * (1 - 2**-8)
        return float(torch.tensor(cap, dtype=torch.bfloat16))

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""
        return self.form.nbytes(numel)

    def encode(self, hidden: Tensor, out: Tensor) -> None:
        """Write `hidden` to `out`, uint8 [nbytes], on the same device, aligned to 16 bytes."""
        limits = map(cuda.float_bits, (1 / self.largest, SMALLEST_SCALE, self.scale_cap))
        numbers = [self.form.group, *limits]
        for values, codes, scales in self._pieces(hidden.reshape(-1), out):
            if hidden.is_cuda:
                # vectors are loaded
                values = values if values.data_ptr() % 16 == 0 else values.clone()
                self._launch("encode", values, [codes, scales, values], numbers)
            else:
                self._encode(values, codes, scales)

    def decode(self, flat: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor of what `encode` wrote to `flat`."""
        hidden = torch.empty(shape, dtype=dtype, device=flat.device)
        for values, codes, scales in self._pieces(hidden.view(-1), flat):
            if flat.is_cuda:
                self._launch("decode", values, [values, codes, scales], [self.form.group])
            else:
                values.copy_(self._decoded(codes, scales)[: values.numel()])
        return hidden

    def _launch(self, verb: str, hidden: Tensor, tensors: list[Tensor], more: list[int]) -> None:
        """Run a kernel on flat bf16 or fp32 `hidden`."""
        numel, dtype = hidden.numel(), str(hidden.dtype).removeprefix("torch.")
        assert numel < 1 << 31  # kernels count elements in 32 bits
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        threads = self.form.groups(numel) * self.form.group // ELEMENTS
        cuda.launch(SOURCE, f"{verb}_int{self.form.bits}_{dtype}", threads, tensors, [numel, *more])

    def _pieces(self, values: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of AT_ONCE elements each, of their codes, uint8 [elements / 8, bits], and of their
        scales, int16 [groups]."""
        per_group = self.form.group * self.form.bits // 8
        codes_end = flat.numel() // (per_group + SCALE_BYTES) * per_group
        codes, scales = flat[:codes_end].view(-1, self.form.bits), flat[codes_end:]
        return zip(
            torch.split(values, AT_ONCE),
            torch.split(codes, AT_ONCE // ELEMENTS),
            torch.split(scales.view(torch.int16), AT_ONCE // self.form.group),
            strict=True,
        )

    def _encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The formula. It writes to `codes` and `scales`."""
        group, padding = self.form.group, scales.numel() * self.form.group - values.numel()
        groups = functional.pad(values.float(), (0, padding)).view(-1, group) * (1 / group)
        groups = turned(groups)
        most = groups.abs().amax(1)
        found = (most * (1 / self.largest)).clamp(SMALLEST_SCALE, self.scale_cap)
        found = found.view(torch.int32) + 0xFFFF >> 16  # to bfloat16, rounded up
        found = torch.where(most.isfinite(), found, NAN)
        scaled = groups * (1 / (found << 16).view(torch.float32)).unsqueeze(1)
        codes.copy_(self._packed(scaled.nan_to_num_(nan=0.0).clamp_(-self.largest, self.largest)))
        scales.copy_(found)

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Whole groups of values, fp32."""
        factors = (scales.to(torch.int32) << 16).view(torch.float32).unsqueeze(1)
        return turned(self._unpacked(codes).view(-1, self.form.group) * factors).view(-1)

    def _packed(self, scaled: Tensor) -> Tensor:
        """Codes of eight elements each, in two's complement, the first in the lowest bits."""
        codes = scaled.round_().to(torch.int64).view(-1, ELEMENTS) & (1 << self.form.bits) - 1
        together = (codes << self._shifts).sum(1)  # bits do not meet, so this is their union
        return together.unsqueeze(1).view(torch.uint8)[:, : self.form.bits]

    def _unpacked(self, codes: Tensor) -> Tensor:
        """The values of packed codes, fp32."""
        together = functional.pad(codes, (0, ELEMENTS - self.form.bits)).view(torch.int64)
        unused = 64 - self.form.bits
        return (together << unused - self._shifts >> unused).float()  # back: with its sign

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(ELEMENTS) * self.form.bits


def turned(groups: Tensor) -> Tensor:
    """`groups` [n, a power of two] times the Hadamard matrix of ones and minus ones.

    Applied twice it multiplies by the size of a group.
    """
    # sums of pairs, of pairs of sums and so on, in the order of the kernels
    shape, distance = groups.shape, 1
    while distance < shape[1]:
        low, high = groups.reshape(-1, 2, distance).unbind(1)
        groups = torch.stack((low + high, low - high), 1)
        distance *= 2
    return groups.view(shape)


# why: decision 0024
CODECS = {name: GroupScaled(form) for name, form in FORMS.items()}

"""On CUDA: the fp8 form of a matrix's columns, and of its rows with them, by two kernels that each read it once.

Backward sums gradients and activations along their columns. A compiler's kernel for that walks down columns of a matrix of rows;
measured on an H200, it took 2.5 times as long as the memory needs. Here a tile of the matrix is turned over in shared memory instead, so
that everything is read and written in whole lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain import cuda

TILE = 128  # rows and columns of the matrix that one block of threads takes

SOURCE = r"""
typedef unsigned int word;
struct __align__(16) Word4 { word x[4]; };
struct __align__(8) Word2 { word x[2]; };

const int TILE = 128, ACROSS = TILE / 8;  // 16 threads of a block lie across a tile, 16 down
const float LARGEST = 448.0f;

__device__ word larger(word a, word b) {  // of two pairs of 16-bit numbers
    word low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b, high = a > b ? a : b;
    return (high & 0xFFFF0000u) | (low & 0xFFFFu);
}

// Bits of absolute bfloat16 values are ordered as the values are, NaN above infinity above all others.
template <bool ROWS>
__device__ void maxima(word* of_rows, word* of_columns, const Word4* values, int rows, int columns) {
    __shared__ word found[ACROSS][TILE / 2];
    int across = (columns + TILE - 1) / TILE, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    int column = (blockIdx.x % across) * TILE + 8 * x, first = (blockIdx.x / across) * TILE + y;
    if (first - y >= rows) return;
    Word4 loaded[8];
    for (int i = 0; i < 8; ++i) {
        int row = first + i * ACROSS;
        loaded[i] = {{0, 0, 0, 0}};
        if (row < rows && column < columns) loaded[i] = values[((long long)row * columns + column) / 8];
    }
    word best[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; ++i) {
        word widest = 0;
        for (int k = 0; k < 4; ++k) {
            word magnitude = loaded[i].x[k] & 0x7FFF7FFFu;
            best[k] = larger(best[k], magnitude);
            widest = larger(widest, magnitude);
        }
        if (!ROWS) continue;
        word most = max(widest & 0xFFFFu, widest >> 16);
        for (int distance = ACROSS / 2; distance; distance /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        if (x == 0 && first + i * ACROSS < rows) atomicMax(&of_rows[first + i * ACROSS], most << 16);
    }
    for (int k = 0; k < 4; ++k) found[y][4 * x + k] = best[k];
    __syncthreads();
    if (threadIdx.x >= TILE / 2) return;
    word most = 0;
    for (int k = 0; k < ACROSS; ++k) most = larger(most, found[k][threadIdx.x]);
    int even = (blockIdx.x % across) * TILE + 2 * threadIdx.x;
    if (even >= columns) return;
    atomicMax(&of_columns[even], most << 16);
    atomicMax(&of_columns[even + 1], most & 0xFFFF0000u);
}

__device__ float at_least_smallest(float most) { return most < 1e-30f ? 1e-30f : most; }  // and NaN as it is
__device__ float inverse(float most) { return __fmul_rn(__frcp_rn(at_least_smallest(most)), LARGEST); }
__device__ float scale(float most) { return __fmul_rn(at_least_smallest(most), 1.0f / LARGEST); }

__device__ word pair(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}

// `turned` has columns of `padded` values, a multiple of 16: zeros beyond the rows.
template <bool ROWS>
__device__ void quantize(Word2* straight, float* row_scales, Word4* turned, float* column_scales,
                         const Word4* values, const float* of_rows, const float* of_columns, int rows, int columns, int padded) {
    __shared__ word tile[TILE][TILE / 4 + 1];  // by column; four rows in a word
    int across = (columns + TILE - 1) / TILE, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    int left = (blockIdx.x % across) * TILE, first = (blockIdx.x / across) * TILE, column = left + 8 * x;
    if (first >= padded) return;
    float by_column[8];
    for (int j = 0; j < 8; ++j) {
        float most = column < columns ? of_columns[column + j] : 0.0f;
        by_column[j] = inverse(most);
        if (first == 0 && y == 0 && column < columns) column_scales[column + j] = scale(most);
    }
    for (int half = 0; half < 2; ++half) {
        int four = half * ACROSS + y;
        float values_of[4][8];
        for (int i = 0; i < 4; ++i) {
            int row = first + 4 * four + i;
            bool inside = row < rows && column < columns;
            Word4 loaded = {{0, 0, 0, 0}};
            if (inside) loaded = values[((long long)row * columns + column) / 8];
            for (int k = 0; k < 4; ++k) {
                values_of[i][2 * k] = __uint_as_float(loaded.x[k] << 16);
                values_of[i][2 * k + 1] = __uint_as_float(loaded.x[k] & 0xFFFF0000u);
            }
            if (!ROWS || !inside) continue;
            float most = of_rows[row], by_row = inverse(most);
            if (column == 0) row_scales[row] = scale(most);
            word pairs[4];
            for (int k = 0; k < 4; ++k) pairs[k] = pair(__fmul_rn(values_of[i][2 * k], by_row), __fmul_rn(values_of[i][2 * k + 1], by_row));
            straight[((long long)row * columns + column) / 8] = {{pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16}};
        }
        for (int j = 0; j < 8; ++j) {
            word low = pair(__fmul_rn(values_of[0][j], by_column[j]), __fmul_rn(values_of[1][j], by_column[j]));
            word high = pair(__fmul_rn(values_of[2][j], by_column[j]), __fmul_rn(values_of[3][j], by_column[j]));
            tile[8 * x + j][four] = low | high << 16;
        }
    }
    __syncthreads();
    int sixteen = threadIdx.x % 8, row = first + 16 * sixteen;
    for (int j = threadIdx.x / 8; j < TILE; j += 32) {
        const word* four = &tile[j][4 * sixteen];
        if (left + j < columns && row < padded) {
            turned[((long long)(left + j) * padded + row) / 16] = {{four[0], four[1], four[2], four[3]}};
        }
    }
}

extern "C" __global__ void fp8_maxima_of_both(word* of_rows, word* of_columns, const Word4* values, int rows, int columns) {
    maxima<true>(of_rows, of_columns, values, rows, columns);
}

extern "C" __global__ void fp8_maxima_of_columns(word* of_columns, const Word4* values, int rows, int columns) {
    maxima<false>(0, of_columns, values, rows, columns);
}

extern "C" __global__ void fp8_both(Word2* straight, float* row_scales, Word4* turned, float* column_scales,
                                    const Word4* values, const float* of_rows, const float* of_columns, int rows, int columns, int padded) {
    quantize<true>(straight, row_scales, turned, column_scales, values, of_rows, of_columns, rows, columns, padded);
}

extern "C" __global__ void fp8_columns(Word4* turned, float* column_scales, const Word4* values, const float* of_columns,
                                       int rows, int columns, int padded) {
    quantize<false>(0, 0, turned, column_scales, values, 0, of_columns, rows, columns, padded);
}
"""


# Each is one op, so that a compiler leaves it whole. `padded` is a multiple of 16 as k is, at least n: zeros follow the columns' n values.


@torch.library.custom_op("megatrain::quantize_both", mutates_args=(), device_types="cuda")
def quantize_both(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(e4m3 [n, k], fp32 scales [n, 1], e4m3 [k, padded], fp32 scales [k, 1]) of bf16 `values` [n, k]: the bits of `quantize`."""
    values, (rows, columns) = _whole_lines(values), values.shape
    of_rows, of_columns = (_nothing(count, values) for count in values.shape)
    straight, row_scales, turned, column_scales = written = (*_scaled(values, rows, columns), *_scaled(values, columns, padded))
    _launch("fp8_maxima_of_both", [of_rows, of_columns, values], rows, columns)
    _launch("fp8_both", [*written, values, of_rows, of_columns], rows, columns, padded)
    return straight, row_scales, turned, column_scales


@torch.library.custom_op("megatrain::quantize_columns", mutates_args=(), device_types="cuda")
def quantize_columns(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """(e4m3 [k, padded], fp32 scales [k, 1]) of bf16 `values` [n, k]: the bits of `quantize` of its transpose."""
    values, (rows, columns) = _whole_lines(values), values.shape
    of_columns = _nothing(columns, values)
    turned, column_scales = _scaled(values, columns, padded)
    _launch("fp8_maxima_of_columns", [of_columns, values], rows, columns)
    _launch("fp8_columns", [turned, column_scales, values, of_columns], rows, columns, padded)
    return turned, column_scales


@quantize_both.register_fake
def _both_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = values.shape
    return *_scaled(values, rows, columns), *_scaled(values, columns, padded)


@quantize_columns.register_fake
def _columns_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    return _scaled(values, values.shape[1], padded)


def _scaled(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((rows, columns), dtype=torch.float8_e4m3fn), like.new_empty((rows, 1), dtype=torch.float32)


def _whole_lines(values: Tensor) -> Tensor:
    """Contiguous, and where vectors can be loaded from."""
    values = values.contiguous()
    return values if values.data_ptr() % 16 == 0 else values.clone()


def _nothing(count: int, like: Tensor) -> Tensor:
    """Bits of so many zeros, for the largest values found so far."""
    return torch.zeros(count, dtype=torch.int32, device=like.device)


def _launch(name: str, tensors: list[Tensor], *sizes: int) -> None:
    """`sizes`: rows and columns, and rows with what pads them."""
    tiles = -(-max(sizes[0], sizes[-1] if len(sizes) > 2 else 0) // TILE) * -(-sizes[1] // TILE)
    cuda.launch(SOURCE, name, tiles * cuda.THREADS, tensors, sizes)

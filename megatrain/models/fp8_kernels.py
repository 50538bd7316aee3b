"""On CUDA: a gradient's rows and its columns in fp8, by two kernels that each read it once.

Backward sums a gradient along its rows for one product and along its columns for the other. A compiler's kernel for both walks down columns
of a matrix of rows; measured on an H200, that took 2.5 times as long as the memory needs. Here a tile of the matrix is turned over in
shared memory instead, so that everything is read and written in whole lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain import cuda

TILE = 128  # rows and columns of the matrix that one block of threads takes
VECTOR = 8  # bf16 values that a thread loads at once

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
extern "C" __global__ void fp8_maxima(word* of_rows, word* of_columns, const Word4* values, int rows, int columns) {
    __shared__ word found[ACROSS][TILE / 2];
    int across = (columns + TILE - 1) / TILE, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    int column = (blockIdx.x % across) * TILE + 8 * x, first = (blockIdx.x / across) * TILE;
    if (first >= rows) return;
    word best[4] = {0, 0, 0, 0};
    for (int row = first + y; row < first + TILE; row += ACROSS) {
        Word4 loaded = {{0, 0, 0, 0}};
        if (row < rows && column < columns) loaded = values[((long long)row * columns + column) / 8];
        word widest = 0;
        for (int k = 0; k < 4; ++k) {
            word magnitude = loaded.x[k] & 0x7FFF7FFFu;
            best[k] = larger(best[k], magnitude);
            widest = larger(widest, magnitude);
        }
        word most = max(widest & 0xFFFFu, widest >> 16);
        for (int distance = ACROSS / 2; distance; distance /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        if (x == 0 && row < rows) atomicMax(&of_rows[row], most << 16);
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
extern "C" __global__ void fp8_both(Word2* straight, float* row_scales, word* turned, float* column_scales,
                                    const Word4* values, const float* of_rows, const float* of_columns,
                                    int rows, int columns, int padded) {
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
            if (!inside) continue;
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
    int lane = threadIdx.x % 32, row = first + 4 * lane;
    for (int j = threadIdx.x / 32; j < TILE; j += 8) {
        if (left + j < columns && row < padded) turned[((long long)(left + j) * padded + row) / 4] = tile[j][lane];
    }
}
"""


@torch.library.custom_op("megatrain::quantize_both", mutates_args=(), device_types="cuda")
def quantize_both(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(e4m3 [n, k], fp32 scales [n, 1], e4m3 [k, padded], fp32 scales [k, 1]) of bf16 `values` [n, k], to the bit as `quantize` finds them.

    k is a multiple of 16, and so is `padded`, at least n: zeros follow the columns' n values. One op, so that a compiler leaves it whole.
    """
    values = values.contiguous()
    straight, row_scales, turned, column_scales = written = _empty(values, padded)
    rows, columns = values.shape
    of_rows, of_columns = (torch.zeros(count, dtype=torch.int32, device=values.device) for count in values.shape)
    threads = -(-padded // TILE) * -(-columns // TILE) * cuda.THREADS
    cuda.launch(SOURCE, "fp8_maxima", threads, [of_rows, of_columns, values], [rows, columns])
    cuda.launch(SOURCE, "fp8_both", threads, [*written, values, of_rows, of_columns], [rows, columns, padded])
    return straight, row_scales, turned, column_scales


def _empty(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = values.shape
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    shapes = ((rows, columns), fp8), ((rows, 1), fp32), ((columns, padded), fp8), ((columns, 1), fp32)
    straight, row_scales, turned, column_scales = (values.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
    return straight, row_scales, turned, column_scales


quantize_both.register_fake(_empty)

"""CUDA kernels: the fp8 form of a matrix's columns, alone or with that of its rows.

Backward sums gradients and activations along their columns. A compiler's kernel for that walks down
the columns of a row-major matrix; measured on an H200, it took 2.5 times as long as the memory
needs. Here a tile of the matrix is transposed in shared memory instead, so that everything is read
and written in whole lines. Two kernels each read the matrix once.
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

// ROWS is 1 for rows and columns, 0 for columns alone.
const int TILE = 128, ACROSS = TILE / 8;  // 16 threads of a block lie across a tile, 16 down
const float LARGEST = 448.0f;

__device__ long long at(int row, int columns, int column) {
    return (long long)row * columns + column;
}

__device__ word larger(word a, word b) {  // of two pairs of 16-bit numbers
    word low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b, high = a > b ? a : b;
    return (high & 0xFFFF0000u) | (low & 0xFFFFu);
}

// Bits of absolute bfloat16 values are ordered as the values are, NaN above infinity above others.
extern "C" __global__ void maxima(
    word* of_rows, word* of_columns, const Word4* values, int rows, int columns
) {
    __shared__ word found[ACROSS][TILE / 2];
    int across = (columns + TILE - 1) / TILE, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    int column = (blockIdx.x % across) * TILE + 8 * x, first = (blockIdx.x / across) * TILE + y;
    if (first - y >= rows) return;
    Word4 loaded[8];
    for (int i = 0; i < 8; ++i) {
        int row = first + i * ACROSS;
        loaded[i] = {{0, 0, 0, 0}};
        if (row < rows && column < columns) loaded[i] = values[at(row, columns, column) / 8];
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
        for (int distance = ACROSS / 2; distance; distance /= 2) {
            most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        }
        int row = first + i * ACROSS;
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

__device__ float clamped(float most) { return most < 1e-30f ? 1e-30f : most; }  // NaN stays NaN
__device__ float inverse(float most) { return __fmul_rn(__frcp_rn(clamped(most)), LARGEST); }
__device__ float scale(float most) { return __fmul_rn(clamped(most), 1.0f / LARGEST); }

__device__ word pair(float low, float high, float factor) {
    unsigned short bits;
    float a = __fmul_rn(low, factor), b = __fmul_rn(high, factor);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(b), "f"(a));
    return bits;
}

// `turned` has columns of `padded` values, a multiple of 16: zeros beyond the rows.
extern "C" __global__ void quantize(
    Word2* straight, float* row_scales, Word4* turned, float* column_scales, const Word4* values,
    const float* of_rows, const float* of_columns, int rows, int columns, int padded
) {
    __shared__ word tile[TILE][TILE / 4 + 1];  // by column; four rows in a word
    int across = (columns + TILE - 1) / TILE, x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    int left = (blockIdx.x % across) * TILE, first = (blockIdx.x / across) * TILE;
    int column = left + 8 * x;
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
            if (inside) loaded = values[at(row, columns, column) / 8];
            for (int k = 0; k < 4; ++k) {
                values_of[i][2 * k] = __uint_as_float(loaded.x[k] << 16);
                values_of[i][2 * k + 1] = __uint_as_float(loaded.x[k] & 0xFFFF0000u);
            }
            if (!ROWS || !inside) continue;
            float most = of_rows[row], by_row = inverse(most);
            if (column == 0) row_scales[row] = scale(most);
            word pairs[4];
            for (int k = 0; k < 4; ++k) {
                pairs[k] = pair(values_of[i][2 * k], values_of[i][2 * k + 1], by_row);
            }
            Word2 written = {{pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16}};
            straight[at(row, columns, column) / 8] = written;
        }
        for (int j = 0; j < 8; ++j) {
            word low = pair(values_of[0][j], values_of[1][j], by_column[j]);
            word high = pair(values_of[2][j], values_of[3][j], by_column[j]);
            tile[8 * x + j][four] = low | high << 16;
        }
    }
    __syncthreads();
    int sixteen = threadIdx.x % 8, row = first + 16 * sixteen;
    for (int j = threadIdx.x / 8; j < TILE; j += 32) {
        const word* four = &tile[j][4 * sixteen];
        if (left + j < columns && row < padded) {
            turned[at(left + j, padded, row) / 16] = {{four[0], four[1], four[2], four[3]}};
        }
    }
}
"""


BOTH, COLUMNS = (f"#define ROWS {of_rows}\n{SOURCE}" for of_rows in (1, 0))

# Each is one operator, which a compiler leaves whole. `padded` and k are multiples of 16, `padded`
# is at least n, and zeros follow the n values of a column. The bits are those of fp8.quantize.


@torch.library.custom_op("megatrain::quantize_both", mutates_args=(), device_types="cuda")
def quantize_both(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 [n, k] -> e4m3 [n, k], fp32 scales [n, 1], e4m3 [k, padded], fp32 scales [k, 1]."""
    by_row, by_column = _scaled(values, *values.shape), _scaled(values, values.shape[1], padded)
    _run(values, by_column, padded, by_row)
    return *by_row, *by_column


@torch.library.custom_op("megatrain::quantize_columns", mutates_args=(), device_types="cuda")
def quantize_columns(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """bf16 [n, k] -> e4m3 [k, padded], fp32 scales [k, 1]."""
    by_column = _scaled(values, values.shape[1], padded)
    _run(values, by_column, padded)
    return by_column


@quantize_both.register_fake
def _both_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_scaled(values, *values.shape), *_scaled(values, values.shape[1], padded)


@quantize_columns.register_fake
def _columns_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    return _scaled(values, values.shape[1], padded)


def _scaled(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised e4m3 [rows, columns] and fp32 scales [rows, 1]."""
    values = like.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return values, like.new_empty((rows, 1), dtype=torch.float32)


def _run(
    values: Tensor,
    by_column: tuple[Tensor, Tensor],
    padded: int,
    by_row: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the fp8 form of `values` by column, and that by row if there is memory for it."""
    rows, columns = values.shape
    values = values.contiguous()
    if values.data_ptr() % 16:  # kernels load vectors
        values = values.clone()
    # bits of the largest absolute values found so far; without rows, theirs are not looked at
    of_columns = of_rows = torch.zeros(columns, dtype=torch.int32, device=values.device)
    if by_row is not None:
        of_rows = torch.zeros(rows, dtype=torch.int32, device=values.device)
    source = COLUMNS if by_row is None else BOTH
    across = -(-columns // TILE) * cuda.THREADS
    threads = -(-rows // TILE) * across
    cuda.launch(source, "maxima", threads, [of_rows, of_columns, values], (rows, columns))
    threads = -(-padded // TILE) * across
    tensors = [*(by_row or by_column), *by_column, values, of_rows, of_columns]
    cuda.launch(source, "quantize", threads, tensors, (rows, columns, padded))

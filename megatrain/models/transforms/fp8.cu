// Backward sums gradients and activations along their columns. A compiler's kernel for that walks
// down the columns of a row-major matrix; measured on an H200, it took 2.5 times as long as the
// memory needs. Here a tile of the matrix is transposed in shared memory instead, so that everything
// is read and written in whole lines. Two kernels each read the matrix once.

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

// AdamW and Lion on the GPU, for blocks whose state lives there: the bits of the host's kernels.
//
// The formulas are the host's (kernels.py), operation by operation, and every intrinsic names its
// rounding, so no contraction can change a bit. A thread takes four elements, loaded and stored as
// vectors; arrays are read and written once. optimizer.py launches the kernels.

struct __align__(4) Byte4 { unsigned char x[4]; };
struct __align__(8) Half4 { unsigned short x[4]; };
struct __align__(16) Float4 { float x[4]; };

// Scalars come as the bits of float32, which any launcher passes unchanged.
struct AdamW {
    float grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2,
          root_correction2, eps, minus_step_size;
};
struct Lion { float grad_scale, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, minus_lr; };

// The master weight after one update; moments become the next ones.
__device__ float updated(float master, float g, float& m, float& v, const AdamW& s) {
    g = __fmul_rn(g, s.grad_scale);
    m = __fmaf_rn(__fsub_rn(g, m), s.one_minus_beta1, m);
    v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(v, s.beta2));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_correction2), s.eps);
    return __fadd_rn(__fmul_rn(master, s.decay),
                     __fdiv_rn(__fmul_rn(s.minus_step_size, m), denominator));
}
__device__ float updated(float master, float g, float& m, const Lion& s) {
    g = __fmul_rn(g, s.grad_scale);
    float towards = __fmaf_rn(s.one_minus_beta1, g, __fmul_rn(m, s.beta1));
    m = __fmaf_rn(s.one_minus_beta2, g, __fmul_rn(m, s.beta2));
    float sign = (float)(towards > 0) - (float)(towards < 0);
    return __fadd_rn(__fmul_rn(master, s.decay), __fmul_rn(s.minus_lr, sign));
}

__device__ float of_bfloat16(unsigned int bits) { return __uint_as_float(bits << 16); }

// Finite values to the nearest bfloat16, ties to even, as the gradients of blocks on the host are
// rounded before they travel.
__device__ float rounded_to_bfloat16(float value) {
    unsigned int bits = __float_as_uint(value);
    return __uint_as_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

__device__ unsigned int random_bits(unsigned int number, unsigned int seed) {
    unsigned int x = number ^ seed;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Arrays, four elements a thread. `noise`: 32 random bits an element, of which a moment takes 16,
// from `shift` on.
struct Split {
    Half4 *weight, *remainder;
    __device__ void load(unsigned int i, float* master) const {
        Half4 w = weight[i], r = remainder[i];
        for (int k = 0; k < 4; ++k)
            master[k] = __uint_as_float(((unsigned int)w.x[k] << 16)
                                        + (unsigned int)(int)(short)r.x[k]);
    }
    __device__ void store(unsigned int i, const float* master) const {
        Half4 w, r;
        for (int k = 0; k < 4; ++k) {
            unsigned int bits = __float_as_uint(master[k]);
            w.x[k] = (unsigned short)((bits + 0x8000u) >> 16);
            r.x[k] = (unsigned short)bits;
        }
        weight[i] = w; remainder[i] = r;
    }
    __device__ static float gradient(const Half4& grad, int k) { return of_bfloat16(grad.x[k]); }
    __device__ static float gradient(const Float4& grad, int k) {
        return rounded_to_bfloat16(grad.x[k]);
    }
};
struct Whole {
    Float4* weight;
    __device__ void load(unsigned int i, float* master) const {
        Float4 w = weight[i];
        for (int k = 0; k < 4; ++k) master[k] = w.x[k];
    }
    __device__ void store(unsigned int i, const float* master) const {
        Float4 w;
        for (int k = 0; k < 4; ++k) w.x[k] = master[k];
        weight[i] = w;
    }
    __device__ static float gradient(const Float4& grad, int k) { return grad.x[k]; }
};
struct InFloat32 {
    Float4* moments;
    __device__ void load(unsigned int i, float* values) const {
        Float4 m = moments[i];
        for (int k = 0; k < 4; ++k) values[k] = m.x[k];
    }
    __device__ void store(unsigned int i, const float* values, const unsigned int* noise,
                          int shift) const {
        Float4 m;
        for (int k = 0; k < 4; ++k) m.x[k] = values[k];
        moments[i] = m;
    }
};
struct InBfloat16 {
    Half4* moments;
    __device__ void load(unsigned int i, float* values) const {
        Half4 m = moments[i];
        for (int k = 0; k < 4; ++k) values[k] = of_bfloat16(m.x[k]);
    }
    __device__ void store(unsigned int i, const float* values, const unsigned int* noise,
                          int shift) const {
        Half4 m;
        for (int k = 0; k < 4; ++k)
            m.x[k] = (unsigned short)((__float_as_uint(values[k])
                                       + ((noise[k] >> shift) & 0xFFFFu)) >> 16);
        moments[i] = m;
    }
};

// The largest value of the 16 threads of a group, which are half a warp; the other half may be
// beyond the array's end.
__device__ unsigned int largest_of_group(unsigned int value) {
    unsigned int half = 0xFFFFu << (threadIdx.x & 16);
    for (int apart = 8; apart; apart >>= 1) {
        unsigned int other = __shfl_xor_sync(half, value, apart);
        value = other > value ? other : value;
    }
    return value;
}

// The format of kernels.py: 64 elements share a scale; with a sign the largest has 15 binades
// above it, without 31, and a value above zero then has no code of zero.
template <bool SIGNED> struct InBytes {
    Byte4* moments;
    unsigned char* scales;
    __device__ void load(unsigned int i, float* values) const {
        Byte4 m = moments[i];
        unsigned int scale = (unsigned int)scales[i / 16] << 23;
        for (int k = 0; k < 4; ++k) {
            unsigned int code = SIGNED ? m.x[k] & 0x7Fu : m.x[k],
                         sign = SIGNED ? (m.x[k] & 0x80u) << 24 : 0;
            float magnitude =
                __fsub_rn(__uint_as_float((code << 20) + scale), __uint_as_float(scale));
            values[k] = __uint_as_float(__float_as_uint(magnitude) | sign);
        }
    }
    __device__ void store(unsigned int i, const float* values, const unsigned int* noise,
                          int shift) const {
        unsigned int largest = 0;
        for (int k = 0; k < 4; ++k) {
            unsigned int bits = __float_as_uint(values[k]) & 0x7FFFFFFFu;
            largest = bits > largest ? bits : largest;
        }
        int exponent = (int)((largest_of_group(largest) + 0x1FFFFFu) >> 23) - (SIGNED ? 15 : 31);
        exponent = exponent > 0 ? exponent : 0;
        unsigned int scale = (unsigned int)exponent << 23;
        Byte4 m;
        for (int k = 0; k < 4; ++k) {
            unsigned int bits = __float_as_uint(values[k]);
            float magnitude = __uint_as_float(bits & 0x7FFFFFFFu);
            unsigned int above =
                __float_as_uint(__fadd_rn(magnitude, __uint_as_float(scale))) - scale;
            unsigned int code = (above + (((noise[k] >> shift) & 0xFFFFu) << 4 | 8u)) >> 20;
            m.x[k] = (unsigned char)(SIGNED ? code | (bits >> 24 & 0x80u)
                                            : code ? code : (unsigned int)(magnitude > 0));
        }
        moments[i] = m;
        if (i % 16 == 0) scales[i / 16] = (unsigned char)exponent;
    }
};

template <typename Weights, typename Grad4, typename M, typename V>
__device__ void adamw(Weights weights, M exp_avg, V exp_avg_sq, const Grad4* grad,
                      unsigned int n, unsigned int first, unsigned int seed, AdamW s) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x, noise[4];
    if (i >= n) return;
    float master[4], m[4], v[4];
    Grad4 g = grad[i];
    weights.load(i, master); exp_avg.load(i, m); exp_avg_sq.load(i, v);
    for (int k = 0; k < 4; ++k) {
        master[k] = updated(master[k], weights.gradient(g, k), m[k], v[k], s);
        noise[k] = random_bits(first + 4 * i + k, seed);
    }
    weights.store(i, master); exp_avg.store(i, m, noise, 0); exp_avg_sq.store(i, v, noise, 16);
}

template <typename Weights, typename Grad4, typename M>
__device__ void lion(Weights weights, M exp_avg, const Grad4* grad,
                     unsigned int n, unsigned int first, unsigned int seed, Lion s) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x, noise[4];
    if (i >= n) return;
    float master[4], m[4];
    Grad4 g = grad[i];
    weights.load(i, master); exp_avg.load(i, m);
    for (int k = 0; k < 4; ++k) {
        master[k] = updated(master[k], weights.gradient(g, k), m[k], s);
        noise[k] = random_bits(first + 4 * i + k, seed);
    }
    weights.store(i, master); exp_avg.store(i, m, noise, 0);
}

#define F(x) __int_as_float(x)
#define COMMON int n, int first, int seed
#define ADAMW COMMON, int a, int b, int c, int d, int e, int f, int g, int h
#define LION COMMON, int a, int b, int c, int d, int e, int f, int g
#define OF_ADAMW n, first, seed, AdamW{F(a), F(b), F(c), F(d), F(e), F(f), F(g), F(h)}
#define OF_LION n, first, seed, Lion{F(a), F(b), F(c), F(d), F(e), F(f), F(g)}
#define SCALED Byte4 *m, unsigned char *m_scale
#define SPLIT Half4 *weight, Half4 *remainder
#define KERNEL(name) extern "C" __global__ void name
#define KERNELS(name, M, In, Grad, weights, ...) \
    KERNEL(adamw_##name)(__VA_ARGS__, M* m, M* v, const Grad* grad, ADAMW) { \
        adamw(weights, In{m}, In{v}, grad, OF_ADAMW); \
    } \
    KERNEL(lion_##name)(__VA_ARGS__, M* m, const Grad* grad, LION) { \
        lion(weights, In{m}, grad, OF_LION); \
    }
#define KERNELS_INT8(name, Grad, weights, ...) \
    KERNEL(adamw_##name)(__VA_ARGS__, SCALED, Byte4* v, unsigned char* v_scale, \
                         const Grad* grad, ADAMW) { \
        adamw(weights, InBytes<true>{m, m_scale}, InBytes<false>{v, v_scale}, grad, OF_ADAMW); \
    } \
    KERNEL(lion_##name)(__VA_ARGS__, SCALED, const Grad* grad, LION) { \
        lion(weights, InBytes<true>{m, m_scale}, grad, OF_LION); \
    }
#define OF_SPLIT (Split{weight, remainder})

KERNELS(split, Float4, InFloat32, Half4, OF_SPLIT, SPLIT)
KERNELS(split_of_sums, Float4, InFloat32, Float4, OF_SPLIT, SPLIT)
KERNELS(float32, Float4, InFloat32, Float4, Whole{weight}, Float4* weight)
KERNELS(split_bf16, Half4, InBfloat16, Half4, OF_SPLIT, SPLIT)
KERNELS(split_bf16_of_sums, Half4, InBfloat16, Float4, OF_SPLIT, SPLIT)
KERNELS(float32_bf16, Half4, InBfloat16, Float4, Whole{weight}, Float4* weight)
KERNELS_INT8(split_int8, Half4, OF_SPLIT, SPLIT)
KERNELS_INT8(split_int8_of_sums, Float4, OF_SPLIT, SPLIT)
KERNELS_INT8(float32_int8, Float4, Whole{weight}, Float4* weight)

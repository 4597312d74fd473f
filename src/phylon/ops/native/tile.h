// Vectors of the machine's own width, and the loops over tiles that products of small matrices are made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int W = 4, REGISTERS = 32;
#else
constexpr int W = 4, REGISTERS = 16;
#endif
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896340736f;

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef float LooseVec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * W), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
inline Vec all(float x) { return x - Vec{}; }  // x + 0 would cost an addition, since -0 + 0 is 0
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where one of them is NaN

inline Vec load(const bf16* p) {
    Halves h = *reinterpret_cast<const LooseHalves*>(p);
    return (Vec)(__builtin_convertvector(h, Words) << 16);
}

// Round to nearest, ties to even; NaN stays NaN. The bits of a bf16 in each lane.
inline Words rounded(Vec x) {
    Words u = (Words)x;
    Words bits = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return x == x ? bits : (Words{} + 0x7fc0u);
}
inline void store(bf16* p, Vec x) { *reinterpret_cast<LooseHalves*>(p) = __builtin_convertvector(rounded(x), Halves); }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, bf16* p) {
    bf16 lanes[W];
    store(lanes, all(x));
    *p = lanes[0];
}

// ---------------------------------------------------------------------------------------------------- functions

// 2^t, relative error 1e-7; 0 below 2^-126, -infinity included; a NaN comes through. The polynomial is a minimax fit
// on [-1/2, 1/2].
inline Vec exp2_of(Vec t) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    Vec shifted = t + SHIFT;
    Vec f = t - (shifted - SHIFT);
    Vec p = all(0.00132764722f);
    p = p * f + 0.00967554162f;
    p = p * f + 0.0555071328f;
    p = p * f + 0.240221197f;
    p = p * f + 0.693146967f;
    p = p * f + 1.00000007f;
    Vec result = (Vec)((Ints)p + ((Ints)shifted << 23));
    return t >= -126.0f ? result : larger(Vec{}, t);
}

inline Vec tanh_of(Vec x) {
    Vec size = x < 0.0f ? -x : x;
    size = size > 10.0f ? all(10.0f) : size;
    Vec far = 1.0f - 2.0f / (exp2_of(size * (2 * LOG2E)) + 1.0f);
    far = x < 0.0f ? -far : far;
    Vec z = x * x;
    Vec p = all(-0.00551440214f);
    p = p * z + 0.020468712f;
    p = p * z - 0.053687799f;
    p = p * z + 0.133308276f;
    p = p * z - 0.333332597f;
    return size < 0.625f ? p * (z * x) + x : far;
}

// The 32-bit finaliser of phylon.ops.random, for one number or a vector of them.
template <class U>
inline U mix(U x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// ----------------------------------------------------------------------------------------------------- products

enum Start { ZERO, ADD, SCALE };

// MR rows and NR vectors of C, held in registers over all of K.
template <int MR, int NR, Start START>
inline __attribute__((always_inline)) void block(int64_t K, const float* a, int64_t am, int64_t ak, const float* b,
                                                 int64_t bk, float* c, int64_t cm, const float* factor) {
    Vec sum[MR][NR];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) {
            if constexpr (START == ZERO) sum[m][n] = Vec{};
            if constexpr (START == ADD) sum[m][n] = load(c + m * cm + n * W);
            if constexpr (START == SCALE) sum[m][n] = load(c + m * cm + n * W) * load(factor + n * W);
        }
    for (int64_t k = 0; k < K; ++k, a += ak, b += bk) {
        Vec row[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) row[n] = load(b + n * W);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            Vec left = all(a[m * am]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] += left * row[n];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) store(c + m * cm + n * W, sum[m][n]);
}

// NR vectors of all M rows. The accumulators fill the registers that the operands leave.
template <int NR, Start START>
__attribute__((noinline)) void columns(int64_t M, int64_t K, const float* a, int64_t am, int64_t ak, const float* b,
                                       int64_t bk, float* c, int64_t cm, const float* factor) {
    constexpr int MR = REGISTERS == 32 ? (NR == 4 ? 6 : NR == 3 ? 8 : 12) : (NR == 2 ? 6 : 12);
    int64_t m = 0;
    for (; m + MR <= M; m += MR) block<MR, NR, START>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, factor);
    if constexpr (MR > 8)
        if (m + 8 <= M) block<8, NR, START>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, factor), m += 8;
    if (m + 4 <= M) block<4, NR, START>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, factor), m += 4;
    if (m + 2 <= M) block<2, NR, START>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, factor), m += 2;
    if (m < M) block<1, NR, START>(K, a + m * am, am, ak, b, bk, c + m * cm, cm, factor);
}

// C (M x N vectors) = A B, plus C (ADD), plus C * factor by lane (SCALE). A is read element by element, A[m * am + k *
// ak]; B and C have rows of vectors. The sum over k runs in order, whatever the blocking: splitting M, N or K moves no
// bit.
template <Start START>
inline void product(int64_t M, int64_t N, int64_t K, const float* a, int64_t am, int64_t ak, const float* b, int64_t bk,
                    float* c, int64_t cm, const float* factor = nullptr) {
    if constexpr (REGISTERS == 32) {
        for (; N >= 4; N -= 4, b += 4 * W, c += 4 * W, factor += START == SCALE ? 4 * W : 0)
            columns<4, START>(M, K, a, am, ak, b, bk, c, cm, factor);
        if (N == 3) columns<3, START>(M, K, a, am, ak, b, bk, c, cm, factor);
        if (N == 2) columns<2, START>(M, K, a, am, ak, b, bk, c, cm, factor);
    } else {
        for (; N >= 2; N -= 2, b += 2 * W, c += 2 * W, factor += START == SCALE ? 2 * W : 0)
            columns<2, START>(M, K, a, am, ak, b, bk, c, cm, factor);
    }
    if (N == 1) columns<1, START>(M, K, a, am, ak, b, bk, c, cm, factor);
}

// ------------------------------------------------------------------------------------------------------- moving

// `rows` rows of `width` elements, `stride` apart, to rows of `padded` floats; the rest of each row, and the rows that
// are not wanted (bit r of `wanted`), become 0: what nobody may look at can hold anything, NaN included.
template <class T>
inline void read_rows(const T* from, int64_t stride, int64_t rows, int64_t width, float* to, int64_t padded,
                      uint64_t wanted = ~0ull) {
    for (int64_t r = 0; r < rows; ++r, from += stride, to += padded) {
        if (!(wanted >> r & 1)) {
            memset(to, 0, padded * sizeof(float));
            continue;
        }
        int64_t e = 0;
        for (; e + W <= width; e += W) store(to + e, load(from + e));
        for (; e < width; ++e) to[e] = widen(from[e]);
        for (; e < padded; ++e) to[e] = 0;
    }
}

// The inverse: `rows` rows of `width` elements out of rows of `padded` floats, times a factor.
template <class T>
inline void write_rows(const float* from, int64_t padded, float factor, int64_t rows, int64_t width, T* to,
                       int64_t stride) {
    for (int64_t r = 0; r < rows; ++r, from += padded, to += stride) {
        int64_t e = 0;
        for (; e + W <= width; e += W) store(to + e, load(from + e) * factor);
        for (; e < width; ++e) narrow(from[e] * factor, to + e);
    }
}

template <int... I>
inline Vec low_halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
}
template <int... I>
inline Vec high_halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

// A W x W square, times a factor, or as bits that need not be floats. Interleaving the upper half of the rows with the
// lower one log2(W) times transposes.
template <bool BITS = false>
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride, float factor) {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
    Vec x[W], y[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = BITS ? load(from + r * from_stride) : load(from + r * from_stride) * factor;
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
#pragma GCC unroll 8
        for (int r = 0; r < W / 2; ++r) {
            y[2 * r] = low_halves(x[r], x[r + W / 2], lanes);
            y[2 * r + 1] = high_halves(x[r], x[r + W / 2], lanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < W; ++r) x[r] = y[r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) store(to + r * to_stride, x[r]);
}

// Both sizes are multiples of W.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t width, float* to, int64_t to_stride,
                      float factor) {
    for (int64_t r = 0; r < rows; r += W)
        for (int64_t e = 0; e < width; e += W)
            transpose_square(from + r * from_stride + e, from_stride, to + e * to_stride + r, to_stride, factor);
}

// One thread's memory, kept between calls: touching fresh memory for the first time is slower than computing in it.
class Arena {
  public:
    void reserve(int64_t floats) {
        used_ = 0;
        if (floats <= size_) return;
        std::free(base_);
        size_ = floats + floats / 8;
        base_ = static_cast<float*>(std::aligned_alloc(4096, up(size_ * int64_t(sizeof(float)), 4096)));
        if (base_ == nullptr) std::abort();
    }
    float* take(int64_t floats) {
        float* part = base_ + used_;
        used_ += up(floats, 16);
        return part;
    }
    ~Arena() { std::free(base_); }

  private:
    float* base_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

inline Arena& arena() {
    static thread_local Arena mine;
    return mine;
}

}  // namespace

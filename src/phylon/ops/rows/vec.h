// Sixteen floats at a time, in GCC's portable vectors: loads and stores of f32 and bf16, exp, and fixed shares of rows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vf_u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh_u __attribute__((vector_size(32), aligned(2)));
typedef uint32_t vu __attribute__((vector_size(64)));
struct bf16 {
    uint16_t bits;
};
static const int W = 16;

static inline vf all(float x) { return x - vf{}; }
static inline vf load(const float* p) { return *(const vf_u*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh_u*)p, vu) << 16); }
static inline void store(float* p, vf x) { *(vf_u*)p = x; }
static inline void store(bf16* p, vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vi nan = x != x;
    rounded = (vu)(((vi)rounded & ~nan) | (nan & 0x7fc0));
    *(vh_u*)p = __builtin_convertvector(rounded, vh_u);
}
static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// Below a whole vector: what is missing reads as zero and is not written.
template <class T> static inline vf load(const T* p, long n) {
    if (n >= W) return load(p);
    vf x{};
    for (long i = 0; i < n; ++i) x[i] = widen(p[i]);
    return x;
}
template <class T> static inline void store(T* p, vf x, long n) {
    if (n >= W) return store(p, x);
    T last[W];
    store(last, x);
    memcpy((void*)p, last, n * sizeof(T));
}
// What a value becomes by being kept as T.
static inline vf kept(const float*, vf x) { return x; }
static inline vf kept(const bf16*, vf x) {
    bf16 t[W];
    store(t, x);
    return load(t);
}

static inline float sum(vf x) {
    float s = 0;
    for (int i = 0; i < W; ++i) s += x[i];
    return s;
}
static inline float largest(vf x) {
    float s = x[0];
    for (int i = 1; i < W; ++i) s = x[i] > s ? x[i] : s;
    return s;
}
static inline vf larger(vf a, vf b) { return a > b ? a : b; }

// e^x by 2^n times a polynomial (Cephes), 2 ulp; below -87.3 it stays at 1e-38, above 88.3 at 2e38.
static inline vf exp(vf x) {
    x = x > 88.3f ? all(88.3f) : x;
    x = x < -87.3f ? all(-87.3f) : x;
    const vf magic = all(12582912.f);
    vf t = x * 1.44269504f + magic;
    vi n = (vi)t - (vi)magic;
    vf whole = t - magic;
    vf r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return p * (vf)((n + 127) << 23);
}

// The same to the ends: 0 below -87.3, infinite above 88.3.
static inline vf exp_or_end(vf x) {
    vf e = exp(x);
    e = x < -87.3f ? vf{} : e;
    return x > 88.3f ? all(INFINITY) : e;
}

// Sums over rows are made in shares that do not depend on the number of threads, and added in their order.
static const int SHARES = 32;
struct Share {
    long first, last;
};
static inline Share share(int s, long rows) {
    long size = (rows + SHARES - 1) / SHARES;
    long first = s * size < rows ? s * size : rows;
    return {first, first + size < rows ? first + size : rows};
}
static inline void add_shares(const float* parts, float* out, long cols) {
#pragma omp parallel for schedule(static)
    for (long c = 0; c < cols; c += W) {
        vf total{};
        for (int s = 0; s < SHARES; ++s) total += load(parts + s * cols + c, cols - c);
        store(out + c, total, cols - c);
    }
}

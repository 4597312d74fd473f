// Activations, plain and gated, and their gradients, in one pass; the backward makes the forward's result again.
#pragma once
#include "vec.h"

enum Kind { RELU, GELU, GELU_TANH, SILU, TANH };
struct Made {
    vf value, slope;
};
static inline vf sigmoid(vf x) { return 1.f / (1.f + exp_or_end(-x)); }

// Near 0 by a series, where 1 would cancel.
static inline vf tanh_of(vf x) {
    vf far = 1.f - 2.f / (exp(2.f * x) + 1.f), z = x * x;
    vf p = z * -0.00551440214f + 0.020468712f;
    p = p * z - 0.053687799f;
    p = p * z + 0.133308276f;
    p = p * z - 0.333332597f;
    return (x < 0.625f) & (x > -0.625f) ? p * (z * x) + x : far;
}

// The normal distribution by the complementary error function of Numerical Recipes, section 6.2, 1.2e-7 relative.
static inline vf normal_cdf(vf x) {
    vf z = (x < 0.f ? -x : x) * 0.70710678118f;
    vf t = 1.f / (1.f + 0.5f * z);
    vf p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    vf half = 0.5f * t * exp_or_end(p - z * z);
    return x < 0.f ? half : 1.f - half;
}

template <Kind K> static inline Made made(vf x) {
    if (K == RELU) return {x <= 0.f ? vf{} : x, x <= 0.f ? vf{} : all(1.f)};  // NaN stays, and takes a gradient
    if (K == SILU) {
        vf s = sigmoid(x);
        return {x * s, s + x * s * (1.f - s)};
    }
    if (K == TANH) {
        vf t = tanh_of(x);
        return {t, 1.f - t * t};
    }
    if (K == GELU_TANH) {
        const float a = 1.5957691216f, c = 0.044715f;
        vf s = sigmoid(a * (x + c * x * x * x));
        return {x * s, s + x * s * (1.f - s) * (a + 3.f * a * c * x * x)};
    }
    vf phi = normal_cdf(x);
    return {x * phi, phi + x * 0.3989422804f * exp_or_end(-0.5f * x * x)};
}

// A gradient times the slope; where relu is flat nothing passes, be it infinite.
template <Kind K> static inline vf passed(vf g, vf slope) {
    return K == RELU ? (slope == 0.f ? vf{} : g) : g * slope;
}

// y = act(x + bias), or act(gate + gate_bias) * (up + bias) where x is the gate and up is given.
template <Kind K, class T>
static void act_forward(const T* x, const float* bias, const T* up, const float* up_bias, T* y, long rows, long d) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; ++r)
        for (long c = 0; c < d; c += W) {
            vf v = load(x + r * d + c, d - c);
            if (bias) v += load(bias + c, d - c);
            v = made<K>(v).value;
            if (up) {
                vf u = load(up + r * d + c, d - c);
                if (up_bias) u += load(up_bias + c, d - c);
                v *= u;
            }
            store(y + r * d + c, v, d - c);
        }
}

// dx (and dup) from dy; y once more where asked for; parts (2, SHARES, d) collect the biases' gradients.
template <Kind K, class T>
static void act_backward(const T* dy, const T* x, const float* bias, const T* up, const float* up_bias, T* dx, T* dup,
                         T* y, float* parts, long rows, long d) {
#pragma omp parallel for schedule(static)
    for (int s = 0; s < SHARES; ++s) {
        float* db = parts ? parts + (long)s * d : nullptr;
        float* du = parts ? parts + (long)(SHARES + s) * d : nullptr;
        if (db) memset(db, 0, d * sizeof(float));
        if (db && up) memset(du, 0, d * sizeof(float));
        Share part = share(s, rows);
        for (long r = part.first; r < part.last; ++r)
            for (long c = 0; c < d; c += W) {
                vf g = load(dy + r * d + c, d - c), v = load(x + r * d + c, d - c);
                if (bias) v += load(bias + c, d - c);
                Made m = made<K>(v);
                vf out = m.value, dv = g;
                if (up) {
                    vf u = load(up + r * d + c, d - c);
                    if (up_bias) u += load(up_bias + c, d - c);
                    vf d_up = g * m.value;
                    dv *= u;
                    out *= u;
                    store(dup + r * d + c, d_up, d - c);
                    if (du) store(du + c, load(du + c, d - c) + d_up, d - c);
                }
                dv = passed<K>(dv, m.slope);
                if (db) store(db + c, load(db + c, d - c) + dv, d - c);
                if (y) store(y + r * d + c, out, d - c);
                store(dx + r * d + c, dv, d - c);
            }
    }
}

// Rotary position embedding of whole heads in one pass: pairs (i, i + half) turned, the rest copied.
#pragma once
#include "vec.h"

// x (batch, tokens, heads, e) with strides of batch, token and head in elements; y dense; sign -1 is the backward.
template <class T>
static void rotary(const T* x, const float* cosine, const float* sine, T* y, long batch, long tokens, long heads,
                   long e, long half, long stride_b, long stride_t, long stride_h, long table_b, float sign) {
#pragma omp parallel for schedule(static)
    for (long bt = 0; bt < batch * tokens; ++bt) {
        long b = bt / tokens, t = bt % tokens;
        const float *cs = cosine + b * table_b + t * half, *sn = sine + b * table_b + t * half;
        for (long h = 0; h < heads; ++h) {
            const T* in = x + b * stride_b + t * stride_t + h * stride_h;
            T* out = y + (bt * heads + h) * e;
            for (long c = 0; c < half; c += W) {
                long n = half - c;
                vf first = load(in + c, n), second = load(in + half + c, n);
                vf co = load(cs + c, n), si = load(sn + c, n) * sign;
                store(out + c, first * co - second * si, n);
                store(out + half + c, second * co + first * si, n);
            }
            if (2 * half < e) memcpy((void*)(out + 2 * half), (const void*)(in + 2 * half), (e - 2 * half) * sizeof(T));
        }
    }
}

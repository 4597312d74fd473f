// Rows to experts and back: gathered, and summed by token with their gates; choices that are not sent have the place -1.
#pragma once
#include "vec.h"

// y[r] = x[index[r]]
template <class T> static void gather(const T* x, const int64_t* index, T* y, long rows, long d) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; ++r) memcpy((void*)(y + r * d), (const void*)(x + index[r] * d), d * sizeof(T));
}

// y[n] = sum over j of gates[n, j] * rows[where[n, j]]; without gates they are 1.
template <class T, class Y>
static void combine(const T* x, const int64_t* where, const float* gates, Y* y, long n, long k, long d) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; ++i)
        for (long c = 0; c < d; c += W) {
            vf s{};
            for (long j = 0; j < k; ++j) {
                long r = where[i * k + j];
                if (r < 0) continue;
                vf v = load(x + r * d + c, d - c);
                s += gates ? v * gates[i * k + j] : v;
            }
            store(y + i * d + c, s, d - c);
        }
}

// dx[where[n, j]] = gates[n, j] * dy[n]; dgates[n, j] = dy[n] . x[where[n, j]], 0 where nothing was sent.
template <class T, class Y>
static void combine_backward(const Y* dy, const T* x, const int64_t* where, const float* gates, T* dx, float* dgates,
                             long n, long k, long d) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; ++i)
        for (long j = 0; j < k; ++j) {
            long r = where[i * k + j];
            vf s{};
            if (r >= 0)
                for (long c = 0; c < d; c += W) {
                    vf g = load(dy + i * d + c, d - c);
                    s += g * load(x + r * d + c, d - c);
                    store(dx + r * d + c, g * gates[i * k + j], d - c);
                }
            dgates[i * k + j] = sum(s);
        }
}

// AdamW in one pass over weight, gradient and both moments, and the square of a gradient's norm.
#pragma once
#include "vec.h"

// The gradient times `scale`; `rate` is lr / (1 - beta1^t), `root` 1 / sqrt(1 - beta2^t), `keep` 1 - lr * decay.
// `copy` takes the new weight rounded to bf16.
template <class G>
static void adamw(float* w, bf16* copy, const G* grad, float* m, float* v, long n, float scale, float beta1,
                  float beta2, float eps, float rate, float root, float keep) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += W) {
        vf g = load(grad + i, n - i) * scale, mean = load(m + i, n - i), square = load(v + i, n - i);
        mean = mean + (g - mean) * (1 - beta1);
        square = square * beta2 + g * g * (1 - beta2);
        vf bottom;
        for (int k = 0; k < W; ++k) bottom[k] = __builtin_sqrtf(square[k]);
        vf x = load(w + i, n - i) * keep - rate * mean / (bottom * root + eps);
        store(m + i, mean, n - i);
        store(v + i, square, n - i);
        store(w + i, x, n - i);
        if (copy) store(copy + i, x, n - i);
    }
}

template <class G> static double square_sum(const G* grad, long n) {
    const long size = 1 << 16, parts = (n + size - 1) / size;
    static thread_local double* made = nullptr;
    static thread_local long room = 0;
    if (parts > room) {
        delete[] made;
        made = new double[parts];
        room = parts;
    }
    double* found = made;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < parts; ++p) {
        vf s0{}, s1{};
        long last = (p + 1) * size < n ? (p + 1) * size : n;
        double total = 0;
        for (long i = p * size; i < last; i += 2048) {
            long end = i + 2048 < last ? i + 2048 : last;
            s0 = s1 = vf{};
            for (long k = i; k < end; k += 2 * W) {
                vf a = load(grad + k, end - k), b = end - k > W ? load(grad + k + W, end - k - W) : vf{};
                s0 += a * a;
                s1 += b * b;
            }
            total += (double)sum(s0 + s1);
        }
        found[p] = total;
    }
    double total = 0;
    for (long p = 0; p < parts; ++p) total += found[p];
    return total;
}

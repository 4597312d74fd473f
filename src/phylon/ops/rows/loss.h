// Cross-entropy of rows of scores, and its gradient in their place.
#pragma once
#include "vec.h"

// losses[r] = weight * (log_z - (1 - smoothing) * score[target] - smoothing * mean + z * log_z^2), 0 where target < 0.
// With `grad`, the scores become the gradient with respect to themselves before bias and cap.
static void cross_entropy(float* scores, const float* bias, const int64_t* targets, const float* weights,
                          float* losses, long rows, long v, float cap, float smoothing, float z, bool grad) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; ++r) {
        float* row = scores + r * v;
        const int64_t target = targets[r];
        if (target < 0) {
            losses[r] = 0;
            if (grad) memset(row, 0, v * sizeof(float));
            continue;
        }
        vf top = all(-INFINITY), mean{};
        for (long c = 0; c < v; c += W) {
            vf x = load(row + c, v - c);
            if (bias) x += load(bias + c, v - c);
            if (cap > 0) x = cap * (1.f - 2.f / (exp(2.f / cap * x) + 1.f));
            if (bias || cap > 0) store(row + c, x, v - c);
            mean += x;
            if (v - c < W)
                for (long i = v - c; i < W; ++i) x[i] = -INFINITY;
            // A NaN must come through: it is larger than everything.
            top = (x > top) | (x != x) ? x : top;
        }
        float m = top[0];
        for (int i = 1; i < W; ++i) m = !(top[i] <= m) ? top[i] : m;
        const float picked = row[target], average = smoothing > 0 ? sum(mean) / v : 0.f, weight = weights ? weights[r] : 1.f;
        // exp(x - m) is at least 1e-38, so that summing it in f32 loses nothing but the far tail.
        vf s{};
        if (grad && !(cap > 0)) {
            for (long c = 0; c < v; c += W) {
                vf e = exp(load(row + c, v - c) - m);
                store(row + c, e, v - c);
                if (v - c < W)
                    for (long i = v - c; i < W; ++i) e[i] = 0;
                s += e;
            }
        } else {
            for (long c = 0; c < v; c += W) {
                vf e = exp(load(row + c, v - c) - m);
                if (v - c < W)
                    for (long i = v - c; i < W; ++i) e[i] = 0;
                s += e;
            }
        }
        const float total = sum(s), log_z = m + std::log(total);
        losses[r] = weight * (log_z - (1 - smoothing) * picked - smoothing * average + z * log_z * log_z);
        if (!grad) continue;
        const float factor = weight * (1 + 2 * z * log_z) / total, less = weight * smoothing / v;
        const float hit = weight * (1 - smoothing);
        if (cap > 0) {
            for (long c = 0; c < v; c += W) {
                vf x = load(row + c, v - c), t = x / cap, g = exp(x - m) * factor - less;
                if (target >= c && target < c + W) g[target - c] -= hit;
                store(row + c, g * (1.f - t * t), v - c);
            }
        } else {
            for (long c = 0; c < v; c += W) store(row + c, load(row + c, v - c) * factor - less, v - c);
            row[target] -= hit;
        }
    }
}

// LayerNorm and RMSNorm over rows of x (+ h), and their gradients; statistics in f32.
#pragma once
#include "vec.h"
#include <vector>

// sum = x + h (kept as X), y = norm(sum) * w + b; mean and rstd (rows,) for the backward. h, sum, w, b may be null.
template <class X, class H, class Y>
static void norm_forward(const X* x, const H* h, const float* w, const float* b, X* total, Y* y, float* mean,
                         float* rstd, long rows, long d, float eps, bool centred) {
#pragma omp parallel if (rows * d > 1 << 14)  // waking threads costs more than a few rows
    {
        std::vector<float> kept_row(d + W);
        float* row = kept_row.data();
#pragma omp for schedule(static)
        for (long r = 0; r < rows; ++r) {
            const X* xr = x + r * d;
            vf s{};
            for (long c = 0; c < d; c += W) {
                vf v = load(xr + c, d - c);
                if (h) {
                    v = kept(x, v + load(h + r * d + c, d - c));
                    store(total + r * d + c, v, d - c);
                }
                store(row + c, v);
                s += v;
            }
            float m = centred ? sum(s) / d : 0.f;
            if (!std::isfinite(m)) {  // the sum may have overflowed where the mean does not
                m = 0.f;
                for (long c = 0; c < d; ++c) m += row[c] / d;
            }
            vf q{};
            for (long c = 0; c < d; c += W) {
                vf v = load(row + c) - m;
                if (d - c < W)
                    for (long i = d - c; i < W; ++i) v[i] = 0;
                q += v * v;
            }
            float inv = 1.f / std::sqrt(sum(q) / d + eps);
            mean[r] = m;
            rstd[r] = inv;
            for (long c = 0; c < d; c += W) {
                vf v = (load(row + c) - m) * inv;
                if (w) v *= load(w + c, d - c);
                if (b) v += load(b + c, d - c);
                store(y + r * d + c, v, d - c);
            }
        }
    }
}

// dx = gradient of y through the norm, plus dtotal where given; parts (SHARES, 2, d) collect those of w and b.
template <class X, class Y>
static void norm_backward(const Y* dy, const X* dtotal, const X* x, const float* w, const float* mean,
                          const float* rstd, X* dx, float* parts, long rows, long d, bool centred) {
#pragma omp parallel for schedule(static)
    for (int s = 0; s < SHARES; ++s) {
        float* dw = parts + (long)s * d;
        float* db = parts + (long)(SHARES + s) * d;
        memset(dw, 0, d * sizeof(float));
        memset(db, 0, d * sizeof(float));
        Share part = share(s, rows);
        for (long r = part.first; r < part.last; ++r) {
            const float m = mean[r], inv = rstd[r];
            vf sg{}, sgx{};
            for (long c = 0; c < d; c += W) {
                vf g = load(dy + r * d + c, d - c), hat = (load(x + r * d + c, d - c) - m) * inv;
                store(dw + c, load(dw + c, d - c) + g * hat, d - c);
                store(db + c, load(db + c, d - c) + g, d - c);
                if (w) g *= load(w + c, d - c);
                sg += g;
                sgx += g * hat;
            }
            const float a = centred ? sum(sg) / d : 0.f, k = sum(sgx) / d;
            for (long c = 0; c < d; c += W) {
                vf g = load(dy + r * d + c, d - c), hat = (load(x + r * d + c, d - c) - m) * inv;
                if (w) g *= load(w + c, d - c);
                vf v = (g - a - hat * k) * inv;
                if (dtotal) v += load(dtotal + r * d + c, d - c);
                store(dx + r * d + c, v, d - c);
            }
        }
    }
}

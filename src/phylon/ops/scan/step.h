// One token through the middle of a Mamba block. Gu and Dao (arXiv:2312.00752), section 3.4; symbols as in selective.h.
//
//   u = silu(conv(x))    [d | B | C] = W_x u    dt = softplus(W_dt d + b)    y = scan(u, dt, B, C)    out = y silu(z)
//
// A token is too little work for threads; what counts is that it is one call.

#pragma once

#include "conv.h"
#include "selective.h"

namespace phylon {

struct Step {
  int64_t batch, width, size, rank, reach;
  const float *x, *z;                        // (B, D)
  const float *conv_weight, *conv_bias;      // (D, W), (D,) or null
  const float *x_proj, *dt_proj, *dt_bias;   // (R + 2 N, D), (D, R), (D,)
  const float *A_log, *D;                    // (D, N), (D,)
  const float *tail, *h;                     // (B, W - 1, D), (B, D, N)
  float *new_tail, *new_h, *y;               // the same, and (B, D)
};

inline float dot(const float *a, const float *b, int64_t count) {
  Vec sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES)
    for (int k = 0; k < 2; k++) sum[k] += read(a + i + k * LANES) * read(b + i + k * LANES);
  if (i + LANES <= count) {
    sum[0] += read(a + i) * read(b + i);
    i += LANES;
  }
  float rest = lane_sum(sum[0] + sum[1]);
  for (; i < count; i++) rest += a[i] * b[i];
  return rest;
}

// log(1 + y) for y from 0 to 1: 2 artanh(s) with s = y / (2 + y), up to a third; the rest of the series is 2e-8 of it.
inline Vec log1p(Vec y) {
  const Vec s = y / (2.0f + y), q = s * s;
  Vec p = all(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) p = p * q + 1.0f / odd;
  return 2.0f * s * p;
}

// log(1 + e^v), where the exponential cannot overflow.
inline Vec softplus(Vec v) {
  const Vec positive = v < 0.0f ? Vec{} : v;  // NaN stays
  return positive + log1p(exp2((v < 0.0f ? v : -v) * LOG2E));
}

inline void silu(const float *from, int64_t count, float *out, bool times) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int lanes = count - i < LANES ? int(count - i) : LANES;
    const Vec v = some(from + i, lanes);
    Vec s = v * sigmoid(v);
    if (times) s *= some(out + i, lanes);
    std::memcpy(out + i, &s, 4 * lanes);
  }
}

inline void step_sizes(const Step &s, const float *parts, float *dt) {
  for (int64_t d = 0; d < s.width; d++) dt[d] = dot(s.dt_proj + d * s.rank, parts, s.rank) + s.dt_bias[d];
  for (int64_t d = 0; d < s.width; d += LANES) {
    const int lanes = s.width - d < LANES ? int(s.width - d) : LANES;
    const Vec v = softplus(some(dt + d, lanes));
    std::memcpy(dt + d, &v, 4 * lanes);
  }
}

inline void step_row(const Step &s, int64_t row, float *u, float *dt, float *parts) {
  const int64_t W = s.reach, D = s.width, N = s.size;
  const float *x = s.x + row * D, *tail = s.tail + row * (W - 1) * D;
  float *new_tail = s.new_tail + row * (W - 1) * D, *y = s.y + row * D;
  for (int64_t d = 0; d < D; d++) {
    float sum = (s.conv_bias ? s.conv_bias[d] : 0) + s.conv_weight[d * W + W - 1] * x[d];
    for (int64_t k = 0; k < W - 1; k++) sum += s.conv_weight[d * W + k] * tail[k * D + d];
    u[d] = sum;
  }
  silu(u, D, u, false);
  if (W > 1) {
    std::memcpy(new_tail, tail + D, sizeof(float) * (W - 2) * D);
    std::memcpy(new_tail + (W - 2) * D, x, sizeof(float) * D);
  }
  for (int64_t i = 0; i < s.rank + 2 * N; i++) parts[i] = dot(s.x_proj + i * D, u, D);
  const float *B = parts + s.rank, *C = B + N;
  step_sizes(s, parts, dt);
  for (int64_t d = 0; d < D; d++) {
    const int64_t at = (row * D + d) * N;
    Vec sum{};
    for (int64_t n = 0; n < N; n += LANES) {
      const int lanes = N - n < LANES ? int(N - n) : LANES;
      const Vec A = -exp2(some(s.A_log + d * N + n, lanes) * LOG2E);
      const Vec h = exp2(A * (dt[d] * LOG2E)) * some(s.h + at + n, lanes) + some(B + n, lanes) * (dt[d] * u[d]);
      lanes == LANES ? std::memcpy(s.new_h + at + n, &h, 4 * LANES) : std::memcpy(s.new_h + at + n, &h, 4 * lanes);
      sum += h * some(C + n, lanes);
    }
    y[d] = lane_sum(sum) + s.D[d] * u[d];
  }
  silu(s.z + row * D, D, y, true);
}

}  // namespace phylon

extern "C" void mamba_step(const phylon::Step *s) {
  using namespace phylon;
  const size_t numbers = 2 * s->width + s->rank + 2 * s->size;
  scratch.reserve(numbers / LANES + 1);
  float *u = (float *)scratch.take(numbers / LANES + 1);
  for (int64_t row = 0; row < s->batch; row++) step_row(*s, row, u, u + s->width, u + 2 * s->width);
}

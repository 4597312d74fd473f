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
  Numbers x, z;                        // (B, D)
  Numbers conv_weight, conv_bias;      // (D, W), (D,) or no data
  Numbers x_proj, dt_proj, dt_bias;    // (R + 2 N, D), (D, R), (D,)
  Numbers A_log, D;                    // (D, N), (D,)
  Numbers tail, h;                     // (B, W - 1, D), (B, D, N): h is fp32
  Numbers new_tail, new_h, y;          // the same, and (B, D)
};

template <class T> inline float dot(const T *a, const float *b, int64_t count) {
  Vec sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES)
    for (int k = 0; k < 2; k++) sum[k] += read(a + i + k * LANES) * read(b + i + k * LANES);
  if (i + LANES <= count) {
    sum[0] += read(a + i) * read(b + i);
    i += LANES;
  }
  float rest = lane_sum(sum[0] + sum[1]);
  for (; i < count; i++) rest += widened(a[i]) * b[i];
  return rest;
}

inline float dot(const Numbers &a, int64_t at, const float *b, int64_t count) {
  return a.half ? dot((const uint16_t *)a.data + at, b, count) : dot((const float *)a.data + at, b, count);
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

// Work on the channels from `d` on, at most LANES at a time.
template <class Work> inline void over_channels(const Step &s, const Work &work) {
  for (int64_t d = 0; d < s.width; d += LANES) work(d, s.width - d < LANES ? int(s.width - d) : LANES);
}

// u = silu(conv(x)), and the new tail.
inline void step_conv(const Step &s, int64_t row, float *u) {
  const int64_t W = s.reach, D = s.width, x = row * D, tail = row * (W - 1) * D;
  over_channels(s, [&](int64_t d, int lanes) {
    Vec z{};
    for (int i = 0; i < lanes; i++) {
      const int64_t taps = (d + i) * W;
      float sum = (s.conv_bias ? s.conv_bias[d + i] : 0) + s.conv_weight[taps + W - 1] * s.x[x + d + i];
      for (int64_t k = 0; k < W - 1; k++) sum += s.conv_weight[taps + k] * s.tail[tail + k * D + d + i];
      z[i] = sum;
    }
    z *= sigmoid(z);
    std::memcpy(u + d, &z, 4 * lanes);
    for (int64_t k = 1; k < W; k++)
      s.new_tail.store(tail + (k - 1) * D + d, lanes,
                       k < W - 1 ? s.tail.load(tail + k * D + d, lanes) : s.x.load(x + d, lanes));
  });
}

inline void step_sizes(const Step &s, const float *parts, float *dt) {
  for (int64_t d = 0; d < s.width; d++) dt[d] = dot(s.dt_proj, d * s.rank, parts, s.rank) + s.dt_bias[d];
  over_channels(s, [&](int64_t d, int lanes) {
    const Vec v = softplus(some(dt + d, lanes));
    std::memcpy(dt + d, &v, 4 * lanes);
  });
}

inline void step_row(const Step &s, int64_t row, float *u, float *dt, float *y, float *parts) {
  const int64_t D = s.width, N = s.size;
  step_conv(s, row, u);
  for (int64_t i = 0; i < s.rank + 2 * N; i++) parts[i] = dot(s.x_proj, i * D, u, D);
  const float *B = parts + s.rank, *C = B + N;
  step_sizes(s, parts, dt);
  for (int64_t d = 0; d < D; d++) {
    const int64_t at = (row * D + d) * N;
    Vec sum{};
    for (int64_t n = 0; n < N; n += LANES) {
      const int lanes = N - n < LANES ? int(N - n) : LANES;
      const Vec A = -exp2(s.A_log.load(d * N + n, lanes) * LOG2E);
      const Vec h = some(B + n, lanes) * (dt[d] * u[d]) + exp2(A * (dt[d] * LOG2E)) * s.h.load(at + n, lanes);
      s.new_h.store(at + n, lanes, h);
      sum += h * some(C + n, lanes);
    }
    y[d] = lane_sum(sum) + s.D[d] * u[d];
  }
  over_channels(s, [&](int64_t d, int lanes) {
    const Vec z = s.z.load(row * D + d, lanes);
    s.y.store(row * D + d, lanes, z * sigmoid(z) * some(y + d, lanes));
  });
}

}  // namespace phylon

extern "C" void mamba_step(const phylon::Step *s) {
  using namespace phylon;
  const size_t vectors = (3 * s->width + s->rank + 2 * s->size) / LANES + 1;
  scratch.reserve(vectors);
  float *u = (float *)scratch.take(vectors), *dt = u + s->width, *y = dt + s->width;
  for (int64_t row = 0; row < s->batch; row++) step_row(*s, row, u, dt, y, y + s->width);
}

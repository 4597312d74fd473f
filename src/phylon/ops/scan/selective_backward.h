// The backward pass of the selective scan. What it does and what the names mean: selective.h.
#pragma once

#include "selective.h"

namespace phylon {

inline thread_local std::vector<float> sums;

// The same steps against time. `q` is the gradient that comes from the chunk after; `h[t]` is the state before step t.
inline void retreat(int steps, int64_t padded, const Vec *dt, const Vec *u, const Vec *g, const Vec *A, const float *B,
                    const float *C, const uint8_t *resets, const Vec *a, const Vec *h, Vec *q, Vec *dA, Vec *dB, Vec *dC,
                    Vec *du, Vec *ddt) {
  Vec carry[TILE], rates[TILE];
  for (int n = 0; n < TILE; n++) carry[n] = q[n], rates[n] = dA[n];
  for (int t = steps - 1; t >= 0; t--) {
    const Vec g_t = g[t], u_t = u[t], dt_t = dt[t];
    const bool reset = resets && resets[t];
    Vec du_t{}, ddt_t{};
#pragma GCC unroll 8
    for (int n = 0; n < TILE; n++) {
      Vec q_t = carry[n] + g_t * C[t * padded + n];
      dC[t * TILE + n] += g_t * h[(t + 1) * TILE + n];
      dB[t * TILE + n] += q_t * u_t;
      du_t += q_t * B[t * padded + n];
      if (reset) {
        carry[n] = Vec{};
        continue;
      }
      q_t *= a[t * TILE + n];
      const Vec e = q_t * h[t * TILE + n];
      rates[n] += e * dt_t;
      ddt_t += e * A[n];
      carry[n] = q_t;
    }
    du[t] += du_t;
    ddt[t] += ddt_t;
  }
  for (int n = 0; n < TILE; n++) q[n] = carry[n], dA[n] = rates[n];
}

// The sum of a vector's lanes, halves first.
inline float lane_sum(const Vec &v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float part[LANES];
  std::memcpy(part, &v, sizeof part);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
#endif
}

struct ScanGradients {
  Tensor y, x, dt;           // of the output; to fill
  float *B, *C;              // (B, T, N) each, to fill
  const float *h;            // of the last state, or null
  float *A, *D, *h0;         // (B, D, N), (B, D), (B, D, N), to fill
  const Vec *starts;
};

// One group against time, a part of the chunks at a time. Between the parts the gradients of state, A and D wait where
// those of the first state, of A and of D go.
struct BackwardGroup {
  const Scan &s;
  const Shape &shape;
  const ScanGradients &grad;
  const int64_t row, group, padded = shape.padded;
  Vec *x, *dt, *g, *u, *du, *ddt;     // [block][CHUNK]
  Vec *a, *h, *dB, *dC;               // [step][TILE] of one block
  Vec *A, *rate, *q, *dA, *dD;        // [block][padded]; [block]
  Vec *before;                        // [block][chunk of a run][padded]: the states before each
  float *B, *C;                       // [step][padded]

  BackwardGroup(const Scan &s, const Shape &shape, const ScanGradients &grad, int64_t row, int64_t group)
      : s(s), shape(shape), grad(grad), row(row), group(group) {
    const int64_t numbers = CHUNK * padded / LANES + 1;
    scratch.reserve(6 * GROUP * CHUNK + (4 * CHUNK + 1) * TILE + GROUP * ((4 + shape.run) * padded + 1) + 2 * numbers);
    for (Vec **each : {&x, &dt, &g, &u, &du, &ddt}) *each = scratch.take(GROUP * CHUNK);
    for (Vec **each : {&a, &dB, &dC}) *each = scratch.take(CHUNK * TILE);
    h = scratch.take((CHUNK + 1) * TILE);
    for (Vec **each : {&A, &rate, &q, &dA}) *each = scratch.take(GROUP * padded);
    dD = scratch.take(GROUP);
    before = scratch.take(GROUP * shape.run * padded);
    for (float **each : {&B, &C}) *each = (float *)scratch.take(numbers);
  }

  // The chunks of [first, last), whose gradients of B and C go to dB_part and dC_part (steps, N).
  void run(int64_t first, int64_t last, float *dB_part, float *dC_part) {
    const Chunk c = chunk_of(s, shape, row, group, 0);
    const bool latest = last == shape.chunks;
    const float *d_h = latest ? grad.h : grad.h0;
    const int64_t at = row * s.width * s.size;
    for (int64_t i = 0; i < c.blocks; i++) {
      load_matrix(s, s.A, c.first + i, padded, 1, A + i * padded);
      load_matrix(s, s.A, c.first + i, padded, LOG2E, rate + i * padded);
      load_matrix(s, d_h ? d_h + at : nullptr, c.first + i, padded, 1, q + i * padded);
      load_matrix(s, latest ? nullptr : grad.A + at, c.first + i, padded, 1, dA + i * padded);
      dD[i] = Vec{};
      if (!latest) std::memcpy(dD + i, grad.D + row * s.width + (c.first + i) * LANES, 4 * lanes_of(s, c.first + i));
    }
    for (int64_t chunk = last - 1; chunk >= first; chunk--) {
      if (chunk == last - 1 || chunk % shape.run == shape.run - 1) states(chunk);
      gradients(chunk, dB_part + (chunk - first) * CHUNK * s.size, dC_part + (chunk - first) * CHUNK * s.size);
    }
    for (int64_t i = 0; i < c.blocks; i++) {
      store_matrix(s, grad.A + at, c.first + i, dA + i * padded);
      store_matrix(s, grad.h0 + at, c.first + i, q + i * padded);
      std::memcpy(grad.D + row * s.width + (c.first + i) * LANES, dD + i, 4 * lanes_of(s, c.first + i));
    }
  }

  // Fills `before` for the chunks of a run up to `last`.
  void states(int64_t last) {
    const int64_t first = last / shape.run * shape.run;
    for (int64_t chunk = first; chunk <= last; chunk++) {
      const Chunk c = chunk_of(s, shape, row, group, chunk);
      if (chunk < last) {
        load_chunk(s, s.x, c, CHUNK, u);
        load_chunk(s, s.dt, c, CHUNK, dt);
        load_numbers(s, s.B, row, c.start, c.steps, padded, B);
      }
      for (int64_t i = 0; i < c.blocks; i++) {
        Vec *own = before + (i * shape.run + chunk - first) * padded;
        if (chunk == first)
          std::memcpy(own, grad.starts + kept_at(shape, row, c.first + i, first / shape.run), sizeof(Vec) * padded);
        if (chunk == last) continue;
        std::memcpy(own + padded, own, sizeof(Vec) * padded);
        for (int t = 0; t < c.steps; t++) u[i * CHUNK + t] *= dt[i * CHUNK + t];
        for (int64_t n = 0; n < padded; n += TILE)
          advance<LAST>(c.steps, padded, dt + i * CHUNK, u + i * CHUNK, rate + i * padded + n, B + n, nullptr,
                        resets(c), own + padded + n, nullptr, nullptr, nullptr);
      }
    }
  }

  void gradients(int64_t chunk, float *dB_part, float *dC_part) {
    const Chunk c = chunk_of(s, shape, row, group, chunk);
    load_chunk(s, s.x, c, -CHUNK, x);
    load_chunk(s, s.dt, c, -CHUNK, dt);
    load_chunk(s, grad.y, c, -CHUNK, g);
    load_numbers(s, s.B, row, c.start, c.steps, padded, B);
    load_numbers(s, s.C, row, c.start, c.steps, padded, C);
    for (int64_t i = 0; i < GROUP * CHUNK; i++) u[i] = dt[i] * x[i], du[i] = ddt[i] = Vec{};
    for (int64_t n = 0; n < padded; n += TILE) {
      for (int64_t i = 0; i < CHUNK * TILE; i++) dB[i] = dC[i] = Vec{};
      for (int64_t i = 0; i < c.blocks; i++) {
        const int64_t at = i * CHUNK, k = i * padded + n;
        Vec state[TILE];
        std::memcpy(state, before + (i * shape.run + chunk % shape.run) * padded + n, sizeof state);
        std::memcpy(h, state, sizeof state);
        advance<ALL>(c.steps, padded, dt + at, u + at, rate + k, B + n, nullptr, resets(c), state, nullptr, a, h + TILE);
        retreat(c.steps, padded, dt + at, u + at, g + at, A + k, B + n, C + n, resets(c), a, h, q + k, dA + k, dB, dC,
                du + at, ddt + at);
      }
      for (int t = 0; t < c.steps; t++)
        for (int64_t k = 0; k < TILE && n + k < s.size; k++) {
          dB_part[t * s.size + n + k] = lane_sum(dB[t * TILE + k]);
          dC_part[t * s.size + n + k] = lane_sum(dC[t * TILE + k]);
        }
    }
    for (int64_t i = 0; i < c.blocks; i++) {
      const Vec skip = load_skip(s, c.first + i);
      for (int64_t t = i * CHUNK; t < i * CHUNK + c.steps; t++) {
        dD[i] += g[t] * x[t];
        ddt[t] += du[t] * x[t];
        du[t] = du[t] * dt[t] + g[t] * skip;
      }
    }
    store_chunk(s, grad.x, c, du);
    store_chunk(s, grad.dt, c, ddt);
  }

  const uint8_t *resets(const Chunk &c) const { return s.resets ? s.resets + row * s.length + c.start : nullptr; }
};

void sum_parts(const float *parts, int64_t stride, int64_t count, int64_t numbers, float *out) {
  std::memcpy(out, parts, sizeof(float) * numbers);
  for (int64_t part = 1; part < count; part++)
    for (int64_t i = 0; i < numbers; i++) out[i] += parts[part * stride + i];
}

}  // namespace phylon

extern "C" {
using namespace phylon;

void scan_backward(const Scan *s, const ScanGradients *grad) {
  const Shape shape(*s);
  const int64_t tasks = s->batch * shape.groups, longest = shape.part * CHUNK;
  const int64_t numbers = (s->length < longest ? s->length : longest) * s->size;
  if (int64_t(sums.size()) < 2 * tasks * numbers) sums.resize(2 * tasks * numbers);
  float *dB = sums.data(), *dC = dB + tasks * numbers;
#pragma omp parallel num_threads(s->threads)
  for (int64_t first = (shape.chunks - 1) / shape.part * shape.part; first >= 0; first -= shape.part) {
    const int64_t last = first + shape.part < shape.chunks ? first + shape.part : shape.chunks;
    const int64_t start = first * CHUNK, end = last * CHUNK < s->length ? last * CHUNK : s->length;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++)
      BackwardGroup(*s, shape, *grad, i / shape.groups, i % shape.groups)
          .run(first, last, dB + i * numbers, dC + i * numbers);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < 2 * s->batch; i++) {
      const int64_t row = i / 2, at = (row * s->length + start) * s->size;
      sum_parts((i % 2 ? dC : dB) + row * shape.groups * numbers, numbers, shape.groups, (end - start) * s->size,
                (i % 2 ? grad->C : grad->B) + at);
    }
  }
}
}

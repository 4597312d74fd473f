// The selective scan on a CPU, forward and backward. Gu and Dao (arXiv:2312.00752), algorithm 2 and section 3.3.2.
//
//   B  rows     T  steps    D  channels    N  numbers of state for each channel
//   x, dt  (B, T, D)        B, C  (B, T, N)        A  (D, N)        D  (D,)        h  (B, D, N)
//
//   a_t = exp(dt_t A)       h_t = a_t h_{t-1} + u_t B_t,  u_t = dt_t x_t       y_t = C_t h_t + D x_t
//
// and backwards, with g_t the gradient of y_t and q_t that of h_t:
//
//   q_t = g_t C_t + a_{t+1} q_{t+1}          dC_t = sum_D g_t h_t          dB_t = sum_D q_t u_t
//   e_t = q_t a_t h_{t-1} (of the exponent)  dA = sum_t e_t dt_t           du_t = sum_N q_t B_t
//   ddt_t = sum_N e_t A + du_t x_t           dx_t = du_t dt_t + g_t D
//
// A vector holds LANES channels; steps go in chunks of CHUNK. The forward pass keeps the state before every N steps, so
// that all that is kept is no larger than x. The backward pass computes the states once more, a run between two kept
// ones and then a chunk at a time, into buffers that stay in the cache. All arithmetic is fp32. Sums over channels and
// rows have a fixed order, so that the result does not depend on the number of threads; they are made for PART chunks at
// a time, in which all channels take part, so that no more of them exists.
//
// A step that starts a document reads a state of zeros and passes no gradient on: what lies beyond may be NaN.

#pragma once

#include "vectors.h"

namespace phylon {

constexpr int CHUNK = 32;
constexpr int PART = 8;  // chunks
constexpr int TILE = 8;  // numbers of state at a time: their recurrences fill the pipeline
constexpr float LOG2E = 1.44269504f;
inline thread_local std::vector<float> sums;

// What both passes read. `resets` and `real` are bytes (B, T) or null; `h0` is null for a state of zeros.
struct Scan {
  int64_t batch, length, width, size, threads;
  Tensor x, dt, B, C;
  Numbers A, D;     // (D, N), (D,)
  const float *h0;  // (B, D, N)
  const uint8_t *resets, *real;
};

struct Shape {
  int64_t blocks, groups, chunks, padded;  // padded: N up to a multiple of TILE
  int64_t run, part;                       // chunks from one kept state to the next, and those of a part: whole runs
  explicit Shape(const Scan &s)
      : blocks((s.width + LANES - 1) / LANES), groups((blocks + GROUP - 1) / GROUP),
        chunks((s.length + CHUNK - 1) / CHUNK), padded((s.size + TILE - 1) / TILE * TILE),
        run((padded + CHUNK - 1) / CHUNK), part((PART + run - 1) / run * run) {}
  int64_t kept() const { return (chunks + run - 1) / run; }
};

inline int lanes_of(const Scan &s, int64_t block) {
  const int64_t left = s.width - block * LANES;
  return left < LANES ? int(left) : LANES;
}

inline bool is_real(const Scan &s, int64_t row, int64_t t) { return !s.real || s.real[row * s.length + t]; }

// A chunk of one group of channels in one row: the unit of work, since a row of memory should be read in one piece.
struct Chunk {
  int64_t row, start, first, blocks;  // blocks [first, first + blocks) of LANES channels
  int steps;
};

// A chunk of `tensor` as [block][CHUNK] vectors, zero at padding; asks for the lines of the chunk `ahead` steps on.
void load_chunk(const Scan &s, const Tensor &tensor, const Chunk &c, int64_t ahead, Vec *out) {
  for (int t = 0; t < c.steps; t++) {
    const bool real = is_real(s, c.row, c.start + t);
    const int64_t later = c.start + t + ahead;
    const bool prefetch = later >= 0 && later < s.length;
    for (int64_t i = 0; i < c.blocks; i++) {
      const int64_t channel = (c.first + i) * LANES;
      Vec value{};
      if (real) load_row(tensor, c.row, c.start + t, channel, lanes_of(s, c.first + i), (float *)&value);
      out[i * CHUNK + t] = value;
      if (prefetch)
        __builtin_prefetch((const char *)tensor.data +
                           (c.row * tensor.row + later * tensor.step + channel) * (tensor.half ? 2 : 4));
    }
  }
}

void store_chunk(const Scan &s, const Tensor &tensor, const Chunk &c, const Vec *in) {
  const Vec zero{};
  for (int t = 0; t < c.steps; t++) {
    const bool real = is_real(s, c.row, c.start + t);
    for (int64_t i = 0; i < c.blocks; i++)
      store_row(tensor, c.row, c.start + t, (c.first + i) * LANES, lanes_of(s, c.first + i),
                (const float *)(real ? in + i * CHUNK + t : &zero));
  }
}

// B or C of a chunk as fp32 (steps, padded), zero at padding and beyond N.
void load_numbers(const Scan &s, const Tensor &tensor, int64_t row, int64_t start, int steps, int64_t padded,
                  float *out) {
  std::memset(out, 0, sizeof(float) * steps * padded);
  for (int t = 0; t < steps; t++) {
    if (!is_real(s, row, start + t)) continue;
    for (int64_t n = 0; n < s.size; n += LANES) {
      const int count = s.size - n < LANES ? int(s.size - n) : LANES;
      load_row(tensor, row, start + t, n, count, out + t * padded + n);
    }
  }
}

// (D, N) of one block as N vectors of channels, and back.
template <class Matrix>
void load_matrix(const Scan &s, Matrix matrix, int64_t block, int64_t padded, float scale, Vec *out) {
  for (int64_t n = 0; n < padded; n++) out[n] = Vec{};
  if (!matrix) return;
  for (int i = 0; i < lanes_of(s, block); i++)
    for (int64_t n = 0; n < s.size; n++) ((float *)(out + n))[i] = matrix[(block * LANES + i) * s.size + n] * scale;
}

void store_matrix(const Scan &s, float *matrix, int64_t block, const Vec *in) {
  for (int i = 0; i < lanes_of(s, block); i++)
    for (int64_t n = 0; n < s.size; n++) matrix[(block * LANES + i) * s.size + n] = ((const float *)(in + n))[i];
}

Vec load_skip(const Scan &s, int64_t block) {
  return s.D.load(block * LANES, lanes_of(s, block));
}

enum Wanted { OUTPUTS, LAST, ALL };

// `steps` steps of TILE numbers of state `h`, to the last; besides wanted are the outputs, added to `y`, or all factors
// `a` and the states after each step. `rate` is A log2(e), `B` and `C` have `padded` numbers a step.
template <Wanted wanted>
inline void advance(int steps, int64_t padded, const Vec *dt, const Vec *u, const Vec *rate, const float *B,
                    const float *C, const uint8_t *resets, Vec *h, Vec *y, Vec *a_out, Vec *h_out) {
  Vec state[TILE];
  for (int n = 0; n < TILE; n++) state[n] = h[n];
  for (int t = 0; t < steps; t++) {
    const Vec dt_t = dt[t], u_t = u[t];
    Vec sum{};
    if (resets && resets[t])
      for (int n = 0; n < TILE; n++) state[n] = Vec{};
#pragma GCC unroll 8
    for (int n = 0; n < TILE; n++) {
      const Vec a = exp2(dt_t * rate[n]);
      state[n] = a * state[n] + u_t * B[t * padded + n];
      if constexpr (wanted == ALL) {
        a_out[t * TILE + n] = a;
        h_out[t * TILE + n] = state[n];
      }
      if constexpr (wanted == OUTPUTS) sum += state[n] * C[t * padded + n];
    }
    if constexpr (wanted == OUTPUTS) y[t] += sum;
  }
  for (int n = 0; n < TILE; n++) h[n] = state[n];
}

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

inline Chunk chunk_of(const Scan &s, const Shape &shape, int64_t row, int64_t group, int64_t chunk) {
  const int64_t first = group * GROUP, start = chunk * CHUNK;
  const int64_t blocks = shape.blocks - first, steps = s.length - start;
  return {row, start, first, blocks < GROUP ? blocks : GROUP, int(steps < CHUNK ? steps : CHUNK)};
}

// Where the state of `block` before the first chunk of a run is kept between the passes.
inline int64_t kept_at(const Shape &shape, int64_t row, int64_t block, int64_t run) {
  return ((row * shape.blocks + block) * shape.kept() + run) * shape.padded;
}

void forward_group(const Scan &s, const Shape &shape, const Tensor &y, float *h, Vec *starts, int64_t row,
                   int64_t group) {
  const int64_t padded = shape.padded, numbers = CHUNK * padded / LANES + 1;
  scratch.reserve(3 * GROUP * CHUNK + 2 * GROUP * padded + 2 * numbers);
  Vec *dt = scratch.take(GROUP * CHUNK), *u = scratch.take(GROUP * CHUNK), *out = scratch.take(GROUP * CHUNK);
  Vec *rate = scratch.take(GROUP * padded), *state = scratch.take(GROUP * padded);
  float *B = (float *)scratch.take(numbers), *C = (float *)scratch.take(numbers);
  Chunk c = chunk_of(s, shape, row, group, 0);
  for (int64_t i = 0; i < c.blocks; i++) {
    load_matrix(s, s.A, c.first + i, padded, LOG2E, rate + i * padded);
    load_matrix(s, s.h0 ? s.h0 + row * s.width * s.size : nullptr, c.first + i, padded, 1, state + i * padded);
  }
  for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
    c = chunk_of(s, shape, row, group, chunk);
    const uint8_t *resets = s.resets ? s.resets + row * s.length + c.start : nullptr;
    load_chunk(s, s.x, c, CHUNK, u);
    load_chunk(s, s.dt, c, CHUNK, dt);
    load_numbers(s, s.B, row, c.start, c.steps, padded, B);
    load_numbers(s, s.C, row, c.start, c.steps, padded, C);
    for (int64_t i = 0; i < c.blocks; i++) {
      Vec *h_i = state + i * padded, *u_i = u + i * CHUNK, *dt_i = dt + i * CHUNK, *y_i = out + i * CHUNK;
      if (starts && chunk % shape.run == 0)
        std::memcpy(starts + kept_at(shape, row, c.first + i, chunk / shape.run), h_i, sizeof(Vec) * padded);
      const Vec skip = load_skip(s, c.first + i);
      for (int t = 0; t < c.steps; t++) y_i[t] = skip * u_i[t], u_i[t] *= dt_i[t];
      for (int64_t n = 0; n < padded; n += TILE)
        advance<OUTPUTS>(c.steps, padded, dt_i, u_i, rate + i * padded + n, B + n, C + n, resets, h_i + n, y_i, nullptr,
                         nullptr);
    }
    store_chunk(s, y, c, out);
  }
  for (int64_t i = 0; i < c.blocks; i++)
    store_matrix(s, h + row * s.width * s.size, c.first + i, state + i * padded);
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

// Numbers of the buffer `starts`.
int64_t scan_starts(int64_t batch, int64_t length, int64_t width, int64_t size) {
  Scan s{};
  s.batch = batch, s.length = length, s.width = width, s.size = size;
  const Shape shape(s);
  return batch * shape.blocks * shape.kept() * shape.padded * LANES;
}

// Fills y and h (B, D, N); `starts` is null where no backward pass follows.
void scan_forward(const Scan *s, const Tensor *y, float *h, Vec *starts) {
  const Shape shape(*s);
  const int64_t tasks = s->batch * shape.groups;
  const bool small = s->batch * s->length * s->width * s->size < 1 << 16;
#pragma omp parallel for schedule(dynamic) num_threads(small ? 1 : s->threads)
  for (int64_t i = 0; i < tasks; i++) forward_group(*s, shape, *y, h, starts, i / shape.groups, i % shape.groups);
}

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

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
}

// Mamba-2's state-space duality on a CPU: what both passes read. Dao and Gu (arXiv:2405.21060), section 6.
//
//   x  (B, T, H, P)     dt  (B, T, H)     B, C  (B, T, G, N)     A, D  (H,)     h  (B, H, P, N)
//
// A chunk is up to CHUNK steps of one document: in a product with zeros a NaN would pass from one to the other. A task
// is a few heads of one group in one row, chunk after chunk; they share the tiles of B, C and their products. All
// arithmetic is fp32. A state is kept turned, (N, P): so every product reads its operands as they lie.
#pragma once

#include <algorithm>
#include <vector>

#include "../../native/tile.h"

namespace {

constexpr int64_t CHUNK = 64;  // steps; masks of a chunk are words of 64 bits
constexpr int64_t HALF = 32;   // steps of a band of a triangle: what is zero above it is left out

// A tensor (B, T, heads, width) of fp32 or bf16, its last dimension contiguous; strides count numbers.
struct View {
  void *data;
  int64_t row, step, head, half;
};

struct Scan {
  int64_t batch, length, heads, groups, width, size, block, threads;  // block: heads of a task, at most
  View x, dt, B, C;
  const float *A, *D, *h0;
  const uint8_t *resets, *real;  // bytes (B, T) or null

  int64_t own() const { return heads / groups; }
  int64_t blocks() const { return (own() + block - 1) / block; }
  int64_t tasks() const { return batch * groups * blocks(); }
  int64_t wide() const { return up(width, W); }
  int64_t deep() const { return up(size, W); }
  int64_t state() const { return deep() * wide(); }
};

struct Chunk {
  int64_t start, steps;
  bool fresh;     // it starts a document
  uint64_t real;  // a bit for each step
  int64_t kept;   // the number of the state before it among those that are kept; none is where it starts a document
};

// The chunks of every row, one after the other: those of row b are [first[b], first[b + 1]).
struct Plan {
  std::vector<Chunk> chunks;
  std::vector<int64_t> first{0};
  int64_t kept = 0;

  Plan(int64_t batch, int64_t length, const uint8_t *resets, const uint8_t *real) {
    for (int64_t b = 0; b < batch; b++) {
      const auto starts = [&](int64_t t) { return resets && resets[b * length + t]; };
      for (int64_t t = 0; t < length;) {
        Chunk c{t, 0, starts(t), 0, kept};
        kept += !c.fresh;
        do {
          c.real |= uint64_t(!real || real[b * length + t]) << c.steps;
          c.steps++, t++;
        } while (t < length && c.steps < CHUNK && !starts(t));
        chunks.push_back(c);
      }
      first.push_back(int64_t(chunks.size()));
    }
  }
};

// The heads [first, last) of one group in one row.
struct Task {
  int64_t index, row, group, first, last;
  Task(const Scan &s, int64_t i) : index(i), row(i / (s.groups * s.blocks())) {
    const int64_t within = i % (s.groups * s.blocks());
    group = within / s.blocks();
    first = group * s.own() + within % s.blocks() * s.block;
    last = std::min(first + s.block, (group + 1) * s.own());
  }
};

// The steps of a chunk of one head as rows of `padded` floats, zero at padding.
void read_steps(const View &t, int64_t row, int64_t head, const Chunk &c, int64_t width, float *to, int64_t padded) {
  const int64_t at = row * t.row + c.start * t.step + head * t.head;
  if (t.half)
    read_rows((const bf16 *)t.data + at, t.step, c.steps, width, to, padded, c.real);
  else
    read_rows((const float *)t.data + at, t.step, c.steps, width, to, padded, c.real);
}

// The same with rows of zeros up to a whole vector of them.
void read_chunk(const View &t, int64_t row, int64_t head, const Chunk &c, int64_t width, float *to, int64_t padded) {
  read_steps(t, row, head, c, width, to, padded);
  memset(to + c.steps * padded, 0, sizeof(float) * (up(c.steps, W) - c.steps) * padded);
}

// The inverse; zero is written at padding.
void write_chunk(float *from, int64_t padded, const Chunk &c, int64_t width, const View &t, int64_t row, int64_t head) {
  for (int64_t i = 0; i < c.steps; i++)
    if (!(c.real >> i & 1)) memset(from + i * padded, 0, sizeof(float) * padded);
  const int64_t at = row * t.row + c.start * t.step + head * t.head;
  if (t.half)
    write_rows(from, padded, 1.0f, c.steps, width, (bf16 *)t.data + at, t.step);
  else
    write_rows(from, padded, 1.0f, c.steps, width, (float *)t.data + at, t.step);
}

// A state (P, N) turned to (N, P) and back, by way of `between`; null is a state of zeros.
void read_state(const Scan &s, const float *from, float *between, float *to) {
  if (!from) {
    memset(to, 0, sizeof(float) * s.state());
    return;
  }
  read_rows(from, s.size, s.width, s.size, between, s.deep());
  memset(between + s.width * s.deep(), 0, sizeof(float) * (s.wide() - s.width) * s.deep());
  transpose(between, s.deep(), s.wide(), s.deep(), to, s.wide(), 1.0f);
}
void write_state(const Scan &s, const float *from, float *between, float *to) {
  transpose(from, s.wide(), s.deep(), s.wide(), between, s.deep(), 1.0f);
  write_rows(between, s.deep(), 1.0f, s.width, s.size, to, s.size);
}

// e^t to 2e-7 relative, the rounding of its exponent apart; exactly 1 at 0, so that padding moves no state; 0, infinite
// and NaN where they should be.
inline Vec exp_of(Vec t) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  t *= LOG2E;
  const Vec shifted = t + SHIFT, f = t - (shifted - SHIFT);
  Vec p = all(0.0013264727f);
  p = p * f + 0.0096715130f;
  p = p * f + 0.055507336f;
  p = p * f + 0.24022242f;
  p = p * f + 0.69314700f;
  p = p * f + 1.0f;
  Vec power = (Vec)((Ints)p + ((Ints)shifted << 23));
  power = t < -126.0f ? Vec{} : power;
  power = t >= 128.0f ? all(INF) : power;
  return t == t ? power : t;
}

inline float sum_of(Vec v) {
  float lanes[W];
  store(lanes, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline Ints lanes_from(int64_t first) {
  Ints lane;
  for (int i = 0; i < W; i++) lane[i] = int32_t(first + i);
  return lane;
}

// What is left at step i of step j's input, (CHUNK, CHUNK), zero for j > i, and of the state before the chunk. The
// exponents are sums over j < k <= i, not differences of sums from the start, which would cancel.
void decays(int64_t steps, const float *logs, float *left, float *since_start) {
  Vec sums[CHUNK / W] = {};
  float sum = 0;
  for (int64_t i = 0; i < steps; i++) {
    const int64_t seen = std::min(up(i + 1, HALF), up(steps, W)) / W;
    for (int64_t v = 0; v < seen; v++) {
      const Ints j = lanes_from(v * W);
      sums[v] = j < int32_t(i) ? sums[v] + logs[i] : Vec{};
      store(left + i * CHUNK + v * W, j <= int32_t(i) ? exp_of(sums[v]) : Vec{});
    }
    since_start[i] = sum += logs[i];
  }
  for (int64_t i = 0; i < steps; i += W) store(since_start + i, exp_of(load(since_start + i)));
}

// ------------------------------------------------------------- products with a lower triangle (steps, steps)

// C (lower) = A B over K, lanes of whole vectors; what lies above the bands is not written.
inline void to_lower(int64_t steps, int64_t K, const float *a, int64_t am, const float *b, float *c) {
  for (int64_t i = 0; i < steps; i += HALF) {
    const int64_t rows = std::min(HALF, steps - i);
    product<ZERO>(rows, up(i + rows, W) / W, K, a + i * am, am, 1, b, CHUNK, c + i * CHUNK, CHUNK);
  }
}

// C += L B for the lower L.
inline void add_lower(int64_t steps, int64_t N, const float *lower, const float *b, float *c, int64_t wide) {
  for (int64_t i = 0; i < steps; i += HALF) {
    const int64_t rows = std::min(HALF, steps - i);
    product<ADD>(rows, N, i + rows, lower + i * CHUNK, CHUNK, 1, b, wide, c + i * wide, wide);
  }
}

// C += L^T B.
inline void add_lower_turned(int64_t steps, int64_t N, const float *lower, const float *b, float *c, int64_t wide) {
  for (int64_t j = 0; j < steps; j += HALF) {
    const int64_t rows = std::min(HALF, steps - j);
    product<ADD>(rows, N, steps - j, lower + j * CHUNK + j, 1, CHUNK, b + j * wide, wide, c + j * wide, wide);
  }
}

// Rows times a number each.
inline void scale_rows(int64_t steps, int64_t wide, const float *by, const float *from, float *to) {
  for (int64_t i = 0; i < steps; i++)
    for (int64_t e = 0; e < wide; e += W) store(to + i * wide + e, load(from + i * wide + e) * by[i]);
}

// What a chunk's heads share: B and C as rows, B turned, and S = C B^T (lower).
class Shared {
 public:
  static int64_t floats(const Scan &s) { return 3 * CHUNK * s.deep() + CHUNK * CHUNK; }
  void take(Arena &memory, const Scan &s) {
    for (float **tile : {&B, &C, &turned_}) *tile = memory.take(CHUNK * s.deep());
    S = memory.take(CHUNK * CHUNK);
  }
  void load(const Scan &s, const Task &t, const Chunk &c) {
    read_chunk(s.B, t.row, t.group, c, s.size, B, s.deep());
    read_chunk(s.C, t.row, t.group, c, s.size, C, s.deep());
    transpose(B, s.deep(), up(c.steps, W), s.deep(), turned_, CHUNK, 1.0f);
    to_lower(c.steps, s.size, C, s.deep(), turned_, S);
  }
  float *B, *C, *S;

 private:
  float *turned_;
};

// A chunk of one head: its inputs, and what follows from its decays.
class Head {
 public:
  static int64_t floats(const Scan &s) { return 2 * CHUNK * s.wide() + 2 * CHUNK * CHUNK + 4 * CHUNK; }
  void take(Arena &memory, const Scan &s) {
    for (float **tile : {&x, &u}) *tile = memory.take(CHUNK * s.wide());
    for (float **tile : {&left, &weights}) *tile = memory.take(CHUNK * CHUNK);
    for (float **each : {&dt, &logs_, &since_start, &to_end}) *each = memory.take(CHUNK);
  }
  void load(const Scan &s, const Task &t, int64_t head, const Chunk &c, const float *S) {
    read_chunk(s.x, t.row, head, c, s.width, x, s.wide());
    read_steps(s.dt, t.row, head, c, 1, dt, 1);
    for (int64_t i = 0; i < c.steps; i++) logs_[i] = c.real >> i & 1 ? dt[i] * s.A[head] : 0;
    decays(c.steps, logs_, left, since_start);
    whole = since_start[c.steps - 1];
    memcpy(to_end, left + (c.steps - 1) * CHUNK, sizeof(float) * up(c.steps, W));
    scale_rows(c.steps, s.wide(), dt, x, u);
    // Weights of the inputs, as attention without a softmax.
    for (int64_t i = 0; i < c.steps; i++)
      for (int64_t j = 0; j < std::min(up(i + 1, HALF), up(c.steps, W)); j += W) {
        const Vec weight = ::load(S + i * CHUNK + j) * ::load(left + i * CHUNK + j);
        store(weights + i * CHUNK + j, lanes_from(j) <= int32_t(i) ? weight : Vec{});
      }
  }
  float *x, *u, *left, *weights, *dt, *since_start, *to_end, whole;

 private:
  float *logs_;
};

}  // namespace

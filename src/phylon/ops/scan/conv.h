// The causal depthwise convolution on a CPU, forward and backward, with SiLU after it or without.
//
//   y_t = f(z_t),  z_t = bias + sum_j w_{W-1-j} x_{t-j}        f(z) = z  or  z s(z) with s(z) = 1 / (1 + exp(-z))
//   dz_t = g_t f'(z_t)        dx_t = sum_j w_{W-1-j} dz_{t+j}        dw_{W-1-j} = sum_t dz_t x_{t-j}
//
// t - j and t + j count the real tokens of t's document. A row of inputs is the W - 1 of the tail, then x: `Past` says
// which of them every step reads, so that padding and documents cost nothing inside.

#pragma once

#include "vectors.h"

namespace phylon {

struct Conv {
  int64_t batch, length, width, reach, threads, silu;
  Tensor x, tail;             // (B, T, D), (B, W - 1, D); no data: zeros
  Tensor weight;              // (D, W) with strides: `row` of channels, `step` of taps
  Numbers bias;               // (D,), no data: zeros
  const uint8_t *resets, *real;
};

constexpr int32_t NOTHING = -1;

// For every step of a row the indices of its W inputs, latest first, and those of the last W - 1, oldest first.
struct Past {
  std::vector<int32_t> of, last;
  void fill(const Conv &c, int64_t row) {
    const int64_t W = c.reach;
    std::vector<int32_t> window(W);  // window[j]: the input j real tokens ago
    for (int64_t j = 0; j < W; j++) window[j] = c.tail.data && j < W - 1 ? int32_t(W - 2 - j) : NOTHING;
    of.resize(c.length * W);
    last.resize(W);
    for (int64_t t = 0; t < c.length; t++) {
      const int64_t at = row * c.length + t;
      if (c.real && !c.real[at]) continue;
      if (c.resets && c.resets[at]) window.assign(W, NOTHING);
      for (int64_t j = W - 1; j > 0; j--) window[j] = window[j - 1];
      window[0] = int32_t(W - 1 + t);
      for (int64_t j = 0; j < W; j++) of[t * W + j] = window[j];
    }
    for (int64_t k = 0; k < W - 1; k++) last[k] = window[W - 2 - k];
  }
};
inline thread_local Past past;

inline Vec input(const Conv &c, int64_t row, int32_t index, int64_t channel, int count) {
  Vec out{};
  if (index >= c.reach - 1)
    load_row(c.x, row, index - (c.reach - 1), channel, count, (float *)&out);
  else if (index >= 0)
    load_row(c.tail, row, index, channel, count, (float *)&out);
  return out;
}

inline Vec some(const float *from, int count) {
  Vec out{};
  count == LANES ? std::memcpy(&out, from, 4 * LANES) : std::memcpy(&out, from, 4 * count);
  return out;
}

// The W inputs of one step for the channels from `channel` on: addresses of whole fp32 rows where that is what they are.
struct Window {
  const float *rows[8];
  bool plain;  // all are
};

inline Window window_of(const Conv &c, int64_t row, int64_t t) {
  Window w{};
  w.plain = !c.x.half && !(c.tail.data && c.tail.half) && c.reach <= 8;
  for (int64_t j = 0; j < c.reach && w.plain; j++) {
    const int32_t index = past.of[t * c.reach + j];
    if (index >= c.reach - 1)
      w.rows[j] = (const float *)c.x.data + row * c.x.row + (index - (c.reach - 1)) * c.x.step;
    else if (index >= 0)
      w.rows[j] = (const float *)c.tail.data + row * c.tail.row + index * c.tail.step;
    else
      w.plain = false;  // before the document
  }
  return w;
}

struct Range {
  int64_t from, to;
  int64_t blocks() const { return (to - from + LANES - 1) / LANES; }
  int count(int64_t channel) const { return int(to - channel < LANES ? to - channel : LANES); }
};

// The weights and biases of a range as vectors of channels, read once from where they lie: [block][latest tap first].
struct Weights {
  Vec *taps, *bias;
  static int64_t vectors(const Conv &c, Range range) { return (c.reach + 1) * range.blocks(); }
  Weights(const Conv &c, Range range) : taps(scratch.take(c.reach * range.blocks())), bias(scratch.take(range.blocks())) {
    for (int64_t i = 0; i < range.blocks(); i++) {
      const int64_t channel = range.from + i * LANES;
      bias[i] = c.bias ? c.bias.load(channel, range.count(channel)) : Vec{};
      c.weight.half ? fill(c, (const uint16_t *)c.weight.data, channel, range.count(channel), taps + i * c.reach)
                    : fill(c, (const float *)c.weight.data, channel, range.count(channel), taps + i * c.reach);
    }
  }
  template <class T> static void fill(const Conv &c, const T *weight, int64_t channel, int count, Vec *out) {
    for (int64_t j = 0; j < c.reach; j++) {
      out[j] = Vec{};
      const T *tap = weight + channel * c.weight.row + (c.reach - 1 - j) * c.weight.step;
      for (int lane = 0; lane < count; lane++) ((float *)(out + j))[lane] = widened(tap[lane * c.weight.row]);
    }
  }
};

// Of the block of channels whose first weight is `taps`.
inline Vec convolved(const Conv &c, Vec z, const Vec *taps, const Window &w, int64_t row, int64_t t, int64_t channel,
                     int count) {
  if (w.plain && count == LANES) {
    for (int64_t j = 0; j < c.reach; j++) z += taps[j] * read(w.rows[j] + channel);
    return z;
  }
  for (int64_t j = 0; j < c.reach; j++) z += taps[j] * input(c, row, past.of[t * c.reach + j], channel, count);
  return z;
}

inline Vec sigmoid(Vec z) { return 1.0f / (1.0f + exp2(z * -1.44269504f)); }

inline void conv_forward_range(const Conv &c, const Tensor &y, const Tensor &last, int64_t row, Range range) {
  past.fill(c, row);
  scratch.reserve(Weights::vectors(c, range));
  const Weights weights(c, range);
  const Vec zero{};
  for (int64_t t = 0; t < c.length; t++) {
    const bool real = !c.real || c.real[row * c.length + t];
    const Window window = real ? window_of(c, row, t) : Window{};
    for (int64_t i = 0; i < range.blocks(); i++) {
      const int64_t d = range.from + i * LANES;
      const int count = range.count(d);
      Vec z = zero;
      if (real) {
        z = convolved(c, weights.bias[i], weights.taps + i * c.reach, window, row, t, d, count);
        if (c.silu) z *= sigmoid(z);
      }
      store_row(y, row, t, d, count, (const float *)&z);
    }
  }
  for (int64_t k = 0; k < c.reach - 1; k++)
    for (int64_t d = range.from; d < range.to; d += LANES) {
      const Vec value = input(c, row, past.last[k], d, range.count(d));
      store_row(last, row, k, d, range.count(d), (const float *)&value);
    }
}

struct ConvGradients {
  Tensor y, last;       // of the outputs and the new tail (no data: zero)
  Tensor x, tail;       // to fill
  float *weight, *bias;  // (B, W, D), (B, D), to fill
};

// Against time, with the last W gradients dz of the document in a ring.
inline void conv_backward_range(const Conv &c, const ConvGradients &grad, int64_t row, Range range) {
  past.fill(c, row);
  const int64_t W = c.reach, blocks = range.blocks();
  scratch.reserve((2 * W + 1) * blocks + Weights::vectors(c, range));
  const Weights weights(c, range);
  Vec *ring = scratch.take(W * blocks), *dw = scratch.take(W * blocks), *db = scratch.take(blocks);
  for (int64_t i = 0; i < W * blocks; i++) ring[i] = dw[i] = Vec{};
  for (int64_t i = 0; i < blocks; i++) db[i] = Vec{};
  int64_t slot = 0, following = 0;  // of the ring; later tokens of the document that read this one
  for (int64_t index = W - 2 + c.length; index >= 0; index--) {
    const int64_t t = index - (W - 1);
    const Tensor &to = t >= 0 ? grad.x : grad.tail;
    const int64_t step = t >= 0 ? t : index;
    if (t < 0 && !grad.tail.data) break;
    const bool real = t < 0 || !c.real || c.real[row * c.length + t];
    const Window window = real && t >= 0 ? window_of(c, row, t) : Window{};
    const Vec zero{};
    for (int64_t i = 0; i < blocks; i++) {
      const int64_t d = range.from + i * LANES;
      const int count = range.count(d);
      if (!real) {
        store_row(to, row, step, d, count, (const float *)&zero);
        continue;
      }
      Vec dz{};
      if (t >= 0) {
        load_row(grad.y, row, t, d, count, (float *)&dz);
        if (c.silu) {
          const Vec z = convolved(c, weights.bias[i], weights.taps + i * W, window, row, t, d, count), s = sigmoid(z);
          dz *= s * (1.0f + z * (1.0f - s));
        }
        db[i] += dz;
        const bool plain = window.plain && count == LANES;
        for (int64_t j = 0; j < W; j++)
          dw[(W - 1 - j) * blocks + i] +=
              dz * (plain ? read(window.rows[j] + d) : input(c, row, past.of[t * W + j], d, count));
      }
      ring[slot * blocks + i] = dz;
      Vec dx{};
      for (int64_t j = 0; j <= following; j++)
        dx += weights.taps[i * W + j] * ring[(slot + j) % W * blocks + i];
      for (int64_t k = 0; k < W - 1 && grad.last.data; k++)
        if (past.last[k] == index) {
          Vec passed{};
          load_row(grad.last, row, k, d, count, (float *)&passed);
          dx += passed;
        }
      store_row(to, row, step, d, count, (const float *)&dx);
    }
    if (!real) continue;
    slot = (slot + W - 1) % W;
    following = following + 1 < W ? following + 1 : W - 1;
    // Nothing later reads what came before this document.
    if (t >= 0 && c.resets && c.resets[row * c.length + t]) following = 0;
  }
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t d = range.from + i * LANES;
    for (int64_t j = 0; j < W; j++)
      std::memcpy(grad.weight + (row * W + j) * c.width + d, dw + j * blocks + i, 4 * range.count(d));
    std::memcpy(grad.bias + row * c.width + d, db + i, 4 * range.count(d));
  }
}

template <class Work>
inline void over_ranges(const Conv &c, const Work &work) {
  const int64_t wide = GROUP * LANES, ranges = (c.width + wide - 1) / wide, tasks = c.batch * ranges;
  const bool small = c.batch * c.length * c.width < 1 << 15;
#pragma omp parallel for schedule(dynamic) num_threads(small ? 1 : c.threads)
  for (int64_t i = 0; i < tasks; i++) {
    const int64_t from = i % ranges * wide;
    work(i / ranges, Range{from, from + wide < c.width ? from + wide : c.width});
  }
}

}  // namespace phylon

extern "C" {
using namespace phylon;

// Fills y and the new tail, both in the dtype of x.
void conv_forward(const Conv *c, const Tensor *y, const Tensor *last) {
  over_ranges(*c, [&](int64_t row, Range range) { conv_forward_range(*c, *y, *last, row, range); });
}

void conv_backward(const Conv *c, const ConvGradients *grad) {
  over_ranges(*c, [&](int64_t row, Range range) { conv_backward_range(*c, *grad, row, range); });
}
}

// y and the last state; for a backward pass, the state before every chunk of a document but its first.
//
//   y_i = sum_{j <= i} (C_i B_j) left_ij u_j + since_start_i C_i h + D x_i,  u = dt x
//   h <- whole h + sum_j B_j to_end_j u_j
#pragma once

#include "chunks.h"

namespace {

// `starts` (kept states, heads, N, P), padded, or null.
void forward_task(const Scan &s, const Plan &plan, const Task &t, const View &y, float *last, float *starts) {
  const int64_t wide = s.wide(), deep = s.deep(), lanes = wide / W, heads = t.last - t.first;
  Shared shared;
  Head head;
  Arena &memory = arena();
  memory.reserve(Shared::floats(s) + Head::floats(s) + 2 * CHUNK * wide + (heads + 1) * s.state() + 16 * 20);
  shared.take(memory, s), head.take(memory, s);
  float *out = memory.take(CHUNK * wide), *weighted = memory.take(CHUNK * wide);
  float *between = memory.take(s.state()), *states = memory.take(heads * s.state());
  for (int64_t i = 0; i < heads; i++) {
    const int64_t at = (t.row * s.heads + t.first + i) * s.width * s.size;
    read_state(s, s.h0 ? s.h0 + at : nullptr, between, states + i * s.state());
  }
  bool empty = s.h0 == nullptr;
  for (int64_t k = plan.first[t.row]; k < plan.first[t.row + 1]; k++) {
    const Chunk &c = plan.chunks[k];
    empty = empty || c.fresh;
    shared.load(s, t, c);
    for (int64_t i = 0; i < heads; i++) {
      float *h = states + i * s.state();
      head.load(s, t, t.first + i, c, shared.S);
      if (c.fresh) memset(h, 0, sizeof(float) * s.state());
      if (starts && !c.fresh)
        memcpy(starts + (c.kept * s.heads + t.first + i) * s.state(), h, sizeof(float) * s.state());
      const float skip = s.D[t.first + i];
      if (!empty) product<ZERO>(c.steps, lanes, s.size, shared.C, deep, 1, h, wide, out, wide);
      for (int64_t j = 0; j < c.steps; j++)
        for (int64_t e = j * wide; e < (j + 1) * wide; e += W)
          store(out + e, load(head.x + e) * skip + (empty ? Vec{} : load(out + e) * head.since_start[j]));
      add_lower(c.steps, lanes, head.weights, head.u, out, wide);
      write_chunk(out, wide, c, s.width, y, t.row, t.first + i);
      scale_rows(c.steps, wide, head.to_end, head.u, weighted);
      for (int64_t e = 0; e < s.state(); e += W) store(h + e, load(h + e) * head.whole);
      product<ADD>(s.size, lanes, c.steps, shared.B, 1, deep, weighted, wide, h, wide);
    }
    empty = false;
  }
  for (int64_t i = 0; i < heads; i++)
    write_state(s, states + i * s.state(), between, last + (t.row * s.heads + t.first + i) * s.width * s.size);
}

// One step of one head: the state is read, moved on and written once, as it lies.
void step(const Scan &s, const Chunk &c, int64_t row, int64_t h, const View &y, float *last) {
  const int64_t wide = s.wide(), deep = s.deep(), at = (row * s.heads + h) * s.width * s.size;
  Arena &memory = arena();
  memory.reserve(2 * wide + 2 * deep + 16 * 4);
  float *x = memory.take(wide), *out = memory.take(wide), *B = memory.take(deep), *C = memory.take(deep), dt;
  read_steps(s.x, row, h, c, s.width, x, wide);
  read_steps(s.dt, row, h, c, 1, &dt, 1);
  read_steps(s.B, row, h / s.own(), c, s.size, B, deep);
  read_steps(s.C, row, h / s.own(), c, s.size, C, deep);
  const float *before = s.h0 && !c.fresh ? s.h0 + at : nullptr, left = c.real ? exp_of(all(dt * s.A[h]))[0] : 1;
  for (int64_t p = 0; p < s.width; p++) {
    const float *from = before ? before + p * s.size : nullptr, u = dt * x[p];
    float *to = last + at + p * s.size, rest = 0;
    Vec sum{};
    int64_t n = 0;
    for (; n + W <= s.size; n += W) {
      const Vec now = load(B + n) * u + (from ? load(from + n) * left : Vec{});
      store(to + n, now);
      sum += now * load(C + n);
    }
    for (; n < s.size; n++) {
      to[n] = B[n] * u + (from ? from[n] * left : 0);
      rest += to[n] * C[n];
    }
    out[p] = sum_of(sum) + rest + s.D[h] * x[p];
  }
  write_chunk(out, wide, c, s.width, y, row, h);
}

}  // namespace

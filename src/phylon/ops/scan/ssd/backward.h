// The gradients, chunk by chunk against time, from the state before each. With g that of y, q that of the state after:
//
//   dweights_ij = g_i u_j     dS = sum over heads of dweights left     a = since_start g     v = to_end u
//   du_j = sum_{i >= j} weights_ij g_i + to_end_j q B_j                dx = dt du + D g
//   dC_i = sum_j dS_ij B_j + h a_i     dB_j = sum_i dS_ij C_i + q v_j  q <- whole q + sum_i C_i a_i
//
// The exponent of step k has a part in all that passes it: in weights with j < k <= i, in what the state before brings
// to i >= k, in what j < k leaves for the state after, and in what passes the chunk whole.
#pragma once

#include "chunks.h"

namespace {

struct Gradients {
  View y, x, dt;
  const float *h;   // of the last state, or null
  float *B, *C;     // (blocks, B, T, G, N), each block its heads' part
  float *A, *D;     // (B, H)
  float *h0;        // (B, H, P, N)
  const float *starts;
};

class Backward {
 public:
  Backward(const Scan &s, const Plan &plan, const Gradients &grad, const Task &t)
      : s(s), plan(plan), grad(grad), t(t), dA(t.last - t.first), dD(t.last - t.first) {
    const int64_t rows = CHUNK * wide, maps = CHUNK * deep, heads = t.last - t.first;
    Arena &memory = arena();
    memory.reserve(Shared::floats(s) + Head::floats(s) + 6 * rows + 3 * maps + 2 * CHUNK * CHUNK + 4 * CHUNK +
                   (heads + 1) * s.state() + 16 * 40);
    shared.take(memory, s), head.take(memory, s);
    for (float **tile : {&g, &turned, &du, &scaled, &dx}) *tile = memory.take(rows);
    for (float **tile : {&dB, &dC, &part}) *tile = memory.take(maps);
    for (float **tile : {&dS, &dweights}) *tile = memory.take(CHUNK * CHUNK);
    for (float **each : {&dlogs, &ddt, &brought, &given}) *each = memory.take(CHUNK);
    between = memory.take(s.state()), states = memory.take(heads * s.state());
  }

  void run() {
    for (int64_t h = t.first; h < t.last; h++) {
      const int64_t at = (t.row * s.heads + h) * s.width * s.size;
      read_state(s, grad.h ? grad.h + at : nullptr, between, after(h));
    }
    ends = grad.h == nullptr;
    for (int64_t k = plan.first[t.row + 1] - 1; k >= plan.first[t.row]; k--) {
      const Chunk &c = plan.chunks[k];
      begins = c.fresh || (k == plan.first[t.row] && !s.h0);
      shared.load(s, t, c);
      memset(dS, 0, sizeof(float) * CHUNK * CHUNK);
      memset(dB, 0, sizeof(float) * CHUNK * deep), memset(dC, 0, sizeof(float) * CHUNK * deep);
      for (int64_t h = t.first; h < t.last; h++)
        one_head(c, h, c.fresh ? nullptr : grad.starts + (c.kept * s.heads + h) * s.state());
      add_lower(c.steps, deep / W, dS, shared.B, dC, deep);
      add_lower_turned(c.steps, deep / W, dS, shared.C, dB, deep);
      write_maps(c, dB, grad.B), write_maps(c, dC, grad.C);
      ends = c.fresh;
    }
    for (int64_t h = t.first; h < t.last; h++) {
      const int64_t one = t.row * s.heads + h;
      write_state(s, after(h), between, grad.h0 + one * s.width * s.size);
      grad.A[one] = float(dA[h - t.first]), grad.D[one] = float(dD[h - t.first]);
    }
  }

 private:
  float *after(int64_t h) { return states + (h - t.first) * s.state(); }

  void one_head(const Chunk &c, int64_t h, const float *before) {
    const int64_t n = c.steps;
    float *q = after(h);
    head.load(s, t, h, c, shared.S);
    read_chunk(grad.y, t.row, h, c, s.width, g, wide);
    std::fill_n(brought, CHUNK, 0.0f), std::fill_n(given, CHUNK, 0.0f);
    float passed = 0;

    transpose(head.u, wide, up(n, W), wide, turned, CHUNK, 1.0f);
    to_lower(n, s.width, g, wide, turned, dweights);
    of_the_decays(n);

    if (ends) {
      memset(du, 0, sizeof(float) * n * wide);
    } else {
      product<ZERO>(n, lanes, s.size, shared.B, deep, 1, q, wide, du, wide);
      scale_rows(n, wide, head.to_end, du, du);
      scale_rows(n, wide, head.to_end, head.u, scaled);
      by_way_of(q, n, shared.B, dB, given);
    }
    add_lower_turned(n, lanes, head.weights, g, du, wide);

    if (!begins && !ends) {
      Vec sum{};
      for (int64_t e = 0; e < s.state(); e += W) sum += load(q + e) * load(before + e);
      passed = head.whole * sum_of(sum);
    }
    if (c.fresh) {
      memset(q, 0, sizeof(float) * s.state());
    } else {
      scale_rows(n, wide, head.since_start, g, scaled);
      if (!begins) by_way_of(before, n, shared.C, dC, brought);
      for (int64_t e = 0; e < s.state(); e += W) store(q + e, load(q + e) * head.whole);
      product<ADD>(s.size, lanes, n, shared.C, 1, deep, scaled, wide, q, wide);
    }
    finish(c, h, passed);
  }

  // Adds what the rows `scaled` (n, P) give by a state (N, P) to `to` (n, N); `of` is its products with `rows`, step by
  // step.
  void by_way_of(const float *state, int64_t n, const float *rows, float *to, float *of) {
    transpose(state, wide, deep, wide, between, deep, 1.0f);
    product<ZERO>(n, deep / W, s.width, scaled, wide, 1, between, deep, part, deep);
    for (int64_t i = 0; i < n; i++) {
      Vec sum{};
      for (int64_t e = i * deep; e < (i + 1) * deep; e += W) {
        const Vec own = load(part + e);
        sum += own * load(rows + e);
        store(to + e, load(to + e) + own);
      }
      of[i] = sum_of(sum);
    }
  }

  // dS, and the part of the weights in the exponents.
  void of_the_decays(int64_t n) {
    Vec passing[CHUNK / W] = {};
    for (int64_t i = n - 1; i >= 0; i--) {
      Vec sum{};
      for (int64_t v = 0; v * W <= i; v++) {
        const int64_t at = i * CHUNK + v * W;
        const Ints j = lanes_from(v * W);
        const Vec d = load(dweights + at), own = j <= int32_t(i) ? d * load(head.left + at) : Vec{};
        store(dS + at, load(dS + at) + own);
        passing[v] += j < int32_t(i) ? d * load(head.weights + at) : Vec{};
        sum += j < int32_t(i) ? passing[v] : Vec{};
      }
      dlogs[i] = sum_of(sum);
    }
  }

  void finish(const Chunk &c, int64_t h, float passed) {
    const int64_t n = c.steps;
    float later = passed, earlier = 0;
    for (int64_t i = n - 1; i >= 0; i--) dlogs[i] += later += brought[i];
    for (int64_t i = 0; i < n; i++) dlogs[i] += earlier, earlier += given[i];
    const float skip = s.D[h];
    Vec sums{};
    for (int64_t i = 0; i < n; i++) {
      Vec sum{};
      for (int64_t e = i * wide; e < (i + 1) * wide; e += W) {
        const Vec x = load(head.x + e), y = load(g + e), u = load(du + e);
        sums += x * y;
        sum += x * u;
        store(dx + e, u * head.dt[i] + y * skip);
      }
      ddt[i] = sum_of(sum) + dlogs[i] * s.A[h];
      dA[h - t.first] += c.real >> i & 1 ? dlogs[i] * head.dt[i] : 0;
    }
    dD[h - t.first] += sum_of(sums);
    write_chunk(dx, wide, c, s.width, grad.x, t.row, h);
    write_chunk(ddt, 1, c, 1, grad.dt, t.row, h);
  }

  void write_maps(const Chunk &c, float *from, float *to) {
    const int64_t step = s.groups * s.size, block = t.index % s.blocks();
    const View view{to + block * s.batch * s.length * step, s.length * step, step, s.size, 0};
    write_chunk(from, deep, c, s.size, view, t.row, t.group);
  }

  const Scan &s;
  const Plan &plan;
  const Gradients &grad;
  const Task &t;
  const int64_t wide = s.wide(), deep = s.deep(), lanes = wide / W;
  std::vector<double> dA, dD;  // sums over all steps, which can cancel
  Shared shared;
  Head head;
  bool begins = false, ends = false;  // no state comes in; no gradient of a state comes back
  float *g, *turned, *du, *scaled, *dx, *dB, *dC, *part, *dS, *dweights;
  float *dlogs, *ddt, *brought, *given, *between, *states;
};

}  // namespace

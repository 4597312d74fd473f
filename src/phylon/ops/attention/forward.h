// The forward pass: for each query tile an online softmax over its kept key tiles. FlashAttention-2
// (arXiv:2307.08691), algorithm 1, with every tile transposed.
#pragma once

#include "widened.h"

namespace {

// One step of the online softmax: scores, times `unit`, become exponentials under the new maximum, l their sum, factor
// what the old sums are to be multiplied by.
inline void soften(float* s, int64_t rows, int64_t N, float unit, float* m, float* l, float* factor) {
    for (int64_t n = 0; n < N; ++n) {
        float* column = s + n * W;
        Vec top[4] = {all(-INF), all(-INF), all(-INF), all(-INF)};
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            for (int x = 0; x < 4; ++x) top[x] = larger(load(column + (r + x) * TILE), top[x]);
        for (; r < rows; ++r) top[0] = larger(load(column + r * TILE), top[0]);
        Vec most = larger(larger(larger(top[0], top[1]), larger(top[2], top[3])) * unit, load(m + n * W));
        // Where nothing has been seen yet the maximum is -infinity, and -infinity minus itself is no number.
        Vec base = larger(most, all(-1e30f));
        Vec shrink = exp2_of(load(m + n * W) - base);
        Vec sum = load(l + n * W) * shrink;
        for (r = 0; r < rows; ++r) {
            Vec p = exp2_of(load(column + r * TILE) * unit - base);
            sum += p;
            store(column + r * TILE, p);
        }
        store(m + n * W, most);
        store(l + n * W, sum);
        store(factor + n * W, shrink);
    }
}

// `P`: the operands and products, Widened or Paired.
template <class P>
class Forward {
  public:
    Forward(const Call& c, const Maps& maps, int64_t slots)
        : c_(c), maps_(maps), wide_v_(up(c.Ev, P::PAD)), products_(c, slots, false), scores_(c) {
        Arena& memory = arena();
        int64_t tile = TILE * TILE, v = TILE * wide_v_;
        memory.reserve(2 * v + 2 * tile + products_.floats() + Scores::floats(c) + 1024);
        rows_ = memory.take(v);
        s_ = memory.take(tile);
        o_ = memory.take(v);
        f_ = c.dropout > 0 ? memory.take(tile) : nullptr;
        products_.take(memory);
        scores_.take(memory);
    }

    // Query tiles from..to of one batch row and head.
    void run(int64_t b, int64_t h, int64_t from, int64_t to) {
        int64_t index = maps_.index(b, h);
        products_.select(b, h / (c_.H / c_.K), index, maps_[index]);
        scores_.select(b, h);
        for (int64_t i = from; i < to; ++i) tile(b, h, i, maps_[index]);
    }

  private:
    void tile(int64_t b, int64_t h, int64_t i, const Map& map) {
        int64_t queries = c_.queries_in(i), N = up(queries, P::PAD) / W;
        products_.load_queries(b, h, i, ~0ull);
        float m[TILE], l[TILE], factor[TILE];
        std::fill_n(m, TILE, -INF);
        std::fill_n(l, TILE, 0.0f);
        for (int64_t e = 0; e < wide_v_; ++e) memset(o_ + e * TILE, 0, N * W * sizeof(float));
        for (int32_t t = map.start[i]; t < map.start[i + 1]; ++t) {
            Kept kept = map.kept[t];
            int64_t j = kept.key, keys = c_.keys_in(j), slot = products_.hold(j);
            uint64_t room[TILE];
            products_.scores(slot, keys, N, s_);
            scores_.finish(s_, i, j, N, maps_.words(i, kept, room));
            soften(s_, keys, N, products_.unit(), m, l, factor);
            if (f_) {
                scores_.keep_factors(f_, i, j, N);
                multiply(s_, f_, keys, N);
            }
            products_.add_output(slot, keys, N, s_, factor, o_);
        }
        finish(b, h, i, queries, N, m, l);
    }

    // Divide by the sums, the sink's share among them, and write output and log-sum-exp.
    void finish(int64_t b, int64_t h, int64_t i, int64_t queries, int64_t N, const float* m, const float* l) {
        float inverse[TILE];
        float* lse = c_.lse + (b * c_.H + h) * c_.T + i * TILE;
        uint64_t seeing = 0;
        for (int64_t q = 0; q < N * W; ++q) {
            float most = m[q], sum = l[q], shrink = 1;
            inverse[q] = 0;
            if (q >= queries) continue;
            lse[q] = INF;
            if (sum == 0) continue;  // sees nothing; a NaN among its scores is in the sum, not in the maximum
            if (c_.sink) {
                float sink = c_.sink[h] * LOG2E, top = std::max(most, sink);
                shrink = std::exp2(most - top);
                sum = sum * shrink + std::exp2(sink - top);
                most = top;
            }
            inverse[q] = shrink / sum;
            lse[q] = most + std::log2(sum);
            seeing |= 1ull << q;
        }
        for (int64_t e = 0; e < c_.Ev; ++e)
            for (int64_t n = 0; n < N; ++n) {
                float* at = o_ + e * TILE + n * W;
                store(at, load(at) * load(inverse + n * W));
            }
        transpose(o_, TILE, wide_v_, N * W, rows_, wide_v_, 1.0f);
        for (int64_t q = 0; q < queries; ++q)
            if (!(seeing >> q & 1)) memset(rows_ + q * wide_v_, 0, wide_v_ * sizeof(float));
        write_rows(rows_, wide_v_, 1.0f, queries, c_.Ev, c_.o.template at<typename P::Element>(b, i * TILE, h), c_.o.token);
    }

    const Call& c_;
    const Maps& maps_;
    int64_t wide_v_;
    P products_;
    Scores scores_;
    float *rows_, *s_, *o_, *f_;
};

struct Piece {
    int64_t b, h, from, to;
};

// Every query tile, in pieces of about equal work: enough of them that no thread waits long for the last one.
inline std::vector<Piece> pieces(const Call& c, const Maps& maps) {
    int64_t total = 0;
    for (int64_t b = 0; b < c.B; ++b)
        for (int64_t h = 0; h < c.H; ++h) total += maps[maps.index(b, h)].kept.size() + c.query_tiles();
    int64_t most = c.threads == 1 ? total : total / (4 * c.threads) + 1;
    std::vector<Piece> found;
    for (int64_t b = 0; b < c.B; ++b)
        for (int64_t h = 0; h < c.H; ++h) {
            const Map& map = maps[maps.index(b, h)];
            for (int64_t i = 0; i < c.query_tiles();) {
                int64_t from = i, work = 0;
                while (i < c.query_tiles() && (work == 0 || work < most)) {
                    work += map.start[i + 1] - map.start[i] + 1;
                    ++i;
                }
                found.push_back({b, h, from, i});
            }
        }
    return found;
}

template <class P>
void forward(const Call& c) {
    Maps maps(c);
    int64_t slots = maps.span();
    std::vector<Piece> work = pieces(c, maps);
#pragma omp parallel num_threads(c.threads)
    {
        Forward<P> mine(c, maps, slots);
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < int64_t(work.size()); ++p) mine.run(work[p].b, work[p].h, work[p].from, work[p].to);
    }
}

}  // namespace

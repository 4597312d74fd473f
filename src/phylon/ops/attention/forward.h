// The forward pass: for each query tile an online softmax over its kept key tiles. FlashAttention-2
// (arXiv:2307.08691), algorithm 1, with every tile transposed.
#pragma once

#include "scores.h"

namespace {

// One step of the online softmax: scores become exponentials under the new maximum, l their sum, factor what the old
// sums are to be multiplied by.
inline void soften(float* s, int64_t rows, int64_t N, float* m, float* l, float* factor) {
    for (int64_t n = 0; n < N; ++n) {
        float* column = s + n * W;
        Vec top[4] = {load(m + n * W), load(m + n * W), load(m + n * W), load(m + n * W)};
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
            for (int x = 0; x < 4; ++x) top[x] = larger(load(column + (r + x) * TILE), top[x]);
        for (; r < rows; ++r) top[0] = larger(load(column + r * TILE), top[0]);
        Vec most = larger(larger(top[0], top[1]), larger(top[2], top[3]));
        // Where nothing has been seen yet the maximum is -infinity, and -infinity minus itself is no number.
        Vec base = larger(most, all(-1e30f));
        Vec shrink = exp2_of(load(m + n * W) - base);
        Vec sum = load(l + n * W) * shrink;
        for (r = 0; r < rows; ++r) {
            Vec p = exp2_of(load(column + r * TILE) - base);
            sum += p;
            store(column + r * TILE, p);
        }
        store(m + n * W, most);
        store(l + n * W, sum);
        store(factor + n * W, shrink);
    }
}

template <class T>
class Forward {
  public:
    Forward(const Call& c, const Maps& maps, int64_t slots)
        : c_(c), maps_(maps), wide_(up(c.E, W)), wide_v_(up(c.Ev, W)), keys_(c, slots), scores_(c) {
        Arena& memory = arena();
        int64_t tile = TILE * TILE, q = TILE * wide_, v = TILE * wide_v_;
        memory.reserve(2 * std::max(q, v) + q + v + 2 * tile + Keys<T>::floats(c, slots) + Scores::floats(c) + 1024);
        rows_ = memory.take(std::max(q, v));
        q_ = memory.take(q);
        s_ = memory.take(tile);
        o_ = memory.take(v);
        f_ = c.dropout > 0 ? memory.take(tile) : nullptr;
        keys_.take(memory);
        scores_.take(memory);
    }

    // Query tiles from..to of one batch row and head.
    void run(int64_t b, int64_t h, int64_t from, int64_t to) {
        int64_t index = maps_.index(b, h);
        keys_.select(b, h / (c_.H / c_.K), index, maps_[index]);
        scores_.select(b, h);
        for (int64_t i = from; i < to; ++i) tile(b, h, i, maps_[index]);
    }

  private:
    void tile(int64_t b, int64_t h, int64_t i, const Map& map) {
        int64_t queries = c_.queries_in(i), N = (queries + W - 1) / W;
        read_rows(c_.q.at<T>(b, i * TILE, h), c_.q.token, queries, c_.E, rows_, wide_);
        memset(rows_ + queries * wide_, 0, (N * W - queries) * wide_ * sizeof(float));
        transpose(rows_, wide_, N * W, wide_, q_, TILE, c_.score_factor());
        float m[TILE], l[TILE], factor[TILE];
        std::fill_n(m, TILE, -INF);
        std::fill_n(l, TILE, 0.0f);
        for (int64_t e = 0; e < wide_v_; ++e) memset(o_ + e * TILE, 0, N * W * sizeof(float));
        for (int32_t t = map.start[i]; t < map.start[i + 1]; ++t) {
            Kept kept = map.kept[t];
            int64_t j = kept.key, keys = c_.keys_in(j), slot = keys_.hold(j);
            uint64_t room[TILE];
            product<ZERO>(keys, N, c_.E, keys_.k(slot), c_.E, 1, q_, TILE, s_, TILE);
            scores_.finish(s_, i, j, N, maps_.words(i, kept, room));
            soften(s_, keys, N, m, l, factor);
            if (f_) {
                scores_.keep_factors(f_, i, j, N);
                multiply(s_, f_, keys, N);
            }
            product<SCALE>(c_.Ev, N, keys, keys_.v(slot), 1, c_.Ev, s_, TILE, o_, TILE, factor);
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
            if (most == -INF) continue;
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
        write_rows(rows_, wide_v_, 1.0f, queries, c_.Ev, c_.o.at<T>(b, i * TILE, h), c_.o.token);
    }

    const Call& c_;
    const Maps& maps_;
    int64_t wide_, wide_v_;
    Keys<T> keys_;
    Scores scores_;
    float *rows_, *q_, *s_, *o_, *f_;
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

template <class T>
void forward(const Call& c) {
    Maps maps(c);
    int64_t slots = maps.span();
    std::vector<Piece> work = pieces(c, maps);
#pragma omp parallel num_threads(c.threads)
    {
        Forward<T> mine(c, maps, slots);
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < int64_t(work.size()); ++p) mine.run(work[p].b, work[p].h, work[p].from, work[p].to);
    }
}

}  // namespace

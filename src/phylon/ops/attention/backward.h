// The backward pass by recomputation. FlashAttention-2 (arXiv:2307.08691), algorithm 2, with every tile transposed:
//
//     P = exp2(S - L)    dV += P^T dO    dP = dO V^T    dS = P (dP - D)    dK += dS^T Q    dQ += dS K
//
// Where there are enough (batch row, key head) pairs for the threads, each thread takes whole pairs: key blocks
// outside, query tiles inside, dQ kept in the thread's memory. Otherwise two passes, one over key blocks for dK and dV
// and one over query tiles for dQ, which costs 7 products instead of 5 but splits as finely as one likes. Every sum
// runs in the same order either way, so that the number of threads moves no bit.
#pragma once

#include "forward.h"

namespace {

inline int64_t block_tiles(const Call& c) { return std::max<int64_t>(1, 512 / up(std::max(c.E, c.Ev), 16)); }

// Scores, times `unit`, and gradients of weights become weights and gradients of scores, in place.
template <bool CAPPED>
inline void differentiate(float* s, float* dp, int64_t rows, int64_t N, float unit, const float* L, const float* D,
                          float per_cap) {
    for (int64_t n = 0; n < N; ++n) {
        Vec lse = load(L + n * W), delta = load(D + n * W);
        for (int64_t r = 0; r < rows; ++r) {
            float *at = s + r * TILE + n * W, *d = dp + r * TILE + n * W;
            Vec score = load(at);
            Vec p = exp2_of(score * unit - lse);
            Vec ds = p * (load(d) - delta);
            if constexpr (CAPPED) {
                Vec t = larger(score * per_cap, all(-1.0f));  // tanh; a hidden score is -infinity
                ds *= 1.0f - t * t;
            }
            store(at, p);
            store(d, ds);
        }
    }
}

template <class P>
class Backward {
  public:
    Backward(const Call& c, const Maps& maps, int64_t slots, bool whole)
        : c_(c),
          maps_(maps),
          group_(c.H / c.K),
          wide_(up(c.E, P::PAD)),
          wide_v_(up(c.Ev, P::PAD)),
          products_(c, slots, true),
          scores_(c) {
        Arena& memory = arena();
        int64_t tile = TILE * TILE, q = TILE * wide_, v = TILE * wide_v_;
        int64_t kept = whole ? c.query_tiles() : 1, sums = whole && group_ > 1 ? c.key_tiles_count() : slots;
        int64_t bias = c.d_bias ? c.bias_size + TILE : 0;
        memory.reserve((1 + kept) * q + 3 * tile + sums * (q + v) + bias + products_.floats() + Scores::floats(c) +
                       1024);
        room_ = memory.take(q), dq_ = memory.take(kept * q);
        s_ = memory.take(tile), dp_ = memory.take(tile), f_ = c.dropout > 0 ? memory.take(tile) : nullptr;
        dk_ = memory.take(sums * q), dv_ = memory.take(sums * v);
        d_bias_ = c.d_bias ? memory.take(bias) : nullptr;
        products_.take(memory);
        scores_.take(memory);
    }

    // All gradients of one batch row and key head.
    void whole(int64_t b, int64_t head) {
        int64_t tiles = block_tiles(c_), n_keys = c_.key_tiles_count();
        for (int64_t h = head * group_; h < (head + 1) * group_; ++h) {
            const Map& map = select(b, h);
            for (int64_t first = 0; first < n_keys; first += tiles) {
                int64_t last = std::min(first + tiles, n_keys), base = group_ > 1 ? 0 : first;
                if (h == head * group_) clear(first - base, last - base);
                for (int64_t i = 0; i < c_.query_tiles(); ++i) {
                    auto [from, to] = kept_in(map, i, first, last);
                    if (from == to) continue;
                    load_queries(b, h, i);
                    for (int32_t t = from; t < to; ++t)
                        pair<true, true>(i, map.kept[t], base, dq_ + i * TILE * wide_, t == map.start[i]);
                }
                if (h == (head + 1) * group_ - 1) write_keys(b, head, first, last, base);
            }
            for (int64_t i = 0; i < c_.query_tiles(); ++i)
                write_queries(b, h, i, dq_ + i * TILE * wide_, map.start[i] == map.start[i + 1]);
            if (d_bias_) std::copy_n(d_bias_, c_.bias_size, c_.d_bias + (b * c_.H + h) * c_.bias_size);
        }
    }

    // dK and dV of the key tiles first..last.
    void key_block(int64_t b, int64_t head, int64_t first, int64_t last) {
        clear(0, last - first);
        for (int64_t h = head * group_; h < (head + 1) * group_; ++h) {
            const Map& map = select(b, h);
            for (int64_t i = 0; i < c_.query_tiles(); ++i) {
                auto [from, to] = kept_in(map, i, first, last);
                if (from == to) continue;
                load_queries(b, h, i);
                for (int32_t t = from; t < to; ++t) pair<true, false>(i, map.kept[t], first, nullptr, false);
            }
        }
        write_keys(b, head, first, last, first);
    }

    // dQ of one query tile.
    void query_tile(int64_t b, int64_t h, int64_t i) {
        const Map& map = select(b, h);
        load_queries(b, h, i);
        for (int32_t t = map.start[i]; t < map.start[i + 1]; ++t)
            pair<false, true>(i, map.kept[t], 0, dq_, t == map.start[i]);
        write_queries(b, h, i, dq_, map.start[i] == map.start[i + 1]);
    }

  private:
    using Element = typename P::Element;

    const Map& select(int64_t b, int64_t h) {
        int64_t index = maps_.index(b, h);
        products_.select(b, h / group_, index, maps_[index]);
        scores_.select(b, h);
        if (d_bias_) std::fill_n(d_bias_, c_.bias_size + TILE, 0.0f);
        return maps_[index];
    }

    // Which of the kept tiles of query tile i have a key tile in first..last.
    static std::pair<int32_t, int32_t> kept_in(const Map& map, int64_t i, int64_t first, int64_t last) {
        auto start = map.kept.begin() + map.start[i], end = map.kept.begin() + map.start[i + 1];
        auto before = [](const Kept& kept, int64_t key) { return kept.key < key; };
        auto from = std::lower_bound(start, end, first, before), to = std::lower_bound(from, end, last, before);
        return {int32_t(from - map.kept.begin()), int32_t(to - map.kept.begin())};
    }

    void load_queries(int64_t b, int64_t h, int64_t i) {
        int64_t queries = c_.queries_in(i), at = (b * c_.H + h) * c_.T + i * TILE;
        uint64_t seeing = 0;
        std::fill_n(L_, TILE, INF);  // no weight
        std::fill_n(D_, TILE, 0.0f);
        for (int64_t q = 0; q < queries; ++q) {
            L_[q] = c_.lse[at + q];
            if (L_[q] == INF) continue;  // sees nothing: what q and dO hold must not reach dK and dV
            D_[q] = c_.delta[at + q];
            seeing |= 1ull << q;
        }
        products_.load_queries(b, h, i, seeing);
        products_.load_gradients(b, h, i, seeing);
    }

    // One tile of scores: what it adds to dK, dV (tile `kept.key - base` of the sums) and to dQ.
    template <bool KEYS, bool QUERIES>
    void pair(int64_t i, Kept kept, int64_t base, float* dq, bool first) {
        int64_t j = kept.key, keys = c_.keys_in(j), queries = c_.queries_in(i), N = up(queries, P::PAD) / W;
        int64_t slot = products_.hold(j);
        uint64_t room[TILE];
        products_.scores(slot, keys, N, s_);
        scores_.finish(s_, i, j, N, maps_.words(i, kept, room));
        products_.weight_gradients(slot, keys, N, dp_);
        if (f_) {
            scores_.keep_factors(f_, i, j, N);
            multiply(dp_, f_, keys, N);
        }
        if (c_.softcap > 0)
            differentiate<true>(s_, dp_, keys, N, products_.unit(), L_, D_, float(1 / (c_.softcap * LOG2E)));
        else
            differentiate<false>(s_, dp_, keys, N, products_.unit(), L_, D_, 0);
        if (f_) multiply(s_, f_, keys, N);
        if constexpr (KEYS) {
            products_.add_values(keys, queries, s_, dv_ + (j - base) * TILE * wide_v_);
            products_.add_keys(keys, queries, dp_, dk_ + (j - base) * TILE * wide_);
            if (d_bias_) scores_.add_bias_gradient(dp_, i, j, N, d_bias_);
        }
        if constexpr (QUERIES) products_.add_queries(slot, keys, N, dp_, first, dq);
    }

    void clear(int64_t first, int64_t last) {
        std::fill(dk_ + first * TILE * wide_, dk_ + last * TILE * wide_, 0.0f);
        std::fill(dv_ + first * TILE * wide_v_, dv_ + last * TILE * wide_v_, 0.0f);
    }

    void write_keys(int64_t b, int64_t head, int64_t first, int64_t last, int64_t base) {
        for (int64_t j = first; j < last; ++j) {
            float *dk = dk_ + (j - base) * TILE * wide_, *dv = dv_ + (j - base) * TILE * wide_v_;
            write_rows(dk, wide_, float(c_.scale), c_.keys_in(j), c_.E, c_.dk.template at<Element>(b, j * TILE, head), c_.dk.token);
            write_rows(dv, wide_v_, 1.0f, c_.keys_in(j), c_.Ev, c_.dv.template at<Element>(b, j * TILE, head), c_.dv.token);
        }
    }

    void write_queries(int64_t b, int64_t h, int64_t i, const float* dq, bool nothing) {
        int64_t queries = c_.queries_in(i);
        if (nothing)
            memset(room_, 0, TILE * wide_ * sizeof(float));
        else
            transpose(dq, TILE, wide_, up(queries, P::PAD), room_, wide_, 1.0f);
        write_rows(room_, wide_, float(c_.scale), queries, c_.E, c_.dq.template at<Element>(b, i * TILE, h), c_.dq.token);
    }

    const Call& c_;
    const Maps& maps_;
    int64_t group_, wide_, wide_v_;
    P products_;
    Scores scores_;
    float *room_, *dq_, *s_, *dp_, *f_, *dk_, *dv_, *d_bias_;
    float L_[TILE], D_[TILE];
};

// D = sum over e of dO O, and the gradient of the sink: it takes weight and gives nothing.
template <class T>
void prepare(const Call& c) {
    int64_t wide = up(c.Ev, W);
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t p = 0; p < c.B * c.H; ++p) {
        int64_t b = p / c.H, h = p % c.H;
        arena().reserve(2 * wide);
        float *o = arena().take(wide), *d_o = arena().take(wide);
        double d_sink = 0;
        for (int64_t t = 0; t < c.T; ++t) {
            float lse = c.lse[p * c.T + t], delta = 0;
            if (lse != INF) {
                read_rows(c.o.at<T>(b, t, h), 0, 1, c.Ev, o, wide);
                read_rows(c.d_o.at<T>(b, t, h), 0, 1, c.Ev, d_o, wide);
                Vec sum{};
                for (int64_t e = 0; e < wide; e += W) sum += load(o + e) * load(d_o + e);
                for (int lane = 0; lane < W; ++lane) delta += sum[lane];
                if (c.sink) d_sink -= std::exp2(c.sink[h] * LOG2E - lse) * delta;
            }
            c.delta[p * c.T + t] = delta;
        }
        if (c.d_sink) c.d_sink[p] = float(d_sink);
    }
}

template <class P>
void backward(const Call& c) {
    Maps maps(c);
    prepare<typename P::Element>(c);
    int64_t units = c.B * c.K, rounds = (units + c.threads - 1) / c.threads;
    // Two passes cost 7/5 of one, but leave no thread idle. The gradient of the bias is one sum, hence one thread's.
    if (c.d_bias || 5 * rounds * c.threads <= 7 * units) {
#pragma omp parallel num_threads(c.threads)
        {
            Backward<P> mine(c, maps, block_tiles(c), true);
#pragma omp for schedule(dynamic, 1)
            for (int64_t u = 0; u < units; ++u) mine.whole(u / c.K, u % c.K);
        }
        return;
    }
    int64_t slots = maps.span(), tiles = 2, blocks = (c.key_tiles_count() + tiles - 1) / tiles;
#pragma omp parallel num_threads(c.threads)
    {
        {
            Backward<P> mine(c, maps, tiles, false);
#pragma omp for schedule(dynamic, 1)
            for (int64_t p = 0; p < units * blocks; ++p) {
                int64_t u = p / blocks, first = p % blocks * tiles;
                mine.key_block(u / c.K, u % c.K, first, std::min(first + tiles, c.key_tiles_count()));
            }
        }
        Backward<P> mine(c, maps, slots, false);
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < c.B * c.H * c.query_tiles(); ++p)
            mine.query_tile(p / c.query_tiles() / c.H, p / c.query_tiles() % c.H, p % c.query_tiles());
    }
}

}  // namespace

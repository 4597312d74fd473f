// What happens to a tile of scores between the products: bias, cap, mask, dropout.
#pragma once

#include "layout.h"

namespace {

// The lanes 1, 2, 4, ... that a mask's bits are compared with.
alignas(64) constexpr int32_t LANE_BITS[16] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                               1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

// The scores of one (batch row, head): everything about them but the product of q and k.
class Scores {
  public:
    explicit Scores(const Call& c) : c_(c) {}
    static int64_t floats(const Call& c) { return c.bias ? c.bias_size + TILE : 0; }

    void take(Arena& memory) {
        if (c_.bias) bias_ = memory.take(floats(c_));
    }

    void select(int64_t b, int64_t h) {
        b_ = b, h_ = h;
        if (c_.bias) {
            const float* from = c_.bias + h * c_.bias_size;
            for (int64_t u = 0; u < c_.bias_size; ++u) bias_[u] = from[u] * c_.bias_factor();
            std::fill_n(bias_ + c_.bias_size, TILE, 0.0f);  // lanes past the last query read here
        }
        head_state_ = mix(uint32_t(c_.seed) ^ mix(uint32_t(b) + 0x9E3779B1u));
        head_state_ = mix(head_state_ ^ mix(uint32_t(h) + 2 * 0x9E3779B1u));
    }

    // From products (keys, N vectors of queries) to scores in the units of the exponent, -infinity where nothing is
    // seen.
    void finish(float* s, int64_t i, int64_t j, int64_t N, const uint64_t* words) const {
        int64_t keys = c_.keys_in(j);
        if (c_.bias) add_bias(s, i, j, N);
        if (c_.softcap > 0) {
            float cap = float(c_.softcap) * LOG2E;
            for (int64_t r = 0; r < keys; ++r)
                for (int64_t n = 0; n < N; ++n) store(s + r * TILE + n * W, cap * tanh_of(load(s + r * TILE + n * W)));
        }
        if (words) hide(s, keys, N, words);
    }

    // 1 / (1 - dropout) where a weight is kept, else 0.
    void keep_factors(float* f, int64_t i, int64_t j, int64_t N) const {
        uint32_t query[TILE];
        for (int64_t l = 0; l < N * W; ++l) query[l] = mix(head_state_ ^ mix(uint32_t(i * TILE + l) + 3 * 0x9E3779B1u));
        Vec kept = all(float(1 / (1 - c_.dropout)));
        Words threshold = Words{} + uint32_t(c_.threshold);
        for (int64_t r = 0; r < c_.keys_in(j); ++r) {
            uint32_t key = mix(uint32_t(j * TILE + r) + 4 * 0x9E3779B1u);
            for (int64_t n = 0; n < N; ++n) {
                Words state;
                memcpy(&state, query + n * W, sizeof state);
                store(f + r * TILE + n * W, mix(state ^ key) >= threshold ? kept : Vec{});
            }
        }
    }

    // Add the gradients of a tile's scores to those of the bias, by distance. `to` has TILE more than the bias.
    void add_bias_gradient(const float* ds, int64_t i, int64_t j, int64_t N, float* to) const {
        for (int64_t r = 0; r < c_.keys_in(j); ++r, ds += TILE) {
            if (c_.query_positions == nullptr) {
                float* at = to + distance(i, j, r);
                for (int64_t n = 0; n < N; ++n) store(at + n * W, load(at + n * W) + load(ds + n * W));
            } else {
                for (int64_t l = 0; l < c_.queries_in(i); ++l) to[looked_up(i, j, r, l)] += ds[l];
            }
        }
    }

  private:
    int64_t distance(int64_t i, int64_t j, int64_t r) const {
        return i * TILE + c_.S - c_.T - (j * TILE + r) - c_.bias_first;
    }

    // Where the positions are given; those of padding can be anything.
    int64_t looked_up(int64_t i, int64_t j, int64_t r, int64_t l) const {
        int64_t query = c_.query_positions[(c_.query_rows == 1 ? 0 : b_) * c_.T + i * TILE + l];
        int64_t key = c_.key_positions[(c_.key_rows == 1 ? 0 : b_) * c_.S + j * TILE + r];
        return std::clamp<int64_t>(query - key - c_.bias_first, 0, c_.bias_size - 1);
    }

    void add_bias(float* s, int64_t i, int64_t j, int64_t N) const {
        for (int64_t r = 0; r < c_.keys_in(j); ++r, s += TILE) {
            if (c_.query_positions == nullptr) {
                const float* at = bias_ + distance(i, j, r);
                for (int64_t n = 0; n < N; ++n) store(s + n * W, load(s + n * W) + load(at + n * W));
            } else {
                for (int64_t l = 0; l < c_.queries_in(i); ++l) s[l] += bias_[looked_up(i, j, r, l)];
            }
        }
    }

    static void hide(float* s, int64_t keys, int64_t N, const uint64_t* words) {
        Ints lanes;
        memcpy(&lanes, LANE_BITS, sizeof lanes);
        Vec hidden = all(-INF);
        for (int64_t r = 0; r < keys; ++r, s += TILE) {
            if (words[r] == ~0ull) continue;
            for (int64_t n = 0; n < N; ++n) {
                Ints bits = Ints{} + int32_t(words[r] >> (n * W) & ((1 << W) - 1));
                store(s + n * W, (bits & lanes) != 0 ? load(s + n * W) : hidden);
            }
        }
    }

    const Call& c_;
    int64_t b_ = 0, h_ = 0;
    float* bias_ = nullptr;
    uint32_t head_state_ = 0;
};

inline void multiply(float* s, const float* f, int64_t rows, int64_t N) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < N; ++n) {
            float* at = s + r * TILE + n * W;
            store(at, load(at) * load(f + r * TILE + n * W));
        }
}

}  // namespace

// The products of a pair of tiles in f32, on vectors: either type is widened once, when its tile is packed.
#pragma once

#include "scores.h"

namespace {

// The keys and values of one (batch row, key head) as contiguous float tiles, packed when first asked for. A ring of
// `slots` tiles: as many as one query tile can reach.
template <class T>
class Keys {
  public:
    Keys(const Call& c, int64_t slots) : c_(c), slots_(slots), held_(slots, -1) {}
    static int64_t floats(const Call& c, int64_t slots) { return slots * (up(TILE * c.E, 16) + up(TILE * c.Ev, 16)); }

    void take(Arena& memory) {
        k_ = memory.take(slots_ * up(TILE * c_.E, 16));
        v_ = memory.take(slots_ * up(TILE * c_.Ev, 16));
    }

    // Keys that no query of the map sees are read as 0.
    void select(int64_t b, int64_t head, int64_t index, const Map& map) {
        if (b == b_ && head == head_ && index == index_) return;
        b_ = b, head_ = head, index_ = index, map_ = &map;
        std::fill(held_.begin(), held_.end(), -1);
    }

    // The slot that holds key tile j.
    int64_t hold(int64_t j) {
        int64_t slot = j % slots_;
        if (held_[slot] != j) {
            held_[slot] = j;
            int64_t first = j * TILE, rows = c_.keys_in(j);
            read_rows(c_.k.at<T>(b_, first, head_), c_.k.token, rows, c_.E, k(slot), c_.E, map_->seen[j]);
            read_rows(c_.v.at<T>(b_, first, head_), c_.v.token, rows, c_.Ev, v(slot), c_.Ev, map_->seen[j]);
        }
        return slot;
    }
    float* k(int64_t slot) { return k_ + slot * up(TILE * c_.E, 16); }
    float* v(int64_t slot) { return v_ + slot * up(TILE * c_.Ev, 16); }

  private:
    const Call& c_;
    int64_t slots_, b_ = -1, head_ = -1, index_ = -1;
    const Map* map_ = nullptr;
    std::vector<int64_t> held_;
    float *k_ = nullptr, *v_ = nullptr;
};

// The operands that tiles share, and the seven products. What is an operand of both passes is made by both.
template <class T>
class Widened {
  public:
    using Element = T;
    static constexpr int64_t PAD = W;  // what rows and lanes are padded to

    Widened(const Call& c, int64_t slots, bool backward)
        : c_(c), backward_(backward), slots_(slots), wide_(up(c.E, PAD)), wide_v_(up(c.Ev, PAD)), keys_(c, slots) {}

    int64_t floats() const {
        return 2 * TILE * (wide_ + (backward_ ? wide_v_ : 0)) + Keys<T>::floats(c_, slots_);
    }
    void take(Arena& memory) {
        q_rows_ = memory.take(TILE * wide_), q_ = memory.take(TILE * wide_);
        if (backward_) do_rows_ = memory.take(TILE * wide_v_), do_ = memory.take(TILE * wide_v_);
        keys_.take(memory);
    }

    void select(int64_t b, int64_t head, int64_t index, const Map& map) { keys_.select(b, head, index, map); }
    int64_t hold(int64_t j) { return keys_.hold(j); }

    // What the scores are still to be multiplied by.
    float unit() const { return 1; }

    // Queries that are not `wanted` are read as 0.
    void load_queries(int64_t b, int64_t h, int64_t i, uint64_t wanted) {
        load_tile(c_.q, b, h, i, c_.E, wide_, wanted, c_.score_factor(), q_rows_, q_);
    }
    void load_gradients(int64_t b, int64_t h, int64_t i, uint64_t wanted) {
        load_tile(c_.d_o, b, h, i, c_.Ev, wide_v_, wanted, 1.0f, do_rows_, do_);
    }

    // S = K Q^T and dP = V dO^T, keys in rows.
    void scores(int64_t slot, int64_t keys, int64_t N, float* s) {
        product<ZERO>(keys, N, c_.E, keys_.k(slot), c_.E, 1, q_, TILE, s, TILE);
    }
    void weight_gradients(int64_t slot, int64_t keys, int64_t N, float* dp) {
        product<ZERO>(keys, N, c_.Ev, keys_.v(slot), c_.Ev, 1, do_, TILE, dp, TILE);
    }
    // O = O * factor + V^T P, widths in rows.
    void add_output(int64_t slot, int64_t keys, int64_t N, const float* p, const float* factor, float* o) {
        product<SCALE>(c_.Ev, N, keys, keys_.v(slot), 1, c_.Ev, p, TILE, o, TILE, factor);
    }
    // dV += P^T dO and dK += dS^T Q, keys in rows.
    void add_values(int64_t keys, int64_t queries, const float* p, float* dv) {
        product<ADD>(keys, wide_v_ / W, queries, p, TILE, 1, do_rows_, wide_v_, dv, wide_v_);
    }
    void add_keys(int64_t keys, int64_t queries, const float* ds, float* dk) {
        product<ADD>(keys, wide_ / W, queries, ds, TILE, 1, q_rows_, wide_, dk, wide_);
    }
    // dQ = K^T dS, or added to it, widths in rows.
    void add_queries(int64_t slot, int64_t keys, int64_t N, const float* ds, bool first, float* dq) {
        if (first)
            product<ZERO>(c_.E, N, keys, keys_.k(slot), 1, c_.E, ds, TILE, dq, TILE);
        else
            product<ADD>(c_.E, N, keys, keys_.k(slot), 1, c_.E, ds, TILE, dq, TILE);
    }

  private:
    void load_tile(const View& x, int64_t b, int64_t h, int64_t i, int64_t width, int64_t wide, uint64_t wanted,
                   float factor, float* rows, float* columns) {
        int64_t queries = c_.queries_in(i), padded = up(queries, PAD);
        read_rows(x.at<T>(b, i * TILE, h), x.token, queries, width, rows, wide, wanted);
        memset(rows + queries * wide, 0, (padded - queries) * wide * sizeof(float));
        transpose(rows, wide, padded, wide, columns, TILE, factor);
    }

    const Call& c_;
    bool backward_;
    int64_t slots_, wide_, wide_v_;
    Keys<T> keys_;
    float *q_rows_ = nullptr, *q_ = nullptr, *do_rows_ = nullptr, *do_ = nullptr;
};

}  // namespace

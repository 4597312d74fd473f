// The products of a pair of tiles in bf16 on AMX. Queries, keys, values and gradients are multiplied as they are;
// weights and gradients of scores are rounded to bf16 first, as FlashAttention does (arXiv:2205.14135); all sums are
// in f32.
//
// Each operand is packed once in the forms in which it is read: rows as they lie in memory (the left factor), or pairs
// of rows (the right one, see amx.h). As in f32, keys are the rows of scores and queries their columns, so that weights
// become pairs without a shuffle.
#pragma once

#include "amx.h"
#include "scores.h"

namespace {

typedef uint32_t LooseWords __attribute__((vector_size(4 * W), aligned(4), may_alias));
inline Words load(const uint32_t* p) { return *reinterpret_cast<const LooseWords*>(p); }
inline void store(uint32_t* p, Words x) { *reinterpret_cast<LooseWords*>(p) = x; }
inline Words load_bits(const bf16* p) {
    return __builtin_convertvector(Halves(*reinterpret_cast<const LooseHalves*>(p)), Words);
}
inline void store_bits(bf16* p, Words x) {
    *reinterpret_cast<LooseHalves*>(p) = __builtin_convertvector(x & 0xffffu, Halves);
}

// 64 rows of `padded` elements; what is past `width` or `rows`, or not wanted, becomes 0: it can hold anything.
inline void pack_rows(const bf16* from, int64_t stride, int64_t rows, int64_t width, uint64_t wanted, bf16* to,
                      int64_t padded) {
    for (int64_t r = 0; r < TILE; ++r, from += stride, to += padded) {
        int64_t kept = r < rows && (wanted >> r & 1) ? width : 0;
        if (kept) memcpy(to, from, kept * sizeof(bf16));
        memset(to + kept, 0, (padded - kept) * sizeof(bf16));
    }
}

// The transpose of 64 rows, in pairs: word r of row k has elements 2k and 2k + 1 of row r.
inline void pair_columns(const bf16* rows, int64_t padded, uint32_t* to) {
    const float* words = reinterpret_cast<const float*>(rows);
    for (int64_t r = 0; r < TILE; r += W)
        for (int64_t k = 0; k < padded / 2; k += W)
            transpose_square<true>(words + r * (padded / 2) + k, padded / 2, reinterpret_cast<float*>(to) + k * TILE + r,
                                   TILE, 0);
}

// From those pairs the transpose itself: `width` rows of 64 elements.
inline void split_pairs(const uint32_t* pairs, int64_t width, bf16* to) {
    for (int64_t k = 0; k < width / 2; ++k, pairs += TILE, to += 2 * TILE)
        for (int64_t n = 0; n < TILE; n += W) {
            store_bits(to + n, load(pairs + n));
            store_bits(to + TILE + n, load(pairs + n) >> 16);
        }
}

// 64 rows in pairs: word e of row k has element e of rows 2k and 2k + 1.
inline void pair_rows(const bf16* rows, int64_t padded, int64_t width, uint32_t* to) {
    for (int64_t k = 0; k < TILE / 2; ++k, rows += 2 * padded, to += width)
        for (int64_t e = 0; e < width; e += W) store(to + e, load_bits(rows + e) | load_bits(rows + padded + e) << 16);
}

// Rounded to bf16: two vectors lane by lane in pairs, and one in its order. The processor has an instruction for it, but
// not the one that emulates the others.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(PHYLON_AMX_EMULATED)
inline Words round_pair(Vec even, Vec odd) {
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
}
inline void round_to(bf16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
inline Words round_pair(Vec even, Vec odd) { return rounded(even) | rounded(odd) << 16; }
inline void round_to(bf16* p, Vec x) { store(p, x); }
#endif

// Rows of 64 floats, rounded and in pairs, 0 where there are no more of them: `padded` is even.
inline void round_pairs(const float* s, int64_t rows, int64_t padded, int64_t N, uint32_t* to) {
    for (int64_t r = 0; r < padded; r += 2, s += 2 * TILE, to += TILE)
        for (int64_t n = 0; n < N; ++n)
            store(to + n * W, round_pair(r < rows ? load(s + n * W) : Vec{}, r + 1 < rows ? load(s + TILE + n * W) : Vec{}));
}

// Rows of 64 floats, rounded, 0 past `width` floats.
inline void round_rows(const float* s, int64_t rows, int64_t width, bf16* to) {
    for (int64_t r = 0; r < rows; ++r, s += TILE, to += TILE) {
        int64_t n = 0;
        for (; n + W <= width; n += W) round_to(to + n, load(s + n));
        for (; n < width; ++n) narrow(s[n], to + n);
        for (; n < TILE; ++n) to[n].bits = 0;
    }
}

class Paired {
  public:
    using Element = bf16;
    static constexpr int64_t PAD = 16;  // what the rows and columns of results are padded to

    Paired(const Call& c, int64_t slots, bool backward)
        : c_(c),
          backward_(backward),
          slots_(slots),
          wide_(up(c.E, PAD)),
          wide_v_(up(c.Ev, PAD)),
          deep_(up(c.E, 32)),
          deep_v_(up(c.Ev, 32)),
          held_(slots, -1) {
        // Bias and cap want scores in their own units; otherwise the factor waits for the exponent.
        float factor = c.score_factor();
        unit_ = c.bias || c.softcap > 0 || !(factor > 0) ? 1 : factor;
        scaling_ = unit_ == 1 && factor != 1;
    }

    // In floats, of which one holds two elements or one pair.
    int64_t floats() const {
        int64_t deepest = std::max(deep_, deep_v_), own = TILE / 2 * (2 * deepest + deep_ + 2 * TILE);
        int64_t key = TILE / 2 * (deep_ + wide_v_);
        if (backward_) {
            own += TILE / 2 * (deep_v_ + wide_ + wide_v_);
            key = TILE / 2 * (deep_ + wide_ + deep_v_);
        }
        return own + slots_ * key;
    }

    void take(Arena& memory) {
        int64_t deepest = std::max(deep_, deep_v_);
        rows_ = elements(memory, TILE * deepest), pairs_ = words(memory, TILE / 2 * deepest);
        q_ = words(memory, TILE / 2 * deep_);
        rounded_ = elements(memory, TILE * TILE), rounded_pairs_ = words(memory, TILE / 2 * TILE);
        k_ = elements(memory, slots_ * TILE * deep_);
        if (backward_) {
            do_ = words(memory, TILE / 2 * deep_v_);
            q_pairs_ = words(memory, TILE / 2 * wide_), do_pairs_ = words(memory, TILE / 2 * wide_v_);
            k_columns_ = elements(memory, slots_ * TILE * wide_), v_ = elements(memory, slots_ * TILE * deep_v_);
        } else {
            v_columns_ = elements(memory, slots_ * TILE * wide_v_);
        }
    }

    // Keys that no query of the map sees are read as 0.
    void select(int64_t b, int64_t head, int64_t index, const Map& map) {
        if (b == b_ && head == head_ && index == index_) return;
        b_ = b, head_ = head, index_ = index, map_ = &map;
        std::fill(held_.begin(), held_.end(), -1);
    }

    // The slot that holds key tile j: packed when first asked for.
    int64_t hold(int64_t j) {
        int64_t slot = j % slots_, first = j * TILE, keys = c_.keys_in(j);
        if (held_[slot] == j) return slot;
        held_[slot] = j;
        bf16* k = k_ + slot * TILE * deep_;
        pack_rows(c_.k.at<bf16>(b_, first, head_), c_.k.token, keys, c_.E, map_->seen[j], k, deep_);
        bf16* v = backward_ ? v_ + slot * TILE * deep_v_ : rows_;
        pack_rows(c_.v.at<bf16>(b_, first, head_), c_.v.token, keys, c_.Ev, map_->seen[j], v, deep_v_);
        pair_columns(backward_ ? k : v, backward_ ? deep_ : deep_v_, pairs_);
        if (backward_)
            split_pairs(pairs_, wide_, k_columns_ + slot * TILE * wide_);
        else
            split_pairs(pairs_, wide_v_, v_columns_ + slot * TILE * wide_v_);
        return slot;
    }

    float unit() const { return unit_; }

    void load_queries(int64_t b, int64_t h, int64_t i, uint64_t wanted) {
        pack_rows(c_.q.at<bf16>(b, i * TILE, h), c_.q.token, c_.queries_in(i), c_.E, wanted, rows_, deep_);
        pair_columns(rows_, deep_, q_);
        if (backward_) pair_rows(rows_, deep_, wide_, q_pairs_);
    }
    void load_gradients(int64_t b, int64_t h, int64_t i, uint64_t wanted) {
        pack_rows(c_.d_o.at<bf16>(b, i * TILE, h), c_.d_o.token, c_.queries_in(i), c_.Ev, wanted, rows_, deep_v_);
        pair_columns(rows_, deep_v_, do_);
        pair_rows(rows_, deep_v_, wide_v_, do_pairs_);
    }

    // S = K Q^T and dP = V dO^T, keys in rows.
    void scores(int64_t slot, int64_t keys, int64_t N, float* s) {
        tile_product<false>(up(keys, 16), N * W, deep_, k_ + slot * TILE * deep_, deep_, q_, TILE, s, TILE);
        if (!scaling_) return;
        for (int64_t r = 0; r < keys; ++r)
            for (int64_t n = 0; n < N; ++n) store(s + r * TILE + n * W, load(s + r * TILE + n * W) * c_.score_factor());
    }
    void weight_gradients(int64_t slot, int64_t keys, int64_t N, float* dp) {
        tile_product<false>(up(keys, 16), N * W, deep_v_, v_ + slot * TILE * deep_v_, deep_v_, do_, TILE, dp, TILE);
    }

    // O = O * factor + V^T P, widths in rows.
    void add_output(int64_t slot, int64_t keys, int64_t N, const float* p, const float* factor, float* o) {
        rescale(o, N, factor);
        round_pairs(p, keys, up(keys, 32), N, rounded_pairs_);
        tile_product<true>(wide_v_, N * W, up(keys, 32), v_columns_ + slot * TILE * wide_v_, TILE, rounded_pairs_, TILE,
                           o, TILE);
    }
    // dV += P^T dO and dK += dS^T Q, keys in rows.
    void add_values(int64_t keys, int64_t queries, const float* p, float* dv) {
        add_to_keys(keys, queries, p, do_pairs_, wide_v_, dv);
    }
    void add_keys(int64_t keys, int64_t queries, const float* ds, float* dk) {
        add_to_keys(keys, queries, ds, q_pairs_, wide_, dk);
    }
    // dQ = K^T dS, or added to it, widths in rows.
    void add_queries(int64_t slot, int64_t keys, int64_t N, const float* ds, bool first, float* dq) {
        const bf16* k = k_columns_ + slot * TILE * wide_;
        round_pairs(ds, keys, up(keys, 32), N, rounded_pairs_);
        if (first)
            tile_product<false>(wide_, N * W, up(keys, 32), k, TILE, rounded_pairs_, TILE, dq, TILE);
        else
            tile_product<true>(wide_, N * W, up(keys, 32), k, TILE, rounded_pairs_, TILE, dq, TILE);
    }

  private:
    static bf16* elements(Arena& memory, int64_t n) { return reinterpret_cast<bf16*>(memory.take(n / 2)); }
    static uint32_t* words(Arena& memory, int64_t n) { return reinterpret_cast<uint32_t*>(memory.take(n)); }

    void add_to_keys(int64_t keys, int64_t queries, const float* s, const uint32_t* pairs, int64_t wide, float* to) {
        int64_t rows = up(keys, 16);
        round_rows(s, keys, queries, rounded_);
        memset(rounded_ + keys * TILE, 0, (rows - keys) * TILE * sizeof(bf16));
        tile_product<true>(rows, wide, up(queries, 32), rounded_, TILE, pairs, wide, to, wide);
    }

    // Late tiles seldom move the maximum.
    void rescale(float* o, int64_t N, const float* factor) const {
        for (int64_t n = 0; n < N; ++n) {
            bool same = true;
            for (int lane = 0; lane < W; ++lane) same &= factor[n * W + lane] == 1;
            if (same) continue;
            Vec by = load(factor + n * W);
            for (int64_t e = 0; e < c_.Ev; ++e) store(o + e * TILE + n * W, load(o + e * TILE + n * W) * by);
        }
    }

    const Call& c_;
    Tiles tiles_;
    bool backward_, scaling_;
    int64_t slots_, wide_, wide_v_, deep_, deep_v_, b_ = -1, head_ = -1, index_ = -1;
    float unit_;
    const Map* map_ = nullptr;
    std::vector<int64_t> held_;
    bf16 *rows_, *rounded_, *k_, *k_columns_ = nullptr, *v_ = nullptr, *v_columns_ = nullptr;
    uint32_t *pairs_, *q_, *rounded_pairs_, *do_ = nullptr, *q_pairs_ = nullptr, *do_pairs_ = nullptr;
};

}  // namespace

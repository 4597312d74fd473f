// What a call hands over, and which tiles of its scores are computed.
//
// A tile of scores is kept transposed, keys in rows and the queries of the tile in the lanes of vectors: the softmax
// then runs down the rows without a single shuffle, and each of the seven products reads its operands as they lie in
// memory.
#pragma once

#include <algorithm>
#include <vector>

#include "../native/tile.h"

namespace {

constexpr int64_t TILE = 64;  // queries and keys of a tile

// A (batch, token, head, width) view whose last stride is 1; strides in elements.
struct View {
    void* data;
    int64_t batch, token, head;

    template <class T>
    T* at(int64_t b, int64_t t, int64_t h) const {
        return static_cast<T*>(data) + b * batch + t * token + h * head;
    }
};

// Packed by phylon.ops.attention.native, field by field, 8 bytes each.
struct Call {
    int64_t B, T, S, H, K, E, Ev;  // batch, queries, keys, query heads, key heads, widths of q/k and of v
    int64_t threads;
    View q, k, v, o;
    float* lse;        // (B, H, T) log2 of the sum of exponentials, +infinity where a query sees nothing
    View d_o, dq, dk, dv;
    float* delta;      // (B, H, T) sum over e of dO O
    const float* sink; // (H,) or null
    float* d_sink;     // (B, H) or null
    // The bias of head h for the distance u = query - key is bias[h][u - bias_first]; null without one.
    const float* bias;
    float* d_bias;     // (B, H, bias_size) or null
    int64_t bias_first, bias_size;
    const int64_t* query_positions;  // (query_rows, T), null: the positions are the indices, aligned bottom-right
    const int64_t* key_positions;    // (key_rows, S)
    int64_t query_rows, key_rows;    // 1 or B
    double scale, softcap, dropout;  // softcap 0: none
    int64_t seed, threshold;         // dropout keeps where the counter's 32 bits are at least the threshold
    // Which pairs are visible: least <= query + (S - T) - key <= most, or, where row_starts is not null, a TilePlan.
    int64_t least, most;
    int64_t plan_batch, plan_heads;
    const int32_t *row_starts, *key_tiles, *masks;
    const uint64_t* bits;  // (masks, 64) one word a query, one bit a key
    // Of few queries only, in elements, the stride of the keys is 1: a mask of bytes, and the bias of every pair, or
    // null.
    const uint8_t* dense_mask;
    int64_t mask_batch, mask_head, mask_query;
    const float* dense_bias;
    int64_t bias_batch, bias_head, bias_query;

    int64_t query_tiles() const { return (T + TILE - 1) / TILE; }
    int64_t key_tiles_count() const { return (S + TILE - 1) / TILE; }
    int64_t queries_in(int64_t i) const { return std::min(TILE, T - i * TILE); }
    int64_t keys_in(int64_t j) const { return std::min(TILE, S - j * TILE); }
    // What q k^T is multiplied by, in the units of the exponent (base 2), or of tanh's argument.
    float score_factor() const { return float(softcap > 0 ? scale / softcap : scale * 1.44269504088896340736); }
    float bias_factor() const { return float(softcap > 0 ? 1 / softcap : 1.44269504088896340736); }
};

enum : int32_t { FULL = -1, BAND = -2 };

struct Kept {
    int32_t key;   // the key tile
    int32_t mask;  // FULL, BAND, or a mask of the plan
};

// The kept tiles of one (batch row, head), by query tile.
struct Map {
    std::vector<int32_t> start;   // query tiles + 1
    std::vector<Kept> kept;
    std::vector<uint64_t> seen;   // by key tile, one bit a key: does any query see it?
    int64_t span = 1;             // the widest range of key tiles that one query tile keeps
};

// Swap rows and columns of 64 x 64 bits, by squares of 32, 16, ... 1.
inline void transpose_bits(const uint64_t* from, uint64_t* to) {
    std::copy_n(from, 64, to);
    uint64_t low = 0x00000000FFFFFFFFull;
    for (int size = 32; size != 0; size /= 2, low ^= low << size)
        for (int r = 0; r < 64; r = (r + size + 1) & ~size) {
            uint64_t moved = ((to[r] >> size) ^ to[r + size]) & low;
            to[r] ^= moved << size;
            to[r + size] ^= moved;
        }
}

// The maps of a call: one, or one for each batch row and head where a plan tells them apart.
class Maps {
  public:
    explicit Maps(const Call& c) : c_(c), maps_(c.row_starts ? c.plan_batch * c.plan_heads : 1) {
        if (c.row_starts) copy_masks();
        for (int64_t m = 0; m < int64_t(maps_.size()); ++m) {
            c.row_starts ? from_plan(m) : from_band(maps_[0]);
            mark_seen(maps_[m]);
        }
    }

    int64_t index(int64_t b, int64_t h) const {
        if (!c_.row_starts) return 0;
        return (c_.plan_batch == 1 ? 0 : b) * c_.plan_heads + (c_.plan_heads == 1 ? 0 : h);
    }
    const Map& operator[](int64_t index) const { return maps_[index]; }

    // The widest range of key tiles that any query tile of any map keeps.
    int64_t span() const {
        int64_t widest = 1;
        for (const Map& map : maps_) widest = std::max(widest, map.span);
        return widest;
    }

    // One word for each key of the tile, one bit for each query; null where every pair is visible.
    const uint64_t* words(int64_t i, Kept tile, uint64_t* room) const {
        if (tile.mask == FULL) return nullptr;
        if (tile.mask >= 0) return &bits_[tile.mask * TILE];
        for (int64_t r = 0; r < TILE; ++r) {
            int64_t key = tile.key * TILE + r - (c_.S - c_.T) - i * TILE;
            int64_t first = std::max<int64_t>(key + c_.least, 0), last = std::min<int64_t>(key + c_.most, TILE - 1);
            room[r] = first > last ? 0 : (~0ull << first) & (~0ull >> (TILE - 1 - last));
        }
        return room;
    }

  private:
    void copy_masks() {
        int64_t rows = c_.plan_batch * c_.plan_heads * c_.query_tiles(), count = 0;
        for (int64_t t = 0; t < c_.row_starts[rows]; ++t) count = std::max<int64_t>(count, c_.masks[t] + 1);
        bits_.resize(count * TILE);
        for (int64_t m = 0; m < count; ++m) transpose_bits(c_.bits + m * TILE, &bits_[m * TILE]);
    }

    void from_plan(int64_t m) {
        Map& map = maps_[m];
        const int32_t* rows = c_.row_starts + m * c_.query_tiles();
        map.start.assign(1, 0);
        for (int64_t i = 0; i < c_.query_tiles(); ++i) {
            for (int32_t t = rows[i]; t < rows[i + 1]; ++t) map.kept.push_back({c_.key_tiles[t], c_.masks[t]});
            close_row(map);
        }
    }

    void from_band(Map& map) {
        map.start.assign(1, 0);
        for (int64_t i = 0; i < c_.query_tiles(); ++i) {
            int64_t first = i * TILE + c_.S - c_.T, last = first + c_.queries_in(i) - 1;
            int64_t from = std::max<int64_t>(first - c_.most, 0), to = std::min<int64_t>(last - c_.least, c_.S - 1);
            for (int64_t j = from / TILE; from <= to && j <= to / TILE; ++j) {
                int64_t low = j * TILE, high = low + c_.keys_in(j) - 1;
                bool full = last - low <= c_.most && first - high >= c_.least;
                map.kept.push_back({int32_t(j), full ? FULL : BAND});
            }
            close_row(map);
        }
    }

    void close_row(Map& map) {
        int64_t from = map.start.back(), to = int64_t(map.kept.size());
        if (to > from) map.span = std::max<int64_t>(map.span, map.kept[to - 1].key - map.kept[from].key + 1);
        map.start.push_back(int32_t(to));
    }

    void mark_seen(Map& map) {
        map.seen.assign(c_.key_tiles_count(), 0);
        uint64_t room[TILE];
        for (int64_t i = 0; i < c_.query_tiles(); ++i) {
            uint64_t real = ~0ull >> (TILE - c_.queries_in(i));
            for (int32_t t = map.start[i]; t < map.start[i + 1]; ++t) {
                uint64_t& seen = map.seen[map.kept[t].key];
                if (seen == ~0ull) continue;
                const uint64_t* words = this->words(i, map.kept[t], room);
                for (int64_t r = 0; r < TILE; ++r)
                    if (words == nullptr || (words[r] & real)) seen |= 1ull << r;
            }
        }
    }

    const Call& c_;
    std::vector<Map> maps_;
    std::vector<uint64_t> bits_;
};

}  // namespace

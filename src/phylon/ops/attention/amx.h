// Products of bf16 tiles on AMX (Intel SDM volume 1, chapter 18): the few instructions that are used, real or emulated,
// and the loop over tiles.
//
// A register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 floats the product of 16 x 32 bf16, as they lie
// in memory, and 32 x 16 bf16, of which two rows lie in one: word n of row k holds B[2k][n] in its lower half and
// B[2k + 1][n] in its upper one. Everything is padded to whole registers, so that one configuration does for all.
#pragma once

#include "../native/tile.h"

#if !defined(PHYLON_AMX_EMULATED)
#include <immintrin.h>
#endif

namespace {

// What ldtilecfg reads.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(PHYLON_AMX_EMULATED)

// TDPBF16PS in plain C++, for the tests: even and odd elements of the pairs are added up apart, with fused
// multiply-adds, both sums are added, then the sum to C; denormals count as zero wherever they come up, whatever the
// mode of the processor.
struct EmulatedTiles {
    bool configured = false;
    uint32_t word[8][16][16];

    static float flush(uint32_t bits) {
        bits = bits & 0x7f800000u ? bits : bits & 0x80000000u;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    static uint32_t bits_of(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return bits;
    }
    static float flush(float x) { return flush(bits_of(x)); }

    void check() const {
        if (!configured) std::abort();  // the processor would raise an exception
    }
    void zero(int t) {
        check();
        memset(word[t], 0, sizeof word[t]);
    }
    void load(int t, const void* from, int64_t stride) {
        check();
        for (int r = 0; r < 16; ++r) memcpy(word[t][r], static_cast<const char*>(from) + r * stride, 64);
    }
    void store(int t, void* to, int64_t stride) const {
        check();
        for (int r = 0; r < 16; ++r) memcpy(static_cast<char*>(to) + r * stride, word[t][r], 64);
    }
    void multiply(int c, int a, int b) {
        check();
        for (int m = 0; m < 16; ++m) {
            float even[16] = {}, odd[16] = {};
            for (int k = 0; k < 16; ++k) {
                float left = flush(word[a][m][k] << 16), right = flush(word[a][m][k] & 0xffff0000u);
                for (int n = 0; n < 16; ++n) {
                    even[n] = flush(__builtin_fmaf(left, flush(word[b][k][n] << 16), even[n]));
                    odd[n] = flush(__builtin_fmaf(right, flush(word[b][k][n] & 0xffff0000u), odd[n]));
                }
            }
            for (int n = 0; n < 16; ++n)
                word[c][m][n] = bits_of(flush(flush(word[c][m][n]) + flush(even[n] + odd[n])));
        }
    }
};
inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles mine;
    return mine;
}

#define AMX_ZERO(t) emulated_tiles().zero(t)
#define AMX_LOAD(t, from, stride) emulated_tiles().load(t, from, stride)
#define AMX_STORE(t, to, stride) emulated_tiles().store(t, to, stride)
#define AMX_MULTIPLY(c, a, b) emulated_tiles().multiply(c, a, b)
// Registers keep their values over a change of configuration only by luck: fill them with NaN.
inline void configure(const TileConfig&) {
    emulated_tiles().configured = true;
    memset(emulated_tiles().word, 0xff, sizeof emulated_tiles().word);
}
inline void release() { emulated_tiles().configured = false; }
inline void settle() {}

#else

#define AMX_ZERO(t) _tile_zero(t)
#define AMX_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define AMX_STORE(t, to, stride) _tile_stored(t, to, stride)
#define AMX_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)
// gcc 12 declares neither what _tile_loadd reads nor more than 8 of the 64 bytes that _tile_loadconfig does: without a
// barrier the compiler may store the rest later.
inline void settle() { __asm__ volatile("" ::: "memory"); }
inline void configure(const TileConfig& config) {
    settle();
    _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }

#endif

// The registers of this thread, while it lives.
class Tiles {
  public:
    Tiles() {
        alignas(64) TileConfig config;
        configure(config);
    }
    ~Tiles() { release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// MR x NR registers of C, held over all of K: 0 to 3; A takes 4 and 5, B 6 and 7.
template <int MR, int NR, bool ADD_TO_C>
inline void tile_block(int64_t K, const bf16* a, int64_t am, const uint32_t* b, int64_t bk, float* c, int64_t cm) {
    constexpr bool low = MR == 2, right = NR == 2;
    int64_t a_bytes = am * int64_t(sizeof(bf16)), b_bytes = bk * 4, c_bytes = cm * 4;
    float* c2 = c + 16 * cm;
    if constexpr (ADD_TO_C) {
        AMX_LOAD(0, c, c_bytes);
        if constexpr (right) AMX_LOAD(1, c + 16, c_bytes);
        if constexpr (low) AMX_LOAD(2, c2, c_bytes);
        if constexpr (low && right) AMX_LOAD(3, c2 + 16, c_bytes);
    } else {
        AMX_ZERO(0);
        if constexpr (right) AMX_ZERO(1);
        if constexpr (low) AMX_ZERO(2);
        if constexpr (low && right) AMX_ZERO(3);
    }
    for (int64_t k = 0; k < K; k += 32, a += 32, b += 16 * bk) {
        AMX_LOAD(6, b, b_bytes);
        AMX_LOAD(4, a, a_bytes);
        AMX_MULTIPLY(0, 4, 6);
        if constexpr (right) {
            AMX_LOAD(7, b + 16, b_bytes);
            AMX_MULTIPLY(1, 4, 7);
        }
        if constexpr (low) {
            AMX_LOAD(5, a + 16 * am, a_bytes);
            AMX_MULTIPLY(2, 5, 6);
        }
        if constexpr (low && right) AMX_MULTIPLY(3, 5, 7);
    }
    AMX_STORE(0, c, c_bytes);
    if constexpr (right) AMX_STORE(1, c + 16, c_bytes);
    if constexpr (low) AMX_STORE(2, c2, c_bytes);
    if constexpr (low && right) AMX_STORE(3, c2 + 16, c_bytes);
}

// C (M x N floats) = A B, plus C where wanted; A is M x K, B is K x N in pairs of rows. M and N are multiples of 16, K
// of 32; am, bk and cm are the distances of the rows in elements, of those of B in words. Splitting M or N moves no bit.
template <bool ADD_TO_C>
inline void tile_product(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t am, const uint32_t* b, int64_t bk,
                         float* c, int64_t cm) {
    settle();
    for (int64_t m = 0; m < M; m += 32)
        for (int64_t n = 0; n < N; n += 32) {
            const bf16* rows = a + m * am;
            float* to = c + m * cm + n;
            bool low = M - m > 16, right = N - n > 16;
            if (low && right) tile_block<2, 2, ADD_TO_C>(K, rows, am, b + n, bk, to, cm);
            if (low && !right) tile_block<2, 1, ADD_TO_C>(K, rows, am, b + n, bk, to, cm);
            if (!low && right) tile_block<1, 2, ADD_TO_C>(K, rows, am, b + n, bk, to, cm);
            if (!low && !right) tile_block<1, 1, ADD_TO_C>(K, rows, am, b + n, bk, to, cm);
        }
    settle();
}

}  // namespace

// What tests/ops/test_attention_amx.py asks of amx.h and paired.h one by one, beside the whole kernel.
#include "native.cpp"

extern "C" {

void tiles_multiply(int64_t M, int64_t N, int64_t K, const void* a, const uint32_t* pairs, float* c, int64_t add) {
    Tiles tiles;
    const bf16* rows = static_cast<const bf16*>(a);
    if (add)
        tile_product<true>(M, N, K, rows, K, pairs, N, c, N);
    else
        tile_product<false>(M, N, K, rows, K, pairs, N, c, N);
}

void rows_to_pairs(const void* rows, int64_t width, uint32_t* to) {
    pair_rows(static_cast<const bf16*>(rows), width, width, to);
}
}

"""The kernels of ``triton.py``: one over query tiles forward, one over query tiles and one over key tiles backward.

FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2, over the kept tiles of a ``TilePlan``. Every program writes
what is its own, so that results do not depend on the order in which programs run. This module imports Triton: only a
call that runs imports it.
"""

# Kernels are Triton's language, which looks like Python and has other types.
# pyrefly: ignore-errors
import triton
import triton.language as tl

from phylon.ops.attention.triton_backward import backward_keys, backward_queries
from phylon.ops.attention.triton_tile import distances, dot, keep_factors, load_rows, readable, store_rows, tile_scores


@triton.jit(do_not_specialize=["seed", "threshold", "bias_first"])
def forward(
    q,
    k,
    v,
    out,
    lse,
    sink,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    n_heads,
    n_groups,
    n_queries,
    n_keys,
    width,
    value_width,
    starts,
    tiles,
    places,
    bits,
    unseen,
    map_batch,
    map_head,
    bias,
    n_bias,
    bias_first,
    query_positions,
    key_positions,
    query_batch,
    key_batch,
    scale,
    cap,
    seed,
    threshold,
    keep_factor,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E: tl.constexpr,
    EV: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SINK: tl.constexpr,
    DROPOUT: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    """One tile of queries of one head: its output and log-sum-exp (B, H, T), infinite where a row sees nothing."""
    n_tiles = (n_queries + BLOCK_Q - 1) // BLOCK_Q
    i, bh = tl.program_id(0) % n_tiles, (tl.program_id(0) // n_tiles).to(tl.int64)
    b, h = bh // n_heads, bh % n_heads
    rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    here = rows < n_queries
    q_tile = load_rows(q + b * q_batch + h * q_head, rows, q_token, here, width, E)
    k += b * k_batch + h // n_groups * k_head
    v += b * v_batch + h // n_groups * v_head
    map_ = b * map_batch + h * map_head
    row = map_ * n_tiles + i
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, EV), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        cols = tl.load(tiles + at) * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = load_rows(k, cols, k_token, exists, width, E)
        place, distance = tl.load(places + at), cols
        if BIAS:
            qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
            distance = distances(qp, kp, rows, cols, n_queries, n_keys, bias_first, n_bias)
        scores, _ = tile_scores(
            q_tile,
            k_tile,
            rows,
            cols,
            place,
            bits,
            bias + h * n_bias,
            distance,
            n_queries,
            n_keys,
            scale,
            cap,
            BIAS,
            CAP,
        )
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights *= keep_factors(seed, threshold, 1.0, b, h, rows, cols)
        v_tile = load_rows(v, cols, v_token, exists, value_width, EV)
        mixed = mixed * shrink[:, None] + dot(weights.to(v_tile.dtype), v_tile)
        top = new_top
    empty = total == 0
    top = tl.where(empty, 0.0, top)
    if SINK:
        extra = tl.load(sink + h)
        shift = tl.maximum(top, extra)
        total = tl.where(empty, 1.0, total * tl.exp(top - shift) + tl.exp(extra - shift))
        mixed = mixed * tl.exp(top - shift)[:, None]
        top = tl.where(empty, 0.0, shift)
    else:
        total = tl.where(empty, 1.0, total)
    tl.store(lse + bh * n_queries + rows, tl.where(empty, float("inf"), top + tl.log(total)), mask=here)
    own = out + (b * n_queries * n_heads + h) * value_width
    store_rows(own, rows, n_heads * value_width, here, value_width, mixed * (keep_factor / total)[:, None], EV)


__all__ = ["backward_keys", "backward_queries", "forward"]

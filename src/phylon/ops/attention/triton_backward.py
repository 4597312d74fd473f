"""The backward kernels of ``triton.py``: one over query tiles, one over key tiles, both by recomputation."""

# Kernels are Triton's language, which looks like Python and has other types.
# pyrefly: ignore-errors
import triton
import triton.language as tl

from phylon.ops.attention.triton_tile import distances, dot, keep_factors, load_rows, readable, store_rows, tile_scores


@triton.jit(do_not_specialize=["seed", "threshold", "bias_first"])
def backward_queries(
    q,
    k,
    v,
    out,
    lse,
    d_out,
    delta,
    dq,
    d_bias,
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
    kinds,
    factors,
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
    DROPOUT: tl.constexpr,
    UNSEEN: tl.constexpr,
    KINDS: tl.constexpr,
):
    """One tile of queries of one head: ``delta`` (B, H, T), ``dq``, and its share of the bias's parameters.

    ``d_bias`` (B H, nQ, KINDS) sums the scores' gradients times ``factors`` by ``kinds``, both by distance.
    """
    n_tiles = (n_queries + BLOCK_Q - 1) // BLOCK_Q
    i, bh = tl.program_id(0) % n_tiles, (tl.program_id(0) // n_tiles).to(tl.int64)
    b, h = bh // n_heads, bh % n_heads
    rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    here = rows < n_queries
    row_lse = tl.load(lse + bh * n_queries + rows, mask=here, other=float("inf"))
    seeing = row_lse < float("inf")
    q_tile = load_rows(q + b * q_batch + h * q_head, rows, q_token, seeing, width, E)
    k += b * k_batch + h // n_groups * k_head
    v += b * v_batch + h // n_groups * v_head
    own = (b * n_queries * n_heads + h) * value_width
    g_tile = load_rows(d_out + own, rows, n_heads * value_width, seeing, value_width, EV)
    o_tile = load_rows(out + own, rows, n_heads * value_width, seeing, value_width, EV)
    row_delta = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + bh * n_queries + rows, row_delta, mask=here)
    map_ = b * map_batch + h * map_head
    row = map_ * n_tiles + i
    dq_tile = tl.zeros((BLOCK_Q, E), tl.float32)
    by_kind = tl.zeros((KINDS,), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        cols = tl.load(tiles + at) * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = load_rows(k, cols, k_token, exists, width, E)
        v_tile = load_rows(v, cols, v_token, exists, value_width, EV)
        place, distance = tl.load(places + at), cols
        if BIAS:
            qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
            distance = distances(qp, kp, rows, cols, n_queries, n_keys, bias_first, n_bias)
        scores, tanh = tile_scores(
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
        weights = tl.exp(scores - row_lse[:, None])
        d_weights = dot(g_tile, tl.trans(v_tile))
        if DROPOUT:
            d_weights *= keep_factors(seed, threshold, keep_factor, b, h, rows, cols)
        d_scores = weights * (d_weights - row_delta[:, None])
        if CAP:
            d_scores = d_scores * (1 - tanh * tanh)
        if KINDS > 1:
            kind = tl.load(kinds + distance)
            part = d_scores * tl.load(factors + distance)
            # A tile far from the diagonal holds one kind or two.
            for m in range(tl.min(tl.min(kind, 1), 0), tl.max(tl.max(kind, 1), 0) + 1):
                share = tl.sum(tl.sum(tl.where(kind == m, part, 0.0), 1), 0)
                by_kind += tl.where(tl.arange(0, KINDS) == m, share, 0.0)
        dq_tile += dot(d_scores.to(k_tile.dtype), k_tile)
    own = dq + (b * n_queries * n_heads + h) * width
    store_rows(own, rows, n_heads * width, here, width, dq_tile * scale, E)
    if KINDS > 1:
        tl.store(d_bias + (bh * n_tiles + i) * KINDS + tl.arange(0, KINDS), by_kind)


@triton.jit(do_not_specialize=["seed", "threshold", "bias_first"])
def backward_keys(
    q,
    k,
    v,
    lse,
    d_out,
    delta,
    dk,
    dv,
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
    DROPOUT: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    """One tile of keys of one key head: ``dk`` and ``dv`` from all query heads of its group, one after the other.

    ``starts``, ``tiles`` and ``places`` are the plan's columns.
    """
    n_tiles = (n_keys + BLOCK_K - 1) // BLOCK_K
    j, bkv = tl.program_id(0) % n_tiles, (tl.program_id(0) // n_tiles).to(tl.int64)
    n_kv_heads = n_heads // n_groups
    b, kv = bkv // n_kv_heads, bkv % n_kv_heads
    cols = j * BLOCK_K + tl.arange(0, BLOCK_K)
    here = cols < n_keys
    k += b * k_batch + kv * k_head
    v += b * v_batch + kv * v_head
    dk_tile = tl.zeros((BLOCK_K, E), tl.float32)
    dv_tile = tl.zeros((BLOCK_K, EV), tl.float32)
    for g in range(n_groups):
        h = kv * n_groups + g
        map_ = b * map_batch + h * map_head
        exists = readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = load_rows(k, cols, k_token, exists, width, E)
        v_tile = load_rows(v, cols, v_token, exists, value_width, EV)
        row = (b * n_heads + h) * n_queries
        column = map_ * n_tiles + j
        for at in range(tl.load(starts + column), tl.load(starts + column + 1)):
            rows = tl.load(tiles + at) * BLOCK_Q + tl.arange(0, BLOCK_Q)
            row_lse = tl.load(lse + row + rows, mask=rows < n_queries, other=float("inf"))
            # What sees nothing may hold anything.
            seeing = row_lse < float("inf")
            q_tile = load_rows(q + b * q_batch + h * q_head, rows, q_token, seeing, width, E)
            own = d_out + (b * n_queries * n_heads + h) * value_width
            g_tile = load_rows(own, rows, n_heads * value_width, seeing, value_width, EV)
            row_delta = tl.load(delta + row + rows, mask=seeing, other=0.0)
            place, distance = tl.load(places + at), cols
            if BIAS:
                qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
                distance = distances(qp, kp, rows, cols, n_queries, n_keys, bias_first, n_bias)
            scores, tanh = tile_scores(
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
            weights = tl.exp(scores - row_lse[:, None])
            d_weights = dot(g_tile, tl.trans(v_tile))
            kept = weights
            if DROPOUT:
                keep = keep_factors(seed, threshold, 1.0, b, h, rows, cols)
                d_weights *= keep * keep_factor
                kept = weights * keep
            dv_tile += dot(tl.trans(kept.to(g_tile.dtype)), g_tile)
            d_scores = weights * (d_weights - row_delta[:, None])
            if CAP:
                d_scores = d_scores * (1 - tanh * tanh)
            dk_tile += dot(tl.trans(d_scores.to(q_tile.dtype)), q_tile)
    own = dk + (b * n_keys * n_kv_heads + kv) * width
    store_rows(own, cols, n_kv_heads * width, here, width, dk_tile * scale, E)
    own = dv + (b * n_keys * n_kv_heads + kv) * value_width
    store_rows(own, cols, n_kv_heads * value_width, here, value_width, dv_tile * keep_factor, EV)

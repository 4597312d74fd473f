"""The kernels of ``triton.py``: one over query tiles forward, one over query tiles and one over key tiles backward.

FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2, over the kept tiles of a ``TilePlan``. Every program writes
what is its own, so that results do not depend on the order in which programs run. This module imports Triton: only a
call that runs imports it.
"""

# pyrefly: ignore-errors (kernels are Triton's language, which looks like Python and has other types)

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _dot(a, b):
    """``a @ b`` in fp32, without TF32. The interpreter takes bf16 for integers: there it is widened, which is exact."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _mix(x):
    """``patterns.mixing.mix``; uint32 wraps where that masks."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _count(state, index, dim: tl.constexpr):
    """One dimension of ``ops.random.keep_mask``."""
    offset: tl.constexpr = (dim + 1) * 0x9E3779B1 & 0xFFFFFFFF
    return _mix(state ^ _mix(index.to(tl.uint32) + offset))


@triton.jit
def _keep(seed, threshold, keep_factor, b, h, rows, cols):
    """What dropout multiplies the weights of a tile with."""
    state = _count(_count(seed.to(tl.uint32), b, 0), h, 1)
    state = _count(_count(state, rows, 2)[:, None], cols[None, :], 3)
    return tl.where(state >= threshold.to(tl.uint32), keep_factor, 0.0)


@triton.jit
def _load(base, index, stride, exists, width, WIDE: tl.constexpr):
    """Rows (n, WIDE) of a tensor, zero where they do not exist and beyond ``width``."""
    e = tl.arange(0, WIDE)
    mask = exists[:, None] & (e < width)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, index, stride, exists, width, value, WIDE: tl.constexpr):
    e = tl.arange(0, WIDE)
    mask = exists[:, None] & (e < width)[None, :]
    tl.store(base + index.to(tl.int64)[:, None] * stride + e[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _readable(unseen, cols, n_keys, UNSEEN: tl.constexpr):
    """Keys that may be read: those that nobody sees may hold NaN, and 0 * NaN is NaN."""
    exists = cols < n_keys
    if UNSEEN:
        exists = exists & (tl.load(unseen + cols, mask=exists, other=1) == 0)
    return exists


@triton.jit
def _distance(query_positions, key_positions, rows, cols, n_queries, n_keys, first):
    """The place of every pair in the tables by distance."""
    query = tl.load(query_positions + rows, mask=rows < n_queries, other=0)
    key = tl.load(key_positions + cols, mask=cols < n_keys, other=0)
    exists = (rows < n_queries)[:, None] & (cols < n_keys)[None, :]
    return tl.where(exists, query[:, None] - key[None, :] - first, 0)


@triton.jit
def _scores(
    q, k, rows, cols, place, bits, bias, distance, n_queries, n_keys, scale, cap, BIAS: tl.constexpr, CAP: tl.constexpr
):
    """The scores of a tile, minus infinity where hidden; and the tanh of the cap."""
    scores = _dot(q, tl.trans(k)) * scale
    if BIAS:
        scores += tl.load(bias + distance)
    tanh = scores
    if CAP:
        small = tl.exp(tl.abs(scores) * (-2 / cap))
        tanh = (1 - small) / (1 + small)
        tanh = tl.where(scores < 0, -tanh, tanh)
        scores = tanh * cap
    # A number, since the compiler cannot move the bits that leave a branch to the layout of an fp32 product.
    seen = ((rows < n_queries)[:, None] & (cols < n_keys)[None, :]).to(tl.int32)
    n_rows: tl.constexpr = q.shape[0]
    n_cols: tl.constexpr = k.shape[0]
    if place >= 0:
        row, col = tl.arange(0, n_rows), tl.arange(0, n_cols)
        at = bits + place.to(tl.int64) * (n_rows * n_cols // 8) + row[:, None] * (n_cols // 8) + (col // 8)[None, :]
        seen = seen & (tl.load(at).to(tl.int32) >> (col % 8)[None, :])
    return tl.where(seen != 0, scores, -float("inf")), tanh


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
    """One tile of queries of one head: its output and log-sum-exp (B, H, T), 0 where a row sees nothing."""
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // n_heads, bh % n_heads
    rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    here = rows < n_queries
    q_tile = _load(q + b * q_batch + h * q_head, rows, q_token, here, width, E)
    k += b * k_batch + h // n_groups * k_head
    v += b * v_batch + h // n_groups * v_head
    map_ = b * map_batch + h * map_head
    row = map_ * tl.num_programs(0) + i
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, EV), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        cols = tl.load(tiles + at) * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = _readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = _load(k, cols, k_token, exists, width, E)
        place, distance = tl.load(places + at), cols
        if BIAS:
            qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
            distance = _distance(qp, kp, rows, cols, n_queries, n_keys, bias_first)
        scores, _ = _scores(
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
            weights *= _keep(seed, threshold, keep_factor, b, h, rows, cols)
        v_tile = _load(v, cols, v_token, exists, value_width, EV)
        mixed = mixed * shrink[:, None] + _dot(weights.to(v_tile.dtype), v_tile)
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
    tl.store(lse + bh * n_queries + rows, top + tl.log(total), mask=here)
    own = out + (b * n_queries * n_heads + h) * value_width
    _store(own, rows, n_heads * value_width, here, value_width, mixed / total[:, None], EV)


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
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // n_heads, bh % n_heads
    rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    here = rows < n_queries
    q_tile = _load(q + b * q_batch + h * q_head, rows, q_token, here, width, E)
    k += b * k_batch + h // n_groups * k_head
    v += b * v_batch + h // n_groups * v_head
    own = (b * n_queries * n_heads + h) * value_width
    g_tile = _load(d_out + own, rows, n_heads * value_width, here, value_width, EV)
    o_tile = _load(out + own, rows, n_heads * value_width, here, value_width, EV)
    row_delta = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + bh * n_queries + rows, row_delta, mask=here)
    row_lse = tl.load(lse + bh * n_queries + rows, mask=here, other=0.0)
    map_ = b * map_batch + h * map_head
    row = map_ * tl.num_programs(0) + i
    dq_tile = tl.zeros((BLOCK_Q, E), tl.float32)
    by_kind = tl.zeros((KINDS,), tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        cols = tl.load(tiles + at) * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = _readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = _load(k, cols, k_token, exists, width, E)
        v_tile = _load(v, cols, v_token, exists, value_width, EV)
        place, distance = tl.load(places + at), cols
        if BIAS:
            qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
            distance = _distance(qp, kp, rows, cols, n_queries, n_keys, bias_first)
        scores, tanh = _scores(
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
        d_weights = _dot(g_tile, tl.trans(v_tile))
        if DROPOUT:
            d_weights *= _keep(seed, threshold, keep_factor, b, h, rows, cols)
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
        dq_tile += _dot(d_scores.to(k_tile.dtype), k_tile)
    own = dq + (b * n_queries * n_heads + h) * width
    _store(own, rows, n_heads * width, here, width, dq_tile * scale, E)
    if KINDS > 1:
        tl.store(d_bias + (bh * tl.num_programs(0) + i) * KINDS + tl.arange(0, KINDS), by_kind)


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
    j, bkv = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
        exists = _readable(unseen + map_ * n_keys, cols, n_keys, UNSEEN)
        k_tile = _load(k, cols, k_token, exists, width, E)
        v_tile = _load(v, cols, v_token, exists, value_width, EV)
        row = (b * n_heads + h) * n_queries
        column = map_ * tl.num_programs(0) + j
        for at in range(tl.load(starts + column), tl.load(starts + column + 1)):
            rows = tl.load(tiles + at) * BLOCK_Q + tl.arange(0, BLOCK_Q)
            exist = rows < n_queries
            q_tile = _load(q + b * q_batch + h * q_head, rows, q_token, exist, width, E)
            own = d_out + (b * n_queries * n_heads + h) * value_width
            g_tile = _load(own, rows, n_heads * value_width, exist, value_width, EV)
            row_lse = tl.load(lse + row + rows, mask=exist, other=0.0)
            row_delta = tl.load(delta + row + rows, mask=exist, other=0.0)
            place, distance = tl.load(places + at), cols
            if BIAS:
                qp, kp = query_positions + b * query_batch, key_positions + b * key_batch
                distance = _distance(qp, kp, rows, cols, n_queries, n_keys, bias_first)
            scores, tanh = _scores(
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
            d_weights = _dot(g_tile, tl.trans(v_tile))
            kept = weights
            if DROPOUT:
                keep = _keep(seed, threshold, keep_factor, b, h, rows, cols)
                d_weights *= keep
                kept = weights * keep
            dv_tile += _dot(tl.trans(kept.to(g_tile.dtype)), g_tile)
            d_scores = weights * (d_weights - row_delta[:, None])
            if CAP:
                d_scores = d_scores * (1 - tanh * tanh)
            dk_tile += _dot(tl.trans(d_scores.to(q_tile.dtype)), q_tile)
    own = dk + (b * n_keys * n_kv_heads + kv) * width
    _store(own, cols, n_kv_heads * width, here, width, dk_tile * scale, E)
    own = dv + (b * n_keys * n_kv_heads + kv) * value_width
    _store(own, cols, n_kv_heads * value_width, here, value_width, dv_tile, EV)

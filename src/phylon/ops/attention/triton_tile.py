"""What the kernels of ``triton.py`` share: a tile's products, memory, scores and dropout."""

# Kernels are Triton's language, which looks like Python and has other types.
# pyrefly: ignore-errors

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b):
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
def keep_factors(seed, threshold, keep_factor, b, h, rows, cols):
    """What dropout multiplies the weights of a tile with: 0, or ``keep_factor``."""
    state = _count(_count(seed.to(tl.uint32), b, 0), h, 1)
    state = _count(_count(state, rows, 2)[:, None], cols[None, :], 3)
    return tl.where(state >= threshold.to(tl.uint32), keep_factor, 0.0)


@triton.jit
def load_rows(base, index, stride, exists, width, WIDE: tl.constexpr):
    """Rows (n, WIDE) of a tensor, zero where they do not exist and beyond ``width``."""
    e = tl.arange(0, WIDE)
    mask = exists[:, None] & (e < width)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, index, stride, exists, width, value, WIDE: tl.constexpr):
    e = tl.arange(0, WIDE)
    mask = exists[:, None] & (e < width)[None, :]
    tl.store(base + index.to(tl.int64)[:, None] * stride + e[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def readable(unseen, cols, n_keys, UNSEEN: tl.constexpr):
    """Keys that may be read: those that nobody sees may hold NaN, and 0 * NaN is NaN."""
    exists = cols < n_keys
    if UNSEEN:
        exists = exists & (tl.load(unseen + cols, mask=exists, other=1) == 0)
    return exists


@triton.jit
def distances(query_positions, key_positions, rows, cols, n_queries, n_keys, first, size):
    """The place of every pair in the tables of ``size`` distances, beyond which all is as at their ends."""
    query = tl.load(query_positions + rows, mask=rows < n_queries, other=0)
    key = tl.load(key_positions + cols, mask=cols < n_keys, other=0)
    exists = (rows < n_queries)[:, None] & (cols < n_keys)[None, :]
    place = tl.minimum(tl.maximum(query[:, None] - key[None, :] - first, 0), size - 1)
    return tl.where(exists, place, 0)


@triton.jit
def tile_scores(
    q, k, rows, cols, place, bits, bias, distance, n_queries, n_keys, scale, cap, BIAS: tl.constexpr, CAP: tl.constexpr
):
    """The scores of a tile, minus infinity where hidden; and the tanh of the cap."""
    scores = dot(q, tl.trans(k)) * scale
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

"""The kernels of ``triton.py``: the scan step by step, each program some channels of one row; backward recomputes.

Mamba (arXiv:2312.00752), section 3.3: the state never leaves the chip. The forward pass leaves the state at the start
of every chunk; the backward pass goes through the chunks from the last, computes the states of a chunk once more into
memory of its own, and then the gradients step by step.
"""

# Kernels are Triton's language, which looks like Python and has other types.
# pyrefly: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _step(x, dt, keep, token, channels, real, width, KEEP: tl.constexpr):
    """Input, step size and the factor on what came before, of one token."""
    factor = 1.0
    if KEEP:
        factor = tl.load(keep + token)
    at = token * width + channels
    return tl.load(x + at, mask=real, other=0.0), tl.load(dt + at, mask=real, other=0.0), factor


@triton.jit
def _kept(h, factor, KEEP: tl.constexpr):
    """``h`` where the factor is 1, zero where it is 0: a product would leave NaN and infinity."""
    if KEEP:
        h = tl.where(factor > 0, h, 0.0)
    return h


@triton.jit
def forward(
    x,
    dt,
    a,
    b,
    c,
    d,
    keep,
    starts,
    y,
    last,
    n_tokens,
    width,
    size,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """``starts`` (B, chunks, D, N) holds the first state in its first chunk, and takes those of the others."""
    blocks, chunks = (width + CHANNELS - 1) // CHANNELS, (n_tokens + CHUNK - 1) // CHUNK
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    channels, n = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    real, state = channels < width, n < size
    both = real[:, None] & state[None, :]
    place = channels[:, None] * size + n[None, :]
    rate = tl.load(a + place, mask=both, other=0.0)
    skip = tl.load(d + channels, mask=real, other=0.0)
    first = starts + row * chunks * width * size + place
    h = tl.load(first, mask=both, other=0.0)
    for t in range(n_tokens):
        if t % CHUNK == 0:
            tl.store(first + (t // CHUNK) * width * size, h, mask=both)
        token = row * n_tokens + t
        x_t, dt_t, factor = _step(x, dt, keep, token, channels, real, width, KEEP)
        b_t = tl.load(b + token * size + n, mask=state, other=0.0)
        c_t = tl.load(c + token * size + n, mask=state, other=0.0)
        h = tl.exp(dt_t[:, None] * rate) * _kept(h, factor, KEEP) + (dt_t * x_t)[:, None] * b_t[None, :]
        tl.store(y + token * width + channels, tl.sum(h * c_t[None, :], 1) + skip * x_t, mask=real)
    tl.store(last + row * width * size + place, h, mask=both)


@triton.jit(do_not_specialize=["first", "last"])
def backward(
    x,
    dt,
    a,
    b,
    c,
    d,
    keep,
    starts,
    d_y,
    d_h,
    states,
    d_x,
    d_dt,
    d_a,
    d_b,
    d_c,
    d_d,
    part,
    first,
    last,
    n_tokens,
    width,
    size,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The chunks from ``first`` to before ``last``; of the state after them ``d_h`` (B, D, N), and then of that before.

    ``d_a`` (B, D, N) and ``d_d`` (B, D) by row are added to; ``d_b`` and ``d_c`` (blocks, B, part, N) by block of
    channels hold at most ``part`` tokens, those of these chunks.
    ``states`` (B, CHUNK, D, N) is the memory of one chunk: the state before each of its steps.
    """
    blocks, chunks = (width + CHANNELS - 1) // CHANNELS, (n_tokens + CHUNK - 1) // CHUNK
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    n_rows = tl.num_programs(0) // blocks
    channels, n = block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    real, state = channels < width, n < size
    both = real[:, None] & state[None, :]
    place = channels[:, None] * size + n[None, :]
    rate = tl.load(a + place, mask=both, other=0.0)
    skip = tl.load(d + channels, mask=real, other=0.0)
    own = states + row * CHUNK * width * size + place
    d_state = tl.load(d_h + row * width * size + place, mask=both, other=0.0)
    d_rate = tl.load(d_a + row * width * size + place, mask=both, other=0.0)
    d_skip = tl.load(d_d + row * width + channels, mask=real, other=0.0)
    for back in range(last - first):
        chunk = last - 1 - back
        begin = chunk * CHUNK
        end = tl.minimum(begin + CHUNK, n_tokens)
        h = tl.load(starts + (row * chunks + chunk) * width * size + place, mask=both, other=0.0)
        for t in range(begin, end):
            token = row * n_tokens + t
            x_t, dt_t, factor = _step(x, dt, keep, token, channels, real, width, KEEP)
            b_t = tl.load(b + token * size + n, mask=state, other=0.0)
            h = _kept(h, factor, KEEP)
            tl.store(own + (t - begin) * width * size, h, mask=both)
            h = tl.exp(dt_t[:, None] * rate) * h + (dt_t * x_t)[:, None] * b_t[None, :]
        # Threads read what others wrote, and at the end of the chunk write where others read.
        tl.debug_barrier()
        for step in range(end - begin):
            t = end - 1 - step
            token = row * n_tokens + t
            x_t, dt_t, factor = _step(x, dt, keep, token, channels, real, width, KEEP)
            b_t = tl.load(b + token * size + n, mask=state, other=0.0)
            c_t = tl.load(c + token * size + n, mask=state, other=0.0)
            g_t = tl.load(d_y + token * width + channels, mask=real, other=0.0)
            before = tl.load(own + (t - begin) * width * size, mask=both, other=0.0)
            decay = tl.exp(dt_t[:, None] * rate)
            after = decay * before + (dt_t * x_t)[:, None] * b_t[None, :]
            d_state += g_t[:, None] * c_t[None, :]
            mixed = (block * n_rows + row) * part + t - first * CHUNK
            tl.store(d_c + mixed * size + n, tl.sum(g_t[:, None] * after, 0), mask=state)
            tl.store(d_b + mixed * size + n, tl.sum(d_state * (dt_t * x_t)[:, None], 0), mask=state)
            d_input = tl.sum(d_state * b_t[None, :], 1)
            d_decay = d_state * before * decay
            d_rate += d_decay * dt_t[:, None]
            d_skip += g_t * x_t
            at = token * width + channels
            tl.store(d_x + at, d_input * dt_t + g_t * skip, mask=real)
            tl.store(d_dt + at, d_input * x_t + tl.sum(d_decay * rate, 1), mask=real)
            d_state = _kept(d_state * decay, factor, KEEP)
        tl.debug_barrier()
    tl.store(d_a + row * width * size + place, d_rate, mask=both)
    tl.store(d_d + row * width + channels, d_skip, mask=real)
    tl.store(d_h + row * width * size + place, d_state, mask=both)

"""Mamba-2's state-space duality in chunks: matrix products inside a chunk, a state between chunks.

Dao and Gu (arXiv:2405.21060), section 6. Only one chunk's (B, H, L, L) weights ever exist. Where rows hold several
documents every chunk holds tokens of one: in a product with zeros a NaN would pass from one to the other.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phylon.ops.scan.call import SSDCall, cleared, wide

CHUNK = 64


class SSDChunked:
    """PyTorch operations only, any device, forward and backward."""

    name = "chunked"

    def available(self) -> str | None:
        return None

    def supports(self, call: SSDCall) -> str | None:
        return None

    def run(self, call: SSDCall) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D = wide(call.x, call.dt, call.A, call.B, call.C, call.D)
        x, dt, B, C = (cleared(t, call.breaks.real) for t in (x, dt, B, C))
        batch, length, heads, width = x.shape
        groups, size = B.shape[2:]
        h = x.new_zeros(batch, heads, width, size) if call.state is None else call.state.to(x.dtype)
        shape = (groups, heads // groups)
        by_time = (x.unflatten(2, shape), dt.unflatten(2, shape), B, C)
        constant = (A.unflatten(0, shape), D.unflatten(0, shape))
        h = h.unflatten(1, shape)  # (B, G, R, P, N), R heads a group
        resets = call.breaks.resets
        if length == 1:
            h = h if resets is None else _fresh(h, resets)
            into = _target(call, h.dtype)
            if into is None:
                y, h = _step(h, *by_time, *constant)
            else:
                y = _step_into(into.unflatten(1, shape), h, *by_time, *constant)
                return cleared(y.flatten(2, 3), call.breaks.real).to(call.x.dtype), into
        elif resets is None:
            y, h = in_chunks(_chunk, CHUNK, (*by_time, None), constant, h)
        else:
            place = _places(resets)
            starts = _placed(resets, place)
            y, h = in_chunks(_chunk, CHUNK, (*(_placed(t, place) for t in by_time), starts), constant, h)
            y = y.gather(1, _like(place, y))
        return cleared(y.flatten(2, 3), call.breaks.real).to(call.x.dtype), h.flatten(1, 2)


def _places(resets: Tensor) -> Tensor:
    """Where each token (B, T) goes, so that every document begins a chunk."""
    index = torch.arange(resets.shape[1], device=resets.device)
    offset = (index - torch.where(resets, index, 0).cummax(1).values) % CHUNK
    return ((offset == 0).cumsum(1) - 1) * CHUNK + offset


def _placed(x: Tensor, place: Tensor) -> Tensor:
    """``x`` (B, T, …) at its places, zeros between: as steps they leave the state as it is."""
    length = (int(place[:, -1].max()) // CHUNK + 1) * CHUNK
    return x.new_zeros(len(x), length, *x.shape[2:]).scatter(1, _like(place, x), x)


def _like(place: Tensor, x: Tensor) -> Tensor:
    return place.reshape(*place.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])


def _fresh(h: Tensor, starts: Tensor) -> Tensor:
    """``h`` (B, G, R, P, N), zero in the rows where the first of ``starts`` (B, L) says so."""
    return h.masked_fill(starts[:, 0, None, None, None, None], 0)


def in_chunks(
    function: Callable[..., tuple[Tensor, Tensor]],
    length: int,
    by_time: tuple[Tensor | None, ...],
    constant: tuple[Tensor, ...],
    h: Tensor,
) -> tuple[Tensor, Tensor]:
    """``function(h, *chunks, *constant) -> (y, h)`` over chunks of ``length`` steps of every (B, T, …) in ``by_time``.

    Under autograd only the inputs and the state at the start of each chunk are kept.
    """
    first = by_time[0]
    assert first is not None
    n_steps = first.shape[1]
    if n_steps <= length:
        return function(h, *by_time, *constant)
    n_chunks = -(-n_steps // length)
    # split, not slices: its gradient is one concatenation, theirs a full-length tensor each.
    pieces = zip(*([None] * n_chunks if t is None else t.split(length, 1) for t in by_time), strict=True)
    recompute = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (h, *by_time, *constant))
    outputs = []
    for piece in pieces:
        if recompute:
            y, h = checkpoint(function, h, *piece, *constant, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = function(h, *piece, *constant)
        outputs.append(y)
    return torch.cat(outputs, 1), h


def _step(h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of one: ``x`` (B, 1, G, R, P), ``dt`` (B, 1, G, R), ``B``, ``C`` (B, 1, G, N)."""
    x, dt = x[:, 0], dt[:, 0]
    decay = torch.exp(dt * A)
    inputs = (dt[..., None] * x)[..., None] * B[:, 0, :, None, None, :]
    h = torch.addcmul(inputs, decay[..., None, None], h)
    y = (h @ C[:, 0, :, None, :, None])[..., 0]
    return torch.addcmul(y, x, D[..., None])[:, None], h


def _target(call: SSDCall, dtype: torch.dtype) -> Tensor | None:
    """``into``, if the last state can be computed right there."""
    into, given = call.into, (call.x, call.dt, call.A, call.B, call.C, call.D, call.state)
    if into is None or into is call.state or into.dtype != dtype or not into.is_contiguous():
        return None
    return None if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given) else into


def _step_into(into: Tensor, h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """``_step`` with the last state in the memory of ``into``: nothing of its size is allocated."""
    x, dt = x[:, 0], dt[:, 0]
    torch.mul(h, torch.exp(dt * A)[..., None, None], out=into)
    into.addcmul_((dt[..., None] * x)[..., None], B[:, 0, :, None, None, :])
    y = (into @ C[:, 0, :, None, :, None])[..., 0]
    return torch.addcmul(y, x, D[..., None])[:, None]


def _chunk(
    h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, A: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """``x`` (B, L, G, R, P), ``dt`` (B, L, G, R), ``B``, ``C`` (B, L, G, N), ``h`` (B, G, R, P, N).

    Tokens of one document, the first of its own where ``starts`` (B, L) says so.
    """
    h = h if starts is None else _fresh(h, starts)
    logs = (dt * A).permute(0, 2, 3, 1)  # (B, G, R, L)
    decay, since_start = _decays(logs)
    u = (x * dt[..., None]).permute(0, 2, 3, 1, 4)  # (B, G, R, L, P)
    B_GLN, C_GLN = B.transpose(1, 2), C.transpose(1, 2)
    # Inside the chunk: weights (B, G, R, L, L), as attention without a softmax.
    y = ((C_GLN @ B_GLN.mT)[:, :, None] * decay) @ u
    # From before the chunk.
    y = y + (C_GLN[:, :, None] @ h.mT) * since_start[..., None]
    # The state at the end of the chunk.
    weighted = u * decay[..., -1, :, None]
    h = since_start[..., -1, None, None] * h + weighted.mT @ B_GLN[:, :, None]
    return torch.addcmul(y.permute(0, 3, 1, 2, 4), x, D[..., None]), h


def _decays(logs: Tensor) -> tuple[Tensor, Tensor]:
    """What is left at step i of step j's input (…, L, L), zero for j > i, and of the state before the chunk (…, L).

    The exponents are sums over j < k <= i, not differences of sums from the start, which would cancel.
    """
    length = logs.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril(-1)
    sums = logs[..., None].expand(*logs.shape, length).masked_fill(~below, 0).cumsum(-2)
    unseen = ~(below | torch.eye(length, dtype=torch.bool, device=logs.device))
    return torch.exp(sums.masked_fill(unseen, float("-inf"))), torch.exp(logs.cumsum(-1))

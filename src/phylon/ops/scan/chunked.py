"""The selective scan in chunks: what belongs to all steps of a chunk at once, the recurrence step by step.

Only a chunk's states ever exist, in buffers that every chunk uses again; the backward pass computes them once more from
the state at the chunk's start. Between the passes a state is kept for every N steps at most, B T D numbers, as many as
``x`` has; where chunks are shorter than that, those between two kept states are gone through once more to find theirs.
"""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.scan.call import ScanCall, cleared, wide

_CHUNK_NUMBERS = 2**18
"""Numbers of one (B, L, D, N) tensor: on a CPU larger ones leave the cache."""
_LONGEST = 64
_SHORTEST = 16


class ScanChunked:
    """PyTorch operations only, any device, forward and backward."""

    name = "chunked"

    def available(self) -> str | None:
        return None

    def supports(self, call: ScanCall) -> str | None:
        return None

    def run(self, call: ScanCall) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D = wide(call.x, call.dt, call.A, call.B, call.C, call.D)
        x, dt, B, C = (cleared(t, call.breaks.real) for t in (x, dt, B, C))
        into, before = call.into, call.state
        if into is not None and before is not None and _in_place(call, x.dtype):
            # ``into`` holds A first: then nothing of a state's size is made.
            return step_into(into.copy_(A), before, x, dt, B, C, D).to(call.x.dtype), into
        h = x.new_zeros(len(x), *A.shape) if call.state is None else call.state.to(x.dtype)
        y, h = _Scan.apply(x, dt, A, B, C, D, h, call.breaks.resets)
        return cleared(y, call.breaks.real).to(call.x.dtype), h


def step_into(into: Tensor, h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """One step (B, 1, …) without a gradient; ``into`` (B, D, N) holds A and takes the state that follows ``h``."""
    into.mul_(dt.mT).exp_().mul_(h).addcmul_((dt * x).mT, B)
    return torch.addcmul((into @ C.mT).mT, x, D)


def _in_place(call: ScanCall, dtype: torch.dtype) -> bool:
    """Whether this is a step of plain tokens whose last state can be computed right in ``into``."""
    into, given = call.into, (call.x, call.dt, call.A, call.B, call.C, call.D, call.state)
    if into is None or into is call.state or into.dtype != dtype or call.x.shape[1] != 1:
        return False
    if call.breaks.resets is not None or call.breaks.real is not None:
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given))


def chunk_length(numbers: int) -> int:
    """Steps of a chunk, for a state of so many numbers."""
    return min(_LONGEST, max(_SHORTEST, _CHUNK_NUMBERS // numbers))


def kept_every(length: int, size: int) -> int:
    """Chunks of ``length`` steps from one kept state to the next: so many steps that the states are no more than x."""
    return -(-size // length)


class _Scan(torch.autograd.Function):
    """``x``, ``dt`` (B, T, D), ``A`` (D, N), ``B``, ``C`` (B, T, N), ``D`` (D,), ``h`` (B, D, N), ``resets`` (B, T)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h: Tensor, resets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        length = min(x.shape[1], chunk_length(h.numel()))
        decay, states = (x.new_empty(len(x), length, *A.shape) for _ in range(2))
        every = kept_every(length, A.shape[1])
        y, starts = torch.empty_like(x), []
        for at in range(0, x.shape[1], length):
            now = slice(at, at + length)
            if at % (every * length) == 0:
                starts.append(h)
            decay, states = decay[:, : x.shape[1] - at], states[:, : x.shape[1] - at]
            _fill(decay, states, h, x[:, now], dt[:, now], A, B[:, now], _part(resets, now))
            read = (states @ C[:, now, :, None])[..., 0]
            y[:, now] = torch.addcmul(read, x[:, now], D)
            # A copy: the buffer is used again, and a view would keep all of it alive.
            h = states[:, -1].clone()
        if any(ctx.needs_input_grad):
            ctx.length, ctx.every = length, every
            ctx.save_for_backward(x, dt, A, B, C, D, resets, torch.stack(starts))
        return y, h

    @staticmethod
    @once("scan backend 'chunked'")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_y: Tensor = grad_outputs[0]
        carry: Tensor = grad_outputs[1]
        x, dt, A, B, C, D, resets, starts = ctx.saved_tensors
        buffers = tuple(x.new_empty(len(x), ctx.length, *A.shape) for _ in range(3))
        grad_x, grad_dt, grad_B, grad_C = (torch.empty_like(t) for t in (x, dt, B, C))
        grad_A = torch.zeros_like(A)
        between: list[Tensor] = []
        for i in reversed(range(-(-x.shape[1] // ctx.length))):
            now, first = slice(i * ctx.length, (i + 1) * ctx.length), i - i % ctx.every
            if not between:
                run = slice(first * ctx.length, i * ctx.length)
                parts = (x[:, run], dt[:, run], A, B[:, run], _part(resets, run))
                between = _starts(starts[first // ctx.every], buffers[:2], *parts)
            h = between.pop()
            x_, dt_, B_, C_, g = x[:, now], dt[:, now], B[:, now], C[:, now], grad_y[:, now]
            decay, states, d = (buffer[:, : x_.shape[1]] for buffer in buffers)
            cuts = _part(resets, now)
            _fill(decay, states, h, x_, dt_, A, B_, cuts)
            grad_C[:, now] = (g[:, :, None] @ states)[:, :, 0]
            # The gradient of every state: d_t = C_t g_t + a_{t+1} d_{t+1}, the same recurrence backwards in time.
            torch.mul(g[..., None], C_[:, :, None], out=d)
            d[:, -1] += carry
            recur_back(decay, d, cuts)
            carry = _forget(decay[:, 0] * d[:, 0], cuts, 0)
            grad_u = (d @ B_[..., None])[..., 0]
            grad_B[:, now] = ((dt_ * x_)[:, :, None] @ d)[:, :, 0]
            # Of the exponent dt A: d_t times what the step before left.
            d.mul_(decay)
            d[:, 0].mul_(h)
            d[:, 1:].mul_(states[:, :-1])
            if cuts is not None:
                d.masked_fill_(cuts[..., None, None], 0)
            grad_A += torch.mul(d, dt_[..., None], out=decay).sum((0, 1))
            grad_dt[:, now] = torch.addcmul(torch.mul(d, A, out=decay).sum(-1), grad_u, x_)
            grad_x[:, now] = torch.addcmul(g * D, grad_u, dt_)
        return grad_x, grad_dt, grad_A, grad_B, grad_C, (grad_y * x).sum((0, 1)), carry, None


def _starts(
    h: Tensor,
    buffers: tuple[Tensor, ...],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    resets: Tensor | None,
) -> list[Tensor]:
    """The states before each of the whole chunks of ``x``, from ``h`` before the first, and that after the last."""
    decay, states = buffers
    found, length = [h], decay.shape[1]
    for at in range(0, x.shape[1], length):
        now = slice(at, at + length)
        _fill(decay, states, found[-1], x[:, now], dt[:, now], A, B[:, now], _part(resets, now))
        found.append(states[:, -1].clone())
    return found


def _part(resets: Tensor | None, now: slice) -> Tensor | None:
    return None if resets is None else resets[:, now]


def _forget(h: Tensor, resets: Tensor | None, t: int) -> Tensor:
    """``h`` (B, D, N), zero where step ``t`` starts a document. A factor of 0 would not do: it leaves NaN and inf."""
    return h if resets is None else h.masked_fill(resets[:, t, None, None], 0)


def _fill(
    decay: Tensor, states: Tensor, h: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, resets: Tensor | None
) -> None:
    """One chunk's decay factors and states (B, L, D, N) into their buffers, from the state ``h`` before it."""
    torch.mul(dt[..., None], A, out=decay).exp_()
    if resets is not None:
        decay.masked_fill_(resets[..., None, None], 0)
    torch.mul((dt * x)[..., None], B[:, :, None], out=states)
    recur(decay, states, h, resets)


def recur(a: Tensor, b: Tensor, h: Tensor, resets: Tensor | None = None) -> None:
    """``b_t <- b_t + a_t b_{t-1}`` in place along dimension 1, with ``h`` before the first; at ``resets`` just ``b_t``.

    On a CPU a loop of fused steps, which moves the least memory; elsewhere log2(L) rounds over the whole chunk (Hillis
    and Steele 1986), which launch the fewest kernels.
    """
    if a.device.type != "cpu":
        b[:, 0].addcmul_(a[:, 0], _forget(h, resets, 0))
        double(a.clone(), b, None if resets is None else resets.cumsum(1))
        return
    for t, (factor, state) in enumerate(zip(a.unbind(1), b.unbind(1), strict=True)):
        h = state.addcmul_(factor, _forget(h, resets, t))


def recur_back(a: Tensor, b: Tensor, resets: Tensor | None = None) -> None:
    """``b_t <- b_t + a_{t+1} b_{t+1}`` in place, the recurrence against time; just ``b_t`` before ``resets``."""
    if a.device.type != "cpu":
        turned = b.flip(1)
        factors = torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:].flip(1)], 1)
        double(factors, turned, None if resets is None else resets.cumsum(1).flip(1))
        b.copy_(turned.flip(1))
        return
    factors, states = a.unbind(1), b.unbind(1)
    for t in range(len(states) - 2, -1, -1):
        states[t].addcmul_(factors[t + 1], _forget(states[t + 1], resets, t + 1))


def double(a: Tensor, b: Tensor, documents: Tensor | None = None) -> None:
    """``b_t <- b_t + a_t b_{t-1}`` by doubling, within equal ``documents`` (B, L); ``a`` is overwritten."""
    reach = 1
    while reach < a.shape[1]:
        more, longer = a[:, reach:] * b[:, :-reach], a[:, reach:] * a[:, :-reach]
        if documents is not None:
            other = (documents[:, reach:] != documents[:, :-reach])[..., None, None]
            more, longer = more.masked_fill_(other, 0), longer.masked_fill_(other, 0)
        b[:, reach:] += more
        a[:, reach:] = longer
        reach *= 2

"""The selective scan in chunks: what belongs to all steps of a chunk at once, the recurrence step by step.

Only a chunk's states ever exist: the backward pass computes them again from the state at the chunk's start.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phylon.ops.scan.call import ScanCall, cleared, wide

_CHUNK_NUMBERS = 2**18
"""Numbers of one (B, L, D, N) tensor: on a CPU larger ones leave the cache and pay for fresh pages at every turn."""
_LONGEST = 64
_SHORTEST = 16
"""Of every chunk the first state is kept for the backward pass: at 16 steps they are as large as ``x`` for N = 16."""


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
        batch, _, width = x.shape
        h = x.new_zeros(batch, *A.shape) if call.state is None else call.state.to(x.dtype)
        keep = kept(call.breaks.resets, x.dtype)
        y, h = in_chunks(_chunk, chunk_length(batch * width * A.shape[1]), (x, dt, B, C, keep), (A, D), h)
        return y.to(call.x.dtype), h


def chunk_length(numbers: int) -> int:
    """Steps of a chunk, for a state of so many numbers."""
    return min(_LONGEST, max(_SHORTEST, _CHUNK_NUMBERS // numbers))


def kept(resets: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The factor (B, T) on what came before each step: 0 where a document starts, else 1."""
    return None if resets is None else (~resets).to(dtype)


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


def _chunk(
    h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, keep: Tensor | None, A: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(dt[..., None] * A)  # (B, L, D, N)
    if keep is not None:
        decay = decay * keep[..., None, None]
    inputs = (dt * x)[..., None] * B[..., None, :]
    if x.shape[1] == 1:
        states = torch.addcmul(inputs, decay, h[:, None])
    else:
        states = _Recurrence.apply(decay, inputs, h)
    y = (states @ C[..., None])[..., 0]
    # A copy: a view of the last state would keep all of them alive.
    return torch.addcmul(y, x, D), states[:, -1].clone()


class _Recurrence(torch.autograd.Function):
    """All states (B, L, D, N) of ``h_t = a_t h_{t-1} + b_t`` for ``a``, ``b`` (B, L, D, N) and the first ``h``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        states = step_by_step(a, b, h) if a.device.type == "cpu" else doubling(a, b, h)
        ctx.save_for_backward(a, h, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad: Tensor = grad_outputs[0]
        a, h, states = ctx.saved_tensors
        # The gradient runs the same recurrence backwards in time: d_t = grad_t + a_{t+1} d_{t+1}.
        last = torch.zeros_like(h)
        if a.device.type == "cpu":
            grad_b = step_by_step(a, grad, last, backwards=True)
        else:
            after = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
            grad_b = doubling(after.flip(1), grad.flip(1), last).flip(1)
        grad_a = torch.empty_like(a)
        torch.mul(grad_b[:, 0], h, out=grad_a[:, 0])
        torch.mul(grad_b[:, 1:], states[:, :-1], out=grad_a[:, 1:])
        return grad_a, grad_b, a[:, 0] * grad_b[:, 0]


def step_by_step(a: Tensor, b: Tensor, h: Tensor, *, backwards: bool = False) -> Tensor:
    """The recurrence as a loop of fused steps: the least memory traffic. Backwards: ``d_t = b_t + a_{t+1} d_{t+1}``."""
    states = torch.empty_like(b)
    factors, terms, outs = a.unbind(1), b.unbind(1), states.unbind(1)
    if not backwards:
        for factor, term, out in zip(factors, terms, outs, strict=True):
            h = torch.addcmul(term, factor, h, out=out)
        return states
    h = outs[-1].copy_(terms[-1])
    for factor, term, out in zip(factors[:0:-1], terms[-2::-1], outs[-2::-1], strict=True):
        h = torch.addcmul(term, factor, h, out=out)
    return states


def doubling(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """The recurrence in log2(L) rounds over the whole chunk (Hillis and Steele 1986): few launches on a GPU."""
    factors, states = a.clone(), b.clone()
    states[:, 0].addcmul_(a[:, 0], h)
    reach = 1
    while reach < a.shape[1]:
        states[:, reach:] += factors[:, reach:] * states[:, :-reach]
        factors[:, reach:] = factors[:, reach:] * factors[:, :-reach]
        reach *= 2
    return states

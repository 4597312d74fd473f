"""The oracles: the recurrences as they are written, one step at a time, in at least fp32. They support everything."""

import torch
from torch import Tensor

from phylon.ops.scan.call import Breaks, ConvCall, ScanCall, SSDCall, cleared, wide


class _Reference:
    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: object) -> str | None:
        return None


class ScanReference(_Reference):
    """``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = C_t h_t + D x_t``. Mamba (arXiv:2312.00752), alg. 2."""

    def run(self, call: ScanCall) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D = wide(call.x, call.dt, call.A, call.B, call.C, call.D)
        x, dt, B, C = (cleared(t, call.breaks.real) for t in (x, dt, B, C))
        h = _start(call.state, x, (x.shape[0], *A.shape))  # (B, D, N)
        outputs = []
        for t in range(x.shape[1]):
            before = _after_reset(h, call.breaks, t)
            decay = torch.exp(dt[:, t, :, None] * A)
            new = decay * before + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
            y = (new * C[:, t, None, :]).sum(-1) + D * x[:, t]
            h, y = _where_real(call.breaks, t, new, h, y)
            outputs.append(y)
        return torch.stack(outputs, 1).to(call.x.dtype), h


class SSDReference(_Reference):
    """The same with one ``A`` a head, Mamba-2 (arXiv:2405.21060), section 2.1: a state (P, N) decays as a whole."""

    def run(self, call: SSDCall) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D = wide(call.x, call.dt, call.A, call.B, call.C, call.D)
        x, dt, B, C = (cleared(t, call.breaks.real) for t in (x, dt, B, C))
        repeats = x.shape[2] // B.shape[2]
        B, C = B.repeat_interleave(repeats, 2), C.repeat_interleave(repeats, 2)  # (B, T, H, N)
        h = _start(call.state, x, (x.shape[0], *x.shape[2:], B.shape[3]))  # (B, H, P, N)
        outputs = []
        for t in range(x.shape[1]):
            before = _after_reset(h, call.breaks, t)
            decay = torch.exp(dt[:, t] * A)[..., None, None]
            new = decay * before + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
            y = (new * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t]
            h, y = _where_real(call.breaks, t, new, h, y)
            outputs.append(y)
        return torch.stack(outputs, 1).to(call.x.dtype), h


class ConvReference(_Reference):
    """``y_t = bias + sum_j weight[:, W - 1 - j] x_{t-j}`` over the last W real tokens of the document."""

    def run(self, call: ConvCall) -> tuple[Tensor, Tensor]:
        x = cleared(call.x, call.breaks.real)
        window = call.start()  # (B, W - 1, D), oldest first
        bias = 0 if call.bias is None else call.bias
        outputs = []
        for t in range(x.shape[1]):
            before = _after_reset(window, call.breaks, t)
            new = torch.cat([before, x[:, t, None]], 1)
            y = call.activated((new * call.weight.T).sum(1) + bias)
            window, y = _where_real(call.breaks, t, new[:, 1:], window, y)
            outputs.append(y)
        return torch.stack(outputs, 1).to(call.x.dtype), window


def _start(state: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_zeros(shape) if state is None else state.to(x.dtype)


def _after_reset(state: Tensor, breaks: Breaks, t: int) -> Tensor:
    """``state`` as step t finds it: zero where a document starts."""
    if breaks.resets is None:
        return state
    return state.masked_fill(_column(breaks.resets, t, state), 0)


def _where_real(breaks: Breaks, t: int, new: Tensor, old: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """State and output after step t: at padding the old state and zero."""
    if breaks.real is None:
        return new, y
    padding = ~breaks.real
    return torch.where(_column(padding, t, new), old, new), y.masked_fill(_column(padding, t, y), 0)


def _column(mask: Tensor, t: int, like: Tensor) -> Tensor:
    return mask[:, t].reshape(-1, *[1] * (like.ndim - 1))

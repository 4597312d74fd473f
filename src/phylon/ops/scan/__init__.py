"""Selective scans and the convolution before them: public functions, references, and backends behind one dispatch."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from phylon.ops.dispatch import Dispatch, Reason
from phylon.ops.scan.call import Breaks, ConvCall, ScanCall, SSDCall
from phylon.ops.scan.chunked import ScanChunked
from phylon.ops.scan.conv import ConvShifted
from phylon.ops.scan.native import ConvNative, ScanNative
from phylon.ops.scan.reference import ConvReference, ScanReference, SSDReference
from phylon.ops.scan.ssd.chunked import SSDChunked
from phylon.ops.scan.ssd.native import SSDNative
from phylon.ops.scan.step import StepCall, StepComposed, StepNative
from phylon.ops.scan.triton import ScanTriton

dispatch: Dispatch[ScanCall] = Dispatch("scan", [ScanNative(), ScanTriton(), ScanChunked(), ScanReference()])
ssd_dispatch: Dispatch[SSDCall] = Dispatch("ssd", [SSDNative(), SSDChunked(), SSDReference()])
conv_dispatch: Dispatch[ConvCall] = Dispatch("conv", [ConvNative(), ConvShifted(), ConvReference()])

step_dispatch: Dispatch[StepCall] = Dispatch("step", [StepNative(), StepComposed()])


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    state: Tensor | None = None,
    resets: Tensor | None = None,
    real: Tensor | None = None,
    into: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = C_t h_t + D x_t``. Mamba (arXiv:2312.00752), algorithm 2.

    ``x``, ``dt`` (B, T, D); ``A`` (D, N), negative; ``B``, ``C`` (B, T, N); ``D`` (D,). ``state`` (B, D, N) is what
    came before (default: nothing). Returns ``y`` (B, T, D) in the dtype of ``x``, and the last state in fp32 at least,
    as is all the arithmetic. ``resets`` boolean (B, T): the step starts a document and forgets what came before.
    ``real`` boolean (B, T): elsewhere is padding, which may hold anything, leaves the state exactly as it is and
    yields zero. ``into`` (B, D, N), not ``state``: the last state is written there, without a gradient. Cost: O(T D N)
    time; memory for the states of one chunk, and for the backward pass for states of B T D numbers at most. A step
    (T = 1) with ``into``, without a gradient, makes nothing of a state's size. ``backend`` forces one; if it refuses,
    ``UserError`` gives its reason.
    """
    call = ScanCall(x=x, dt=dt, A=A, B=B, C=C, D=D, state=state, breaks=Breaks(resets=resets, real=real), into=into)
    with _without_autocast(x):
        return _written(dispatch.pick(call, backend).run(call), into)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    state: Tensor | None = None,
    resets: Tensor | None = None,
    real: Tensor | None = None,
    into: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan with a scalar ``A`` for each head. Mamba-2 (arXiv:2405.21060), sections 2.1 and 6.

    ``x`` (B, T, H, P), ``dt`` (B, T, H), ``A``, ``D`` (H,), ``B``, ``C`` (B, T, G, N) with H a multiple of G, ``state``
    (B, H, P, N). Everything else as in ``selective_scan``. Cost: O(T H (L (P + N) + P N)) time for chunks of L = 64
    steps; the backward pass keeps the state before each that does not start a document. A document begins a chunk;
    in the PyTorch form it takes whole ones, so that many short documents cost L steps each.
    """
    call = SSDCall(x=x, dt=dt, A=A, B=B, C=C, D=D, state=state, breaks=Breaks(resets=resets, real=real), into=into)
    with _without_autocast(x):
        return _written(ssd_dispatch.pick(call, backend).run(call), into)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    tail: Tensor | None = None,
    resets: Tensor | None = None,
    real: Tensor | None = None,
    into: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Each channel of ``x`` (B, T, D) over its last W real inputs of the same document: ``weight`` (D, W), last is now.

    ``tail`` (B, W - 1, D) holds the inputs before, oldest first, zero beyond the document's start (default: none).
    Returns ``y`` (B, T, D), passed through the ``activation`` of that name, and the new tail. ``resets``, ``real``,
    ``into`` (B, W - 1, D) and ``backend`` as in ``selective_scan``.
    """
    breaks = Breaks(resets=resets, real=real)
    call = ConvCall(x=x, weight=weight, bias=bias, activation=activation, tail=tail, breaks=breaks, into=into)
    return _written(conv_dispatch.pick(call, backend).run(call), into)


def mamba_step(call: StepCall, backend: str | None = None) -> Tensor:
    """One token through the middle of a Mamba block: (B, 1, D), before the map out of it. arXiv:2312.00752, §3.4."""
    return step_dispatch.pick(call, backend).run(call)


def explain(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    state: Tensor | None = None,
    resets: Tensor | None = None,
    real: Tensor | None = None,
    backend: str | None = None,
    **options: Tensor | None,
) -> list[Reason]:
    """Which backend would run this selective scan, and why each other one would not; the options are those of it."""
    breaks = Breaks(resets=resets, real=real)
    return dispatch.explain(ScanCall(x=x, dt=dt, A=A, B=B, C=C, D=D, state=state, breaks=breaks, **options), backend)


def _written(result: tuple[Tensor, Tensor], into: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result of a backend, the state in ``into`` if that was asked for."""
    if into is None or result[1] is into:
        return result
    return result[0], into.copy_(result[1].detach())


def _without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Inside a scan everything is fp32 at least; autocast would run its products in 16 bits."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


__all__ = [
    "Breaks",
    "ConvCall",
    "SSDCall",
    "ScanCall",
    "StepCall",
    "causal_conv",
    "conv_dispatch",
    "dispatch",
    "explain",
    "mamba_step",
    "selective_scan",
    "ssd_dispatch",
    "ssd_scan",
    "step_dispatch",
]

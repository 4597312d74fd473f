"""What a freshly compiled library must get right before anybody uses it: a few awkward calls against the reference."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from phylon.ops.attention.bias import AlibiBias
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.reference import Reference
from phylon.ops.dispatch import Backend
from phylon.patterns import Causal, Full, Strided, SymmetricWindow, Window

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def check(backend: Backend[AttentionCall]) -> str | None:
    """``None``, or what differs from the reference."""
    for dtype, limit in _LIMITS.items():
        for call in _calls(dtype):
            ours, theirs = _both_ways(backend, call), _both_ways(Reference(), _widened(call))
            for name, mine, other in zip(("output", "dq", "dk", "dv", "d_sink", "d_bias"), ours, theirs):  # noqa: B905
                error = float((mine.float() - other).norm() / other.norm())
                if not error <= limit:
                    t, s = call.q.shape[1], call.k.shape[1]
                    return f"{name} of {call.pattern} on {t} x {s} in {str(dtype)[6:]} is off by {error:.1e}"
            with torch.no_grad():
                few = replace(call, q=call.q[:, -2:])
                error = float((backend.run(few).float() - Reference().run(_widened(few))).norm())
                if not error <= limit * float(ours[0][:, -2:].float().norm()):
                    return f"the last queries alone are off by {error:.1e}"
    return None


def _calls(dtype: torch.dtype) -> Iterator[AttentionCall]:
    """Calls whose gradients are those of q, k, v, and of sink and slopes where there are such."""
    generator = torch.Generator().manual_seed(0)
    for t, s, e, ev, h, n_kv in ((2, 7, 8, 8, 2, 2), (100, 130, 32, 40, 2, 1), (130, 130, 64, 64, 1, 1)):
        q, k, v = (
            torch.randn(2, n, heads, width, generator=generator).to(dtype).requires_grad_()
            for n, heads, width in ((t, h, e), (s, n_kv, e), (s, n_kv, ev))
        )
        for pattern in (Full(), Causal(), Window(size=70)):
            yield AttentionCall(q=q, k=k, v=v, pattern=pattern)
    # All else at once, over tiles that are whole, cut and empty.
    q, k, v, sink, slopes = (
        torch.randn(*shape, generator=generator).to(kind).requires_grad_()
        for shape, kind in (((1, 200, 2, 16), dtype),) * 3 + (((2,), torch.float32),) * 2
    )
    pattern = SymmetricWindow(radius=20) | (Window(size=130) & Strided(stride=3))
    rest = {"softcap": 3.0, "sink": sink, "bias": AlibiBias(slopes)}
    yield AttentionCall(q=q, k=k, v=v, pattern=pattern, dropout=0.1, seed=5, **rest)
    yield AttentionCall(q=q, k=k, v=v, pattern=pattern, **rest)


def _widened(call: AttentionCall) -> AttentionCall:
    q, k, v = (x.detach().float().requires_grad_() for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


def _both_ways(backend: Backend[AttentionCall], call: AttentionCall) -> list[Tensor]:
    out = backend.run(call)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    slopes = call.bias.slopes if isinstance(call.bias, AlibiBias) else None
    leaves = [x for x in (call.q, call.k, call.v, call.sink, slopes) if x is not None]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

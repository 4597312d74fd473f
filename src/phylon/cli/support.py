"""The support matrix: every backend asked about every kind of call, with its own reasons."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import phylon.ops
from phylon.ops.attention import AlibiBias, AttentionCall, BucketBias
from phylon.ops.dispatch import Dispatch, note_of
from phylon.ops.experts import ExpertCall, ExpertWeights
from phylon.ops.feedforward import FeedForwardCall
from phylon.ops.linear import LinearCall
from phylon.ops.norm import NormCall
from phylon.ops.rotary import RotaryCall
from phylon.ops.scan import Breaks, ConvCall, ScanCall, SSDCall, StepCall
from phylon.ops.scores import ScoresCall
from phylon.patterns import BigBird, Causal, Full, Global, Prefix, Records, Strided, SymmetricWindow, Window

_device = "cpu"
"""Where the calls lie that backends are asked about; on a GPU they are tensors without numbers, which need none."""


class _OwnBias:
    """A score bias that only its owner knows."""

    n_heads = 1

    def scores(self, query: Records, key: Records) -> Tensor:
        return (query.positions - key.positions).to(torch.float32)


def _attention(**changes: Any) -> AttentionCall:
    n, dtype = changes.pop("n", 4), changes.pop("dtype", torch.float32)
    q = torch.zeros(1, n, 4, 8, dtype=dtype, device=_device)
    k = q.new_zeros(1, n, changes.pop("kv_heads", 4), 8)
    v = q.new_zeros(1, n, k.shape[2], changes.pop("value_width", 8))
    plain: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "pattern": Causal(),
        "query": None,
        "key": None,
        "bias": None,
        "scale": 1.0,
        "softcap": None,
        "sink": None,
        "dropout": 0.0,
        "seed": 0,
        "tap": None,
    }
    return AttentionCall(**(plain | changes))


def _marked() -> dict[str, Records]:
    records = Records(torch.arange(4)[None], marks=torch.tensor([[1, 0, 0, 0]]))
    return {"query": records, "key": records}


def _packed() -> Records:
    return Records(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[1, 1, 2, 2]]))


def _rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(256, 64, dtype=dtype)


def _map(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(64, 64, dtype=dtype, requires_grad=True)


def _experts(**changes: Any) -> ExpertCall:
    maps = torch.zeros(2, 64, 64)
    chosen = torch.zeros(256, 1, dtype=torch.int64)
    weights = ExpertWeights(up=maps, down=maps, up_bias=changes.pop("bias", None))
    return ExpertCall(x=_rows(), chosen=chosen, gates=torch.ones(256, 1), weights=weights, **changes)


def _scan(dtype: torch.dtype = torch.float32, size: int = 16, **breaks: Any) -> ScanCall:
    x = torch.zeros(1, 8, 64, dtype=dtype, device=_device)
    maps, A = x.new_zeros(1, 8, size), x.new_zeros(64, size)
    return ScanCall(x=x, dt=x, A=A, B=maps, C=maps, D=x.new_zeros(64), state=None, breaks=Breaks(**breaks))


def _ssd(dtype: torch.dtype = torch.float32, **breaks: Any) -> SSDCall:
    x = torch.zeros(1, 8, 4, 16, dtype=dtype, device=_device)
    dt, maps, A = x[..., 0], x.new_zeros(1, 8, 1, 16), x.new_zeros(4)
    return SSDCall(x=x, dt=dt, A=A, B=maps, C=maps, D=A, state=None, breaks=Breaks(**breaks))


def _conv(dtype: torch.dtype = torch.float32, activation: str = "silu", **breaks: Any) -> ConvCall:
    x = torch.zeros(1, 8, 64, dtype=dtype, device=_device)
    weight = x.new_zeros(64, 4)
    return ConvCall(x=x, weight=weight, bias=None, tail=None, activation=activation, breaks=Breaks(**breaks))


def _step(dtype: torch.dtype = torch.float32, learns: bool = False) -> StepCall:
    x = torch.zeros(1, 1, 64, dtype=dtype, device=_device, requires_grad=learns)
    conv, x_proj, dt_proj, one = x.new_zeros(64, 4), x.new_zeros(36, 64), x.new_zeros(64, 4), x.new_zeros(64)
    tail, state, A = x.new_zeros(1, 3, 64), torch.zeros(1, 64, 16, device=_device), x.new_zeros(64, 16)
    own = {"conv_weight": conv, "conv_bias": None, "x_proj": x_proj, "dt_proj": dt_proj, "dt_bias": one, "D": one}
    return StepCall(x=x, z=x, A_log=A, tail=tail, state=state, new_tail=tail, new_state=state, **own)  # type: ignore[arg-type]


def _starts() -> dict[str, Any]:
    """What says where documents start and what is padding."""
    return {name: torch.ones(1, 8, dtype=torch.bool, device=_device) for name in ("resets", "real")}


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

CALLS: dict[str, dict[str, Callable[[], Any]]] = {
    "attention": {
        "causal": lambda: _attention(),
        "everything visible": lambda: _attention(pattern=Full()),
        "causal window": lambda: _attention(pattern=Window(size=2)),
        "symmetric window": lambda: _attention(pattern=SymmetricWindow(radius=1)),
        "banded and strided (Sparse Transformer)": lambda: _attention(pattern=Window(size=2) | Strided(stride=2)),
        "global and window (Longformer)": lambda: _attention(pattern=SymmetricWindow(radius=1) | Global(), **_marked()),
        "prefix": lambda: _attention(pattern=Causal() | Prefix(), **_marked()),
        "random blocks, per head (BigBird)": lambda: _attention(pattern=BigBird(block=2, n_heads=4)),
        "any of these on 16,384 tokens": lambda: _attention(n=16384, pattern=SymmetricWindow(radius=1)),
        "padding or packed documents": lambda: _attention(query=_packed(), key=_packed()),
        "grouped heads (K < H)": lambda: _attention(kv_heads=2),
        "values of another width (MLA)": lambda: _attention(value_width=4),
        "bfloat16": lambda: _attention(dtype=torch.bfloat16),
        "float64": lambda: _attention(dtype=torch.float64),
        "ALiBi": lambda: _attention(bias=AlibiBias(torch.zeros(4))),
        "T5's buckets, with a gradient": lambda: _attention(
            bias=BucketBias(torch.zeros(8, 4, requires_grad=True), 16, True)
        ),
        "a score bias of one's own": lambda: _attention(bias=_OwnBias()),
        "softcap": lambda: _attention(softcap=30.0),
        "attention sink": lambda: _attention(sink=torch.zeros(4)),
        "dropout": lambda: _attention(dropout=0.1),
        "recorded scores and weights": lambda: _attention(tap=lambda name, value: value),
    },
    "experts": {
        "plain": lambda: _experts(),
        "biases": lambda: _experts(bias=torch.zeros(2, 64)),
        "dropout": lambda: _experts(dropout=0.1),
    },
    "feedforward": {
        "float32": lambda: FeedForwardCall(_rows(), (_map(), None), (_map(), None), None, "gelu"),
        "gated": lambda: FeedForwardCall(_rows(), (_map(), None), (_map(), None), (_map(), None), "silu"),
    },
    "linear": {
        "float32, with gradients": lambda: LinearCall(_rows(), (_map(),), (None,)),
        "float16": lambda: LinearCall(_rows(torch.float16), (_map(torch.float16),), (None,)),
    },
    "norm": {
        "float32": lambda: NormCall(x=_rows(), weight=None, eps=1e-5, centred=True),
        "float64": lambda: NormCall(x=_rows(torch.float64), weight=None, eps=1e-5, centred=True),
    },
    "scan": {
        **{name: partial(_scan, dtype) for name, dtype in _DTYPES.items()},
        "padding or packed documents": lambda: _scan(**_starts()),
        "512 numbers of state a channel": lambda: _scan(size=512),
    },
    "ssd": {
        **{name: partial(_ssd, dtype) for name, dtype in _DTYPES.items()},
        "padding or packed documents": lambda: _ssd(**_starts()),
    },
    "conv": {
        **{name: partial(_conv, dtype) for name, dtype in _DTYPES.items()},
        "padding or packed documents": lambda: _conv(**_starts()),
        "another activation, or none": lambda: _conv(activation="gelu"),
    },
    "step": {
        **{name: partial(_step, dtype) for name, dtype in _DTYPES.items()},
        "with gradients": lambda: _step(learns=True),
    },
    "rotary": {"float32": lambda: RotaryCall(_rows().view(4, 8, 8, 64), *[torch.zeros(1, 8, 1, 32)] * 2)},
    "scores": {
        "float32": lambda: ScoresCall(scores=_rows(), targets=torch.zeros(256, dtype=torch.int64)),
        "float64": lambda: ScoresCall(scores=_rows(torch.float64), targets=torch.zeros(256, dtype=torch.int64)),
    },
}
"""By op: a call of every kind, by the words for it."""


def dispatches() -> Iterator[Dispatch[Any]]:
    """Every dispatch that a package below ``phylon.ops`` holds, once."""
    found: dict[str, Dispatch[Any]] = {}
    for info in pkgutil.iter_modules(phylon.ops.__path__, f"{phylon.ops.__name__}."):
        values = vars(importlib.import_module(info.name)).values()
        found |= {value.op: value for value in values if isinstance(value, Dispatch)}
    yield from found.values()


def matrix() -> list[dict[str, Any]]:
    """A row a backend: ``calls`` maps the words for a call to ``None`` (supported) or the reason for refusing it.

    ``device`` is the one that it is asked about, "cuda" where it is for GPUs alone.
    """
    return [
        {
            "op": dispatch.op,
            "backend": backend.name,
            "device": getattr(backend, "device", "cpu"),
            "unavailable": backend.available(),
            "note": note_of(backend),
            "calls": _asked(dispatch.op, backend),
        }
        for dispatch in dispatches()
        for backend in dispatch.backends.values()
    ]


def _asked(op: str, backend: Any) -> dict[str, str | None]:
    global _device
    _device = getattr(backend, "device", "cpu")
    try:
        with nullcontext() if _device == "cpu" else _without_numbers():
            return {words: backend.supports(make()) for words, make in CALLS.get(op, {}).items()}
    finally:
        _device = "cpu"


def _without_numbers() -> AbstractContextManager[object]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import

    return FakeTensorMode()

"""The support matrix: every backend asked about every kind of call, with its own reasons."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import phylon.ops
from phylon.ops.attention.call import AttentionCall
from phylon.ops.dispatch import Dispatch
from phylon.ops.experts import ExpertCall, ExpertWeights
from phylon.ops.feedforward import FeedForwardCall
from phylon.ops.linear import LinearCall
from phylon.ops.norm import NormCall
from phylon.ops.rotary import RotaryCall
from phylon.ops.scores import ScoresCall
from phylon.patterns import Causal, Full, Records, SymmetricWindow, Window


class _NoBias:
    """A score bias of the plainest kind."""

    def scores(self, query: Records, key: Records) -> Tensor:
        return (query.positions - key.positions).to(torch.float32)


def _attention(**changes: Any) -> AttentionCall:
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, changes.pop("kv_heads", 4), 8)
    plain: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": k,
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


CALLS: dict[str, dict[str, Callable[[], Any]]] = {
    "attention": {
        "causal": lambda: _attention(),
        "everything visible": lambda: _attention(pattern=Full()),
        "causal window": lambda: _attention(pattern=Window(size=2)),
        "any other pattern": lambda: _attention(pattern=SymmetricWindow(radius=1)),
        "padding or packed documents": lambda: _attention(query=_packed(), key=_packed()),
        "grouped heads (K < H)": lambda: _attention(kv_heads=2),
        "score bias": lambda: _attention(bias=_NoBias()),
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
    """A row a backend: ``calls`` maps the words for a call to ``None`` (supported) or the reason for refusing it."""
    return [
        {
            "op": dispatch.op,
            "backend": backend.name,
            "unavailable": backend.available(),
            "calls": {words: backend.supports(make()) for words, make in CALLS.get(dispatch.op, {}).items()},
        }
        for dispatch in dispatches()
        for backend in dispatch.backends.values()
    ]

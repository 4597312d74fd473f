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

"""Tiles of a score bias, and the gradient that comes back to its parameters tile by tile."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall, ScoreBias
from phylon.patterns import Records


def parameters(bias: ScoreBias | None) -> dict[str, Tensor]:
    """The tensors of a bias that take a gradient, by attribute."""
    fields = {} if bias is None else vars(bias)
    return {name: value for name, value in fields.items() if isinstance(value, Tensor) and value.requires_grad}


def hides_parameters(bias: ScoreBias) -> bool:
    """Whether the bias depends on a parameter that is none of its attributes, whose gradient would be lost."""
    if isinstance(bias, AlibiBias | BucketBias) or not torch.is_grad_enabled() or parameters(bias):
        return False
    one = Records(torch.zeros(1, 1, dtype=torch.int64))
    return bias.scores(one.as_queries(), one.as_keys()).requires_grad


class TileBias:
    """The bias of a call in tiles, with fresh copies of its parameters, whose gradients it gathers.

    Where the bias depends on the distance alone and positions follow each other, all of it is a strip (H, T + S - 1)
    from which every tile is cut; otherwise each tile is computed from the records.
    """

    def __init__(self, call: AttentionCall) -> None:
        assert call.bias is not None
        self.tensors = {name: value.detach().requires_grad_() for name, value in parameters(call.bias).items()}
        bias: Any = copy.copy(call.bias)
        self.bias = bias
        for name, value in self.tensors.items():
            object.__setattr__(bias, name, value)
        self.sides = call.records()
        self.wide = torch.promote_types(call.q.dtype, torch.float32)
        self.n_queries = call.q.shape[1]
        self.grads = [torch.zeros_like(value) for value in self.tensors.values()]
        self.strip: Tensor | None = None
        if isinstance(call.bias, AlibiBias | BucketBias) and call.query is None and call.key is None:
            # Column c: keys c - (T - 1) indices after the query; the last query stands at the last key.
            n_keys, t = call.k.shape[1], self.n_queries
            distance = n_keys - 1 - torch.arange(n_keys + t - 1, device=call.q.device)
            with torch.enable_grad():
                self.strip = bias.by_distance(distance).to(self.wide)
            self.strip_grad = torch.zeros_like(self.strip, requires_grad=False)

    def tile(self, rows: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """(rows or 1, heads, queries, keys) in at least fp32, without a graph."""
        if self.strip is None:
            with torch.no_grad():
                return self._computed(rows, heads, queries, keys)
        # Row w of the windows is the query w places before the last one of the tile.
        cut = self.strip.detach()[heads, self._columns(queries, keys)]
        return cut.unfold(1, keys.stop - keys.start, 1).flip(1)[None]

    def add_grad(self, rows: slice, heads: slice, queries: slice, keys: slice, grad: Tensor) -> None:
        """Take in the gradient (rows, heads, queries, keys) of a tile."""
        if not self.tensors:
            return
        if self.strip is None:
            with torch.enable_grad():
                tile = self._computed(rows, heads, queries, keys)
            summed = grad if tile.shape[0] == grad.shape[0] else grad.sum(0, keepdim=True)
            self._add(torch.autograd.grad(tile, list(self.tensors.values()), summed, allow_unused=True))
            return
        # Sums along the diagonals: rows one longer than they are read shift against each other by one.
        summed, n = grad.sum(0).flip(1), queries.stop - queries.start
        width = n + keys.stop - keys.start
        shifted = F.pad(summed, (0, n)).flatten(1)[:, : n * (width - 1)].unflatten(1, (n, width - 1))
        self.strip_grad[heads, self._columns(queries, keys)] += shifted.sum(1)

    def finish(self) -> list[Tensor]:
        """The gradients of the parameters, in the order of ``parameters``."""
        if self.strip is not None and self.tensors:
            self._add(torch.autograd.grad(self.strip, list(self.tensors.values()), self.strip_grad, allow_unused=True))
        return self.grads

    def _add(self, grads: tuple[Tensor | None, ...]) -> None:
        for total, grad in zip(self.grads, grads, strict=True):
            if grad is not None:
                total += grad

    def _columns(self, queries: slice, keys: slice) -> slice:
        start = keys.start + self.n_queries - queries.stop
        return slice(start, start + (keys.stop - keys.start) + (queries.stop - queries.start) - 1)

    def _computed(self, rows: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        query, key = (
            side.map(lambda field, part=part: (field[rows] if len(field) > 1 else field)[:, part])
            for side, part in zip(self.sides, (queries, keys), strict=True)
        )
        sliced = isinstance(self.bias, AlibiBias | BucketBias)
        bias = self.bias.heads(heads) if sliced else self.bias
        scores = bias.scores(query.as_queries(), key.as_keys())
        scores = scores if scores.ndim == 4 else scores[None]
        return (scores if sliced or scores.shape[1] == 1 else scores[:, heads]).to(self.wide)

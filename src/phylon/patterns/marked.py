"""Patterns over the marks that come with the tokens: global tokens and bidirectional prefixes."""

import torch
from torch import Tensor

from phylon.patterns.base import Pattern, Records, everything
from phylon.patterns.bounds import Bounds, Span, Tiles
from phylon.spec.base import Mechanism
from phylon.spec.registry import register


class Global(Mechanism, Pattern, frozen=True, kw_only=True):
    """Tokens marked ``mark`` see all and are seen by all.

    Longformer, Beltagy et al. (arXiv:2004.05150), section 3.1: ``SymmetricWindow(radius=w // 2) | Global()``; causal,
    ``Window(size=w) | (Global() & Causal())``. ``marks`` (B, T) come with the tokens; without any nobody is global.
    Cost: 2 n g scores for g global tokens, counted in whole tiles, so that they are cheapest side by side.
    """

    mark: int = 1

    def allowed(self, query: Records, key: Records) -> Tensor:
        return _marked(query, self.mark) | _marked(key, self.mark)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k = _span(query.marks, key), _span(key.marks, key)
        return Tiles(q.meets(self.mark) | k.meets(self.mark), q.is_all(self.mark) | k.is_all(self.mark))

    @property
    def streams(self) -> bool:
        return False


class Prefix(Mechanism, Pattern, frozen=True, kw_only=True):
    """Everybody sees the tokens marked ``mark``: ``Causal() | Prefix()`` is the prefix language model.

    UniLM (arXiv:1905.03197), section 2.3, sequence to sequence; T5 (arXiv:1910.10683), section 3.2.1. Each row marks
    its own prefix with ``marks`` (B, T); without any the model is causal. Cost: n p scores for a prefix of p tokens.
    """

    mark: int = 1

    def allowed(self, query: Records, key: Records) -> Tensor:
        return _marked(key, self.mark) & everything(query, key)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        k = _span(key.marks, key)
        return Tiles(k.meets(self.mark), k.is_all(self.mark))

    @property
    def streams(self) -> bool:
        return False


def _marked(side: Records, mark: int) -> Tensor:
    marks = torch.zeros_like(side.positions) if side.marks is None else side.marks
    return marks == mark


def _span(marks: Span | None, like: Bounds) -> Span:
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=like.positions.low.device)
    return Span(zero, zero) if marks is None else marks


register(Global, paper="arXiv:2004.05150 §3.1", cases=lambda: [Global()])
register(Prefix, paper="arXiv:1905.03197 §2.3", cases=lambda: [Prefix()])

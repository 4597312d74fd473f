"""Pools: one vector a document, so that packed equals alone."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.part import Part
from phylon.patterns import Records
from phylon.spec.base import Mechanism, Pool
from phylon.spec.registry import register


class First(Mechanism, Pool, frozen=True, kw_only=True):
    """The first token's vector ([CLS]). BERT (arXiv:1810.04805), section 3. hidden (B, T, D) to (documents, D)."""


class Last(Mechanism, Pool, frozen=True, kw_only=True):
    """The last real token's vector, found by position, never by an id. GPT (Radford et al. 2018), section 3.3."""


class Mean(Mechanism, Pool, frozen=True, kw_only=True):
    """The mean over all real tokens. Sentence-BERT (arXiv:1908.10084), section 3."""


def documents(records: Records, batch_size: int) -> tuple[Tensor, int]:
    """The document of every token (B, T), counted over the batch row by row in order of appearance; -1 is padding."""
    length = records.positions.shape[1]
    if records.segments is None:
        rows = torch.arange(batch_size, device=records.positions.device)
        return rows[:, None].expand(batch_size, length), batch_size
    segments = records.segments.expand(batch_size, length)
    real = segments != 0
    # A document starts where a real token's id differs from that of the real token before it.
    index = torch.arange(length, device=segments.device).expand_as(segments)
    seen = torch.where(real, index, -1).cummax(1).values
    before = torch.cat([seen.new_full((batch_size, 1), -1), seen[:, :-1]], dim=1)
    starts = real & ((before < 0) | (segments.gather(1, before.clamp(min=0)) != segments))
    number = starts.flatten().cumsum(0).view_as(segments) - 1
    return torch.where(real, number, -1), int(starts.sum())


class _PoolModule(Part):
    """``forward(hidden (B, T, D))`` gives (documents, D), rows first, in order of appearance."""

    def __init__(self, spec: Pool) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        number, count = ctx.memo("documents", lambda: documents(ctx.records, len(hidden)))
        return self.pooled(hidden.flatten(0, 1), number.flatten(), count)

    def pooled(self, hidden: Tensor, number: Tensor, count: int) -> Tensor:
        raise NotImplementedError


class _PickModule(_PoolModule):
    reduce = "amin"

    def pooled(self, hidden: Tensor, number: Tensor, count: int) -> Tensor:
        index = torch.arange(len(number), device=number.device)
        start = number.new_full((count + 1,), len(number) if self.reduce == "amin" else -1)
        # Padding (-1) falls into the extra place at the end.
        return hidden[start.scatter_reduce(0, number % (count + 1), index, self.reduce)[:count]]


class FirstModule(_PickModule):
    reduce = "amin"


class LastModule(_PickModule):
    reduce = "amax"


class MeanModule(_PoolModule):
    def pooled(self, hidden: Tensor, number: Tensor, count: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        real = (number >= 0)[:, None]
        total = hidden.new_zeros(count + 1, hidden.shape[-1], dtype=wide)
        total = total.index_add(0, number % (count + 1), torch.where(real, hidden, 0).to(wide))
        n_tokens = number.new_zeros(count + 1).index_add(0, number % (count + 1), torch.ones_like(number))
        return (total / n_tokens[:, None].clamp(min=1))[:count].to(hidden.dtype)


register(First, module=FirstModule, paper="arXiv:1810.04805 §3", cases=lambda: [First()])
register(Last, module=LastModule, paper="Radford et al. 2018 §3.3", cases=lambda: [Last()])
register(Mean, module=MeanModule, paper="arXiv:1908.10084 §3", cases=lambda: [Mean()])

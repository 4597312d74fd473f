"""Structured score biases: a few numbers and a rule, from which every tile of the bias can be made."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phylon.patterns import Records
from phylon.spec.errors import UserError


@dataclass(frozen=True)
class AlibiBias:
    """``-slope_h * |query - key|``. Press, Smith and Lewis (arXiv:2108.12409), section 3. ``slopes`` (H,)."""

    slopes: Tensor

    reach: ClassVar[None] = None
    """The distance beyond which nothing changes: none."""

    def __post_init__(self) -> None:
        if self.slopes.ndim != 1:
            raise UserError(f"ALiBi slopes are (heads,), got {tuple(self.slopes.shape)}")

    @property
    def n_heads(self) -> int:
        return len(self.slopes)

    def scores(self, query: Records, key: Records) -> Tensor:
        return -self.slopes[:, None, None] * (query.positions - key.positions).abs()

    def by_distance(self, distance: Tensor) -> Tensor:
        """(H, n): the bias of every ``query - key`` in ``distance`` (n,)."""
        return -self.slopes[:, None] * distance.abs()

    def heads(self, part: slice) -> "AlibiBias":
        """The bias of some of the heads."""
        return AlibiBias(self.slopes[part])

    def spread(self, n: int) -> "AlibiBias":
        """The bias of one head for each of ``n``."""
        return AlibiBias(_wide(self.slopes).expand(n))


@dataclass(frozen=True)
class BucketBias:
    """A learned number per head and bucket of distance. T5 (arXiv:1910.10683), section 2.1.

    ``table`` (n_buckets, H). Half of the buckets are exact distances, the other half grow logarithmically up to
    ``max_distance``; ``both_sides`` gives earlier and later keys buckets of their own.
    """

    table: Tensor
    max_distance: int
    both_sides: bool

    def __post_init__(self) -> None:
        least = 4 if self.both_sides else 2
        if self.table.ndim != 2 or len(self.table) < least:
            raise UserError(f"a bucket table is ({least} or more buckets, heads), got {tuple(self.table.shape)}")
        exact = len(self.table) // least
        if self.max_distance <= exact:
            raise UserError(f"max_distance must be above the {exact} exact distances, got {self.max_distance}")

    @property
    def n_heads(self) -> int:
        return self.table.shape[1]

    @property
    def reach(self) -> int:
        """The distance beyond which nothing changes: past ``max_distance``, wherever fp32 rounds the last edge to."""
        return 2 * self.max_distance

    def scores(self, query: Records, key: Records) -> Tensor:
        buckets = self.buckets(key.positions - query.positions)
        return self.table[buckets.squeeze(1)].permute(0, 3, 1, 2)

    def by_distance(self, distance: Tensor) -> Tensor:
        """(H, n): the bias of every ``query - key`` in ``distance`` (n,)."""
        return self.table[self.buckets(-distance)].T

    def heads(self, part: slice) -> "BucketBias":
        """The bias of some of the heads."""
        return BucketBias(self.table[:, part], self.max_distance, self.both_sides)

    def spread(self, n: int) -> "BucketBias":
        """The bias of one head for each of ``n``."""
        return BucketBias(_wide(self.table).expand(-1, n), self.max_distance, self.both_sides)

    def buckets(self, relative: Tensor) -> Tensor:
        """The bucket of ``key - query``, of any shape."""
        n_buckets = len(self.table)
        offset = torch.zeros_like(relative, dtype=torch.int64)
        if self.both_sides:
            n_buckets //= 2
            offset = (relative > 0).to(torch.int64) * n_buckets
            distance = relative.abs()
        else:
            distance = (-relative).clamp(min=0)
        exact = n_buckets // 2
        # In fp32, as released: the edges of the buckets are where that rounds to.
        grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (grown * (n_buckets - exact)).to(torch.int64)).clamp(max=n_buckets - 1)
        return offset + torch.where(distance < exact, distance.to(torch.int64), far)


def _wide(x: Tensor) -> Tensor:
    """In at least fp32: what many heads give back is added before it is rounded."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

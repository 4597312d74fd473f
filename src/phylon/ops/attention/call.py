"""The one description of an attention call that every backend reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.patterns import Document, Full, Pattern, Records, aligned, measured
from phylon.spec.errors import UserError, check_finite, check_rate


class ScoreBias(Protocol):
    """A structured bias on the scores, added after the scale; never a stored T x S tensor."""

    @property
    def n_heads(self) -> int:
        """The query heads H it is for, or 1 for any number."""
        ...

    def scores(self, query: Records, key: Records) -> Tensor:
        """(B or 1, H, T, S) from records that broadcast, (B or 1, 1, T, 1) and (B or 1, 1, 1, S)."""
        ...


@dataclass(kw_only=True)
class AttentionCall:
    """``q`` (B, T, H, E), ``k`` (B, S, K, E), ``v`` (B, S, K, Ev) with H a multiple of K.

    ``query`` and ``key`` are the records of both sides; ``None`` means one document, aligned bottom-right.
    ``sink`` (H,) is an extra logit per head that takes weight and gives nothing. ``seed`` drives the dropout mask.
    ``tap`` receives ``scores`` and ``weights`` (B, H, T, S) on the reference backend.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern = field(default_factory=Full)
    query: Records | None = None
    key: Records | None = None
    bias: ScoreBias | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    tap: Callable[[str, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if not (q.ndim == k.ndim == v.ndim == 4):
            raise UserError(f"attention takes (B, T, H, E) tensors, got {q.ndim}, {k.ndim} and {v.ndim} dimensions")
        if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise UserError(f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
        if q.shape[3] == 0:
            raise UserError("attention needs heads of at least one number, got a width of 0")
        if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
            raise UserError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key heads")
        if not (q.dtype == k.dtype == v.dtype):
            raise UserError(f"attention dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}")
        if not q.dtype.is_floating_point:
            raise UserError(f"attention computes floating point numbers, got {q.dtype}")
        if not (q.device == k.device == v.device):
            raise UserError(f"attention tensors are on different devices: q {q.device}, k {k.device}, v {v.device}")
        for name, side, length in (("query", self.query, q.shape[1]), ("key", self.key, k.shape[1])):
            if side is not None:
                _check_records(name, side, len(q), length)
        check_finite("scale", self.scale)
        check_finite("softcap", self.softcap, above=0)
        if self.bias is not None and self.bias.n_heads not in (1, q.shape[2]):
            raise UserError(f"the bias is for {self.bias.n_heads} heads, the call has {q.shape[2]}")
        if isinstance(self.bias, AlibiBias | BucketBias) and self.bias.n_heads < q.shape[2]:
            self.bias = self.bias.spread(q.shape[2])  # kernels read a parameter by its head
        if self.sink is not None and self.sink.shape != q.shape[2:3]:
            raise UserError(f"sink must be ({q.shape[2]},), one a head, got {tuple(self.sink.shape)}")
        if self.pattern.heads not in (1, q.shape[2]):
            raise UserError(f"the pattern is for {self.pattern.heads} heads, the call has {q.shape[2]}")
        check_rate("dropout", self.dropout)

    @property
    def factor(self) -> float:
        """What scores are multiplied by: ``scale``, or ``E ** -0.5``."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def segmented(self) -> bool:
        """Whether padding or several documents may be present."""
        return any(side is not None and side.segments is not None for side in (self.query, self.key))

    def records(self) -> tuple[Records, Records]:
        """The records of queries and keys, made where none are given, with lengths where the pattern needs them."""
        made = aligned(self.q.shape[1], self.k.shape[1], self.q.device)
        query, key = self.query or made[0], self.key or made[1]
        return measured(query, key) if self.pattern.needs_lengths else (query, key)

    @property
    def visible(self) -> Pattern:
        """The pattern, within documents where there may be several."""
        return self.pattern & Document() if self.segmented else self.pattern

    def mask(self) -> Tensor | None:
        """Boolean (B or 1, H or 1, T, S) of what may be seen, or ``None`` when everything may."""
        if isinstance(self.pattern, Full) and not self.segmented:
            return None
        query, key = self.records()
        return self.visible.allowed(query.as_queries(), key.as_keys())

    def bias_scores(self) -> Tensor | None:
        """The score bias (B or 1, H, T, S), or ``None``."""
        if self.bias is None:
            return None
        query, key = self.records()
        return self.bias.scores(query.as_queries(), key.as_keys())


def _check_records(name: str, side: Records, batch: int, length: int) -> None:
    """Kernels read every field by row and token. A call of no rows is how a backend keeps the rest of one."""
    for found in (side.positions, side.segments, side.marks, side.lengths):
        if found is not None and found.shape[1:] != (length,):
            raise UserError(f"{name} records of {found.shape[-1]} tokens do not fit {length} of the tensor")
        if found is not None and batch and len(found) not in (1, batch):
            raise UserError(f"{name} records of {len(found)} rows do not fit {batch} of the tensor")

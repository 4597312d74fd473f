"""What a forward pass carries beside the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from phylon.layers.state import Chunk, State
from phylon.patterns import Records

T = TypeVar("T")


class Taps(Protocol):
    """A recorder of intermediate tensors (``phylon.record``)."""

    def wants(self, path: str) -> bool: ...

    def __call__(self, path: str, value: Tensor) -> Tensor: ...


@dataclass(kw_only=True)
class Context:
    """Typed forward context.

    ``records``: positions (B or 1, T), segments and marks of this call's tokens. ``aligned``: all rows are one document
    without padding that continues the state, so that kernels may align bottom-right and need no mask from records.
    ``memory`` (B, S, D) is the encoder's output with its records. ``embedded`` (B, T, D) is what the embedding gave.
    ``tables``: embeddings' weights as ``phylon.ops.embedding`` gives them to heads that share them.
    ``aux`` collects named auxiliary terms. ``last_only``: the call asks for the scores of last tokens at most.
    """

    records: Records
    aligned: bool
    batch_size: int = 1
    types: Tensor | None = None
    state: State | None = None
    chunk: Chunk | None = None
    memory: Tensor | None = None
    memory_records: Records | None = None
    embedded: Tensor | None = None
    tables: dict[Tensor, Tensor] = field(default_factory=dict)
    last_only: bool = False
    shared: Mapping[str, nn.Module] = field(default_factory=dict)
    taps: Taps | None = None
    aux: dict[str, Any] = field(default_factory=dict)
    _memo: dict[Any, Any] = field(default_factory=dict)

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """Compute once per forward pass what several blocks share (rotary tables)."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def last_real(self, values: Tensor) -> Tensor:
        """(B, 1, …): of ``values`` (B, T, …), those of each row's last real token."""
        segments = self.records.segments
        if segments is None:
            return values[:, -1:]
        index = torch.arange(values.shape[1], device=values.device)
        last = torch.where(segments != 0, index, -1).amax(1).clamp(min=0).expand(len(values))
        return values[torch.arange(len(values), device=values.device), last][:, None]

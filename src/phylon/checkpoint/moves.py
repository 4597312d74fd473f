"""What a layout does to one checkpoint: the moves of a load, and the walk over what is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from phylon.checkpoint.rules import Computed, Copied, Rule, Shape
from phylon.checkpoint.source import DTYPES, TensorSource

StoredDtypes = dict[str, tuple[torch.dtype, torch.dtype]]
"""By a tensor's name, ours or foreign: the dtype it was stored in, and the one it was loaded in."""


@dataclass(frozen=True)
class Move:
    """A rule with its placeholders filled in. ``foreign`` holds the names and shapes it asks for and writes."""

    rule: Rule
    ours: tuple[str, ...]
    foreign: tuple[tuple[str, Shape], ...]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class LoadPlan:
    """What `Layout.load` will do. ``dtypes``: how many tensors the checkpoint stores in each dtype."""

    moves: tuple[tuple[Move, tuple[str, ...]], ...]
    constants: tuple[tuple[str, float], ...]
    dropped: tuple[tuple[str, str], ...]
    dtypes: Mapping[str, int]


def stored_dtypes(plan: LoadPlan, source: TensorSource, params: Mapping[str, torch.Tensor]) -> StoredDtypes:
    """What to give back in another dtype than ``params`` have, once they are filled from ``source``."""
    known: StoredDtypes = {}
    for move, names in plan.moves:
        kinds = [DTYPES.get(source.tensors[name].dtype) for name in names]
        loaded = params[move.ours[0]].dtype
        if any(kind is None for kind in kinds) or set(kinds) <= {loaded}:
            continue
        plain = [kind for kind in kinds if kind is not None]
        known |= {name: (kind, loaded) for name, kind in zip(names, plain, strict=True)}
        known |= dict.fromkeys(move.ours, (reduce(torch.promote_types, plain), loaded))
    return known


def _as_stored(tensor: torch.Tensor, known: Sequence[tuple[torch.dtype, torch.dtype] | None]) -> torch.Tensor:
    """In the dtype it came from, unless it has been cast since or holds by now what that dtype cannot."""
    pairs = [pair for pair in known if pair is not None]
    if len(pairs) < len(known) or any(loaded != tensor.dtype for _, loaded in pairs):
        return tensor
    narrow = tensor.to(reduce(torch.promote_types, [stored for stored, _ in pairs]))
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


class Unmapped(Iterable[tuple[str, torch.Tensor]]):
    """Pairs ``(foreign name, tensor)``, made anew on every walk, so that a walk keeps one made tensor in memory."""

    def __init__(
        self,
        moves: Sequence[Move],
        ours: Mapping[str, torch.Tensor],
        computed: Sequence[Computed],
        copies: Sequence[Copied],
        stored: StoredDtypes,
        unread: Mapping[str, torch.Tensor],
        dropped: Sequence[str],
    ):
        self._moves, self._ours, self._computed, self._stored = moves, ours, computed, stored
        self._copies, self._unread = [rule for rule in copies if rule.ours in ours], unread
        self._dropped = dropped

    def __len__(self) -> int:
        one_each = (*self._computed, *self._copies, *self._dropped)
        return sum(len(move.foreign) for move in self._moves) + len(one_each)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for move in self._moves:
            tensors = [self._ours[name].detach() for name in move.ours]
            for which, (name, _) in enumerate(move.foreign):
                known = [self._stored.get(n) for n in ((name,) if name in self._stored else move.ours)]
                yield name, _as_stored(move.rule.give(tensors, which), known)
        for copy in self._copies:
            made = _as_stored(self._ours[copy.ours].detach(), [self._stored.get(copy.ours)])
            yield copy.theirs, self._own(copy.theirs, made)
        for rule in self._computed:
            yield rule.theirs, self._own(rule.theirs, rule.make())
        for name in self._dropped:
            yield name, self._unread[name]

    def names(self) -> frozenset[str]:
        """The foreign names; no tensor is made."""
        rules = (*self._copies, *self._computed)
        made = {name for move in self._moves for name, _ in move.foreign} | {rule.theirs for rule in rules}
        return frozenset(made | set(self._dropped))

    def _own(self, name: str, made: torch.Tensor) -> torch.Tensor:
        own = self._unread.get(name)
        return made if own is None or own.shape != made.shape else own

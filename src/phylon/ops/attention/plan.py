"""Which tiles of the scores a backend computes: the block map of a call, made without any T x S tensor.

A pattern tells from the bounds of two tiles whether they may hold a visible pair (``Pattern.tiles``). Tiles that hold
none are left out; of those that hold some but not all, the exact mask is kept, one bit a score. Where only distances
count, tiles at the same distance share a mask.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from phylon.ops.attention.call import AttentionCall
from phylon.ops.checks import check_int32
from phylon.patterns import Bounds, Pattern, Records, aligned, measured
from phylon.patterns.bounds import in_tiles
from phylon.patterns.mixing import mix

FULL = -1
"""Of ``masks``: every pair of the tile is visible."""
_EMPTY = -2
_GRID = 2**22
"""Tiles that are judged in one step."""
_SCORES = 2**18
"""Pairs that are judged in one step: their intermediate results stay in a CPU's cache."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """The kept tiles of (batch, heads) maps; ``batch`` and ``heads`` are 1 where all rows or heads share one.

    With nQ = ceil(T / block_q) and nK = ceil(S / block_k), row ``r = (b * heads + h) * nQ + i`` of the map keeps the
    tiles ``row_starts[r]`` to ``row_starts[r + 1]`` of ``key_tiles`` (int32, ascending): the key tile, and in ``masks``
    (int32) ``FULL`` or the index of its mask in ``bits``. ``bits`` (masks, block_q, block_k / 8) uint8: bit ``j % 8``
    of byte ``j // 8`` says whether the query may see key ``j`` of the tile; beyond T and S it is 0. A full tile at the
    end is full for the tokens that exist. ``columns`` is the same map by key tiles.
    """

    block_q: int
    block_k: int
    n_queries: int
    n_keys: int
    batch: int
    heads: int
    row_starts: Tensor
    key_tiles: Tensor
    masks: Tensor
    bits: Tensor

    @property
    def n_query_tiles(self) -> int:
        return -(-self.n_queries // self.block_q)

    @property
    def n_key_tiles(self) -> int:
        return -(-self.n_keys // self.block_k)

    @property
    def n_kept(self) -> int:
        """Tiles that are computed."""
        return len(self.key_tiles)

    @cached_property
    def row_of(self) -> Tensor:
        """The row of every kept tile, int64."""
        return torch.repeat_interleave(self.row_starts.diff().long())

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(column_starts, query_tiles, masks)``, int32: the map by columns ``c = (b * heads + h) * nK + j``."""
        map_, i = self.row_of // max(1, self.n_query_tiles), self.row_of % max(1, self.n_query_tiles)
        column = map_ * self.n_key_tiles + self.key_tiles
        order = torch.argsort(column, stable=True)
        counts = torch.bincount(column, minlength=self.batch * self.heads * self.n_key_tiles)
        return _starts(counts), i[order].int(), self.masks[order]

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """``row_starts``, ``key_tiles`` and ``masks`` as numbers, for loops in Python."""
        return self.row_starts.tolist(), self.key_tiles.tolist(), self.masks.tolist()

    @cached_property
    def unseen(self) -> Tensor | None:
        """(batch, heads, S) boolean: keys that no query sees, whose memory may hold anything; ``None`` for none."""
        tiles = self.row_of // max(1, self.n_query_tiles) * self.n_key_tiles + self.key_tiles
        return self._alone(tiles, self.n_key_tiles, self.block_k, self.n_keys, 1)

    @cached_property
    def blind(self) -> Tensor | None:
        """(batch, heads, T) boolean: queries that see no key, which may hold anything too; ``None`` for none."""
        return self._alone(self.row_of, self.n_query_tiles, self.block_q, self.n_queries, 2)

    def _alone(self, tiles: Tensor, n_tiles: int, block: int, n: int, over: int) -> Tensor | None:
        """Which of the ``n`` tokens of one side are in no visible pair; ``tiles`` are its tiles of the kept ones."""
        seen = torch.zeros(self.batch * self.heads * n_tiles, block, device=self.bits.device)
        full = self.masks == FULL
        seen[tiles[full]] = 1
        if len(self.bits):
            found = torch.cat([_unpack(part).any(over).to(seen.dtype) for part in self.bits.split(_step(self))])
            seen.index_add_(0, tiles[~full], found[self.masks[~full]])
        alone = seen.view(self.batch, self.heads, -1)[..., :n] == 0
        return alone if bool(alone.any()) else None

    def mask(self, index: int) -> Tensor:
        """One mask (block_q, block_k), boolean."""
        return _unpack(self.bits[index])

    def dense(self) -> Tensor:
        """(batch, heads, T, S) boolean: for tests and for the docs, never for a kernel."""
        grid = self.bits.new_zeros(
            (self.batch * self.heads * self.n_query_tiles * self.n_key_tiles, self.block_q, self.block_k)
        ).bool()
        place = self.row_of * self.n_key_tiles + self.key_tiles
        full = self.masks == FULL
        grid[place[full]] = True
        grid[place[~full]] = _unpack(self.bits)[self.masks[~full]]
        grid = grid.view(self.batch, self.heads, self.n_query_tiles, self.n_key_tiles, self.block_q, self.block_k)
        return grid.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., : self.n_queries, : self.n_keys]


def tile_plan(call: AttentionCall, block_q: int, block_k: int) -> TilePlan:
    """The block map of a call for tiles of ``block_q`` queries and ``block_k`` keys (a multiple of 8).

    Blocks of one forward pass hand in the same records, and find the plan that the first of them made.
    """
    assert block_k % 8 == 0, "masks are packed into bytes"
    assert block_q * block_k % 64 == 0, "and compared as words of 8 bytes"
    sizes = (call.q.shape[1], call.k.shape[1], block_q, block_k)
    query, key = call.query, call.key
    if query is None and key is None:
        return _aligned_plan(call.pattern, *sizes, call.q.device)
    holder = query or key
    assert holder is not None
    # The other side stays alive with the plan, so that its identity cannot be reused.
    name = ("tiles", call.visible, id(query), id(key), *sizes)
    other = None if key is holder else key
    plan, _ = holder.memo(name, lambda: (_plan(call.visible, *call.records(), block_q, block_k), other))
    return plan


def count_tiles(call: AttentionCall, block_q: int, block_k: int) -> int:
    """About how many tiles ``tile_plan`` would keep, from bounds alone."""
    holder = call.query or call.key
    if holder is None:
        return _aligned_count(call.pattern, call.q.shape[1], call.k.shape[1], block_q, block_k, call.q.device)
    name = ("count", call.visible, id(call.query), id(call.key), call.q.shape[1], call.k.shape[1], block_q, block_k)
    return holder.memo(name, lambda: _count(call.visible, *call.records(), block_q, block_k))


@lru_cache(maxsize=256)
def _aligned_count(pattern: Pattern, t: int, s: int, block_q: int, block_k: int, device: torch.device) -> int:
    query, key = aligned(t, s, device)
    return _count(pattern, *(measured(query, key) if pattern.needs_lengths else (query, key)), block_q, block_k)


def _count(pattern: Pattern, query: Records, key: Records, block_q: int, block_k: int) -> int:
    maps = (max(query.batch, key.batch), pattern.heads)
    return len(_candidates(pattern, Bounds.of(query, block_q), Bounds.of(key, block_k), maps)[0])


@lru_cache(maxsize=64)
def _aligned_plan(pattern: Pattern, t: int, s: int, block_q: int, block_k: int, device: torch.device) -> TilePlan:
    query, key = aligned(t, s, device)
    if pattern.needs_lengths:
        query, key = measured(query, key)
    grain = pattern.grain
    grain = grain if (block_q % grain, block_k % grain, (s - t) % grain) == (0, 0, 0) else 1
    return _plan(pattern, query, key, block_q, block_k, shared=pattern.relative, grain=grain)


def _plan(
    pattern: Pattern, query: Records, key: Records, block_q: int, block_k: int, *, shared: bool = False, grain: int = 1
) -> TilePlan:
    """``shared``: only distances count and positions are in order, so that masks repeat along diagonals; ``grain``: so
    many tokens side by side are alike."""
    maps = (max(query.batch, key.batch), pattern.heads)
    where, every = _candidates(pattern, Bounds.of(query, block_q), Bounds.of(key, block_k), maps)
    maker = _Masks(pattern, query, key, (block_q, block_k), grain)
    partial = ~every
    masks = torch.full((len(where),), FULL, dtype=torch.int64, device=where.device)
    bits, masks[partial] = (maker.by_distance if shared else maker.each)(where[partial])
    where, masks = where[masks != _EMPTY], masks[masks != _EMPTY]
    n_query_tiles = -(-query.positions.shape[1] // block_q)
    row = (where[:, 0] * maps[1] + where[:, 1]) * n_query_tiles + where[:, 2]
    return TilePlan(
        block_q=block_q,
        block_k=block_k,
        n_queries=query.positions.shape[1],
        n_keys=key.positions.shape[1],
        batch=maps[0],
        heads=maps[1],
        row_starts=_starts(torch.bincount(row, minlength=maps[0] * maps[1] * n_query_tiles)),
        key_tiles=where[:, 3].int(),
        masks=masks.int(),
        bits=bits,
    )


def _candidates(pattern: Pattern, query: Bounds, key: Bounds, maps: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``(b, h, i, j)`` (tiles, 4) of all tiles that may hold a visible pair, in order; whether each is surely full."""
    rows, columns = query.positions.low.shape[1], key.positions.low.shape[1]
    step = max(1, _GRID // max(1, maps[0] * maps[1] * columns))
    found, full = [], []
    for start in range(0, rows, step):
        part = query.rows(slice(start, start + step))
        shape = (*maps, part.positions.low.shape[1], columns)
        some, every = (answer.expand(shape) for answer in pattern.tiles(part.as_queries(), key.as_keys()))
        where = some.nonzero()
        full.append(every[tuple(where.unbind(1))])
        where[:, 2] += start
        found.append(where)
    where, every = torch.cat(found), torch.cat(full)
    if len(found) > 1:
        order = torch.argsort((where[:, 0] * maps[1] + where[:, 1]) * rows + where[:, 2], stable=True)
        where, every = where[order], every[order]
    return where, every


class _Masks:
    """The exact masks of given tiles."""

    def __init__(self, pattern: Pattern, query: Records, key: Records, blocks: tuple[int, int], grain: int) -> None:
        self.pattern, self.blocks, self.grain = pattern, blocks, grain
        self.sizes = (query.positions.shape[1], key.positions.shape[1])
        self.query, self.key = (
            _in_tiles(side, block).map(lambda field: field[..., ::grain])
            for side, block in zip((query, key), blocks, strict=True)
        )

    def by_distance(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """``each`` for one tile of every distance (and every end of the text)."""
        distance = where[:, 2] * self.blocks[0] - where[:, 3] * self.blocks[1]
        last = [(where[:, 2 + d] + 1) * self.blocks[d] > self.sizes[d] for d in (0, 1)]
        kind = (distance * 2 + last[0]) * 2 + last[1]
        kinds, kind = torch.unique(kind, return_inverse=True)
        example = torch.zeros_like(kinds).scatter_(0, kind, torch.arange(len(kind), device=kind.device))
        bits, index = self.each(where[example])
        return bits, index[kind]

    def each(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """``bits`` (masks, block_q, block_k / 8), and for every tile its mask, ``FULL`` or ``_EMPTY``."""
        index = torch.full((len(where),), _EMPTY, dtype=torch.int64, device=where.device)
        bits = [torch.empty((0, self.blocks[0], self.blocks[1] // 8), dtype=torch.uint8, device=where.device)]
        # All heads of a place at once, since a pattern answers for all of them.
        place = (where[:, 0] * (self.query.positions.shape[1]) + where[:, 2]) * self.key.positions.shape[1] + where[
            :, 3
        ]
        places, place = torch.unique(place, return_inverse=True)
        order = torch.argsort(place, stable=True)
        sizes = torch.bincount(place, minlength=len(places)).tolist()
        step, n_masks, start = max(1, _SCORES // (self.blocks[0] * self.blocks[1])), 0, 0
        for first in range(0, len(places), step):
            stop = start + sum(sizes[first : first + step])
            tiles, start = order[start:stop], stop
            mask, valid = self._masks(where[tiles], place[tiles] - first)
            some, every = mask.flatten(1).any(1), (mask == valid).flatten(1).all(1)
            kept = some & ~every
            index[tiles[every]] = FULL
            index[tiles[kept]] = n_masks + torch.arange(int(kept.sum()), device=where.device)
            bits.append(_pack(mask[kept]))
            n_masks += len(bits[-1])
        return _without_repeats(torch.cat(bits), index)

    def _masks(self, where: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The masks (tiles, block_q, block_k), and which pairs exist; tiles of equal ``place`` differ in the head."""
        b, h, i, j = where.unbind(1)
        one = torch.zeros_like(place).scatter_(0, place, torch.arange(len(place), device=place.device))
        one = one[: int(place.max()) + 1]
        seen = self.pattern.allowed(
            _picked(self.query, b[one], i[one]).as_queries(), _picked(self.key, b[one], j[one]).as_keys()
        )
        seen = seen.expand(len(one), self.pattern.heads, *(block // self.grain for block in self.blocks))[place, h]
        if self.grain > 1:
            seen = seen.repeat_interleave(self.grain, 1).repeat_interleave(self.grain, 2)
        rows, columns = (
            tile[:, None] * block + torch.arange(block, device=place.device) < size
            for tile, block, size in zip((i, j), self.blocks, self.sizes, strict=True)
        )
        valid = rows[:, :, None] & columns[:, None, :]
        return seen & valid, valid


def _without_repeats(bits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Equal masks once: found by a sum of products, and compared."""
    if len(bits) < 2:
        return bits, index
    words = bits.flatten(1).view(torch.int64)
    factors = mix(torch.arange(words.shape[1], device=bits.device)) * 0x1E3779B97F4A7C15 | 1
    sums, kind = torch.unique((words * factors).sum(1), return_inverse=True)
    example = torch.zeros_like(sums).scatter_(0, kind, torch.arange(len(kind), device=kind.device))
    if not torch.equal(bits[example[kind]], bits):
        return bits, index
    return bits[example], torch.where(index < 0, index, kind[index.clamp(min=0)])


def _in_tiles(side: Records, block: int) -> Records:
    """The records in tiles (B or 1, tiles, block)."""
    check_int32("positions", side.positions)
    lengths = None if side.lengths is None else side.lengths.int()
    return Records(side.positions.int(), side.segments, side.marks, lengths).map(lambda field: in_tiles(field, block))


def _picked(tiles: Records, rows: Tensor, index: Tensor) -> Records:
    """Tiles (n, block) of the given rows."""
    return tiles.map(lambda field: field[rows if len(field) > 1 else torch.zeros_like(rows), index])


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _step(plan: TilePlan) -> int:
    return max(1, _SCORES // (plan.block_q * plan.block_k))


def _pack(mask: Tensor) -> Tensor:
    """Booleans (…, n) as bytes (…, n / 8), the first in the lowest bit."""
    # Eight bytes of 0 or 1 are one int64; the product moves bit 8 i to bit 56 + i, without carries.
    eights = mask.contiguous().view(torch.uint8).view(torch.int64)
    return ((eights * 0x0102040810204080 >> 56) & 0xFF).to(torch.uint8)


def _unpack(bits: Tensor) -> Tensor:
    """The inverse of ``_pack``."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)

"""FlashAttention in PyTorch: tiles of queries and keys, a running maximum and sum, and no T x S tensor ever.

Dao et al. (arXiv:2205.14135), algorithms 1 and 4; Dao (arXiv:2307.08691), section 3.1. The backward pass computes the
weights of every tile once more from the maximum and the sum of its rows, kept apart: their log-sum-exp would be rounded
where scores are large. Tiles that the pattern leaves empty do not exist.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.plan import FULL, TilePlan, count_tiles, tile_plan
from phylon.ops.attention.tile_bias import TileBias, hides_parameters, parameters
from phylon.ops.backward import once
from phylon.ops.random import keep_mask

_BLOCKS = ((512, 512), (256, 512), (256, 256), (128, 256), (128, 128), (64, 64))
_LOG2_E = math.log2(math.e)
_SMALL = 2**16
"""Scores of a head that are one tile."""
_COPIES = 36 * 2**20
"""Bytes that the copies of a step's keys and values may take, and their gradients."""
_STEP = 40_000
"""What a step costs besides its scores, in scores: some ten operations of a few microseconds each."""


class Online:
    """Any device, dtype and pattern, in at least fp32, forward and backward; memory O(T + S).

    A tile is the one of ``blocks`` (queries, keys) with which the pattern costs least: large tiles take fewer steps,
    and small ones compute less in vain. Heads share a step while all their scores are ``scores`` numbers at most, which
    should fit a CPU's cache.
    """

    name = "online"

    def __init__(self, blocks: Sequence[tuple[int, int]] = _BLOCKS, scores: int = 2**19) -> None:
        self.blocks, self.scores = tuple(blocks), scores

    def available(self) -> str | None:
        return None

    def supports(self, call: AttentionCall) -> str | None:
        if call.tap is not None:
            return "scores and weights never exist as a whole"
        if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
            return "an empty dimension"
        if call.bias is not None and hides_parameters(call.bias):
            return f"the parameters of {type(call.bias).__name__} are not among its attributes"
        if torch.compiler.is_compiling():
            return "torch.compile would unroll its loop over tiles"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        plan = tile_plan(call, *self._choose(call))
        return _Attention.apply(
            call.q, call.k, call.v, call.sink, call, plan, self.scores, *parameters(call.bias).values()
        )

    def _choose(self, call: AttentionCall) -> tuple[int, int]:
        t, s = call.q.shape[1], call.k.shape[1]
        if len(self.blocks) == 1 or t * s <= _SMALL:
            return self.blocks[0]
        rows = max((side.batch for side in (call.query, call.key) if side is not None), default=1)
        sharing = call.q.shape[0] * call.q.shape[2] // (rows * call.pattern.heads)

        def cost(block: tuple[int, int]) -> int:
            at_once = min(sharing, _at_once(call, block, self.scores) * (call.q.shape[2] // call.k.shape[2]))
            steps = count_tiles(call, *block) * -(-sharing // at_once)
            return steps * (at_once * min(block[0], t) * min(block[1], s) + _STEP)

        return min(self.blocks, key=cost)


def _at_once(call: AttentionCall, block: tuple[int, int], scores: int) -> int:
    """How many key heads share a step: their scores fit the cache, and the copies of their keys the memory."""
    t, s = min(block[0], call.q.shape[1]), min(block[1], call.k.shape[1])
    wide = torch.promote_types(call.q.dtype, torch.float32)
    copies = wide.itemsize * call.k.shape[1] * (call.k.shape[3] + call.v.shape[3]) * 2
    return max(1, min(scores * call.k.shape[2] // (call.q.shape[2] * t * s), _COPIES // copies))


@dataclass(frozen=True)
class _Unit:
    """What shares one step: rows of the batch, key heads, and of each of these some of its query heads."""

    rows: slice
    kv: slice
    group: slice
    map: int
    n_groups: int

    @property
    def heads(self) -> slice:
        """The query heads, which lie side by side."""
        if self.group.stop - self.group.start == self.n_groups:
            return slice(self.kv.start * self.n_groups, self.kv.stop * self.n_groups)
        first = self.kv.start * self.n_groups + self.group.start
        return slice(first, first + self.group.stop - self.group.start)

    def keys(self, x: Tensor) -> Tensor:
        """(B, S, K, E) -> this unit's (N, S, E), a view where that can be."""
        return x[self.rows, :, self.kv].transpose(1, 2).flatten(0, 1)

    def queries(self, x: Tensor, part: slice) -> Tensor:
        """(B, T, H, E) -> this unit's (N, G t, E): the query heads of a key head are rows of one product."""
        own = self._view(x, part).permute(0, 2, 3, 1, 4)
        return own.flatten(2, 3).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32)).contiguous()

    def put(self, into: Tensor, part: slice, value: Tensor) -> None:
        """The inverse of ``queries``: write (N, G t, E)."""
        view = self._view(into, part)
        rows, n, kv, group, width = view.shape
        view.copy_(value.view(rows, kv, group, n, width).permute(0, 3, 1, 2, 4))

    def _view(self, x: Tensor, part: slice) -> Tensor:
        return x[self.rows, part].unflatten(2, (-1, self.n_groups))[:, :, self.kv, self.group]

    def by_head(self, x: Tensor, n: int) -> Tensor:
        """(N, G t, m) -> a view (rows, heads, t, m)."""
        return x.view(self.rows.stop - self.rows.start, -1, n, x.shape[-1])


@dataclass(frozen=True)
class _Tile:
    """A kept tile: its number among the tiles of keys, its keys, and which pairs are hidden unless it is full."""

    number: int
    keys: slice
    hidden: Tensor | None


class _Work:
    """A call, its plan, and the buffers of its tiles."""

    def __init__(self, call: AttentionCall, plan: TilePlan, scores: int) -> None:
        self.call, self.plan, self.scores = call, plan, scores
        self.n_groups = call.q.shape[2] // call.k.shape[2]
        self.wide = torch.promote_types(call.q.dtype, torch.float32)
        self.bias = None if call.bias is None else TileBias(call)
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int, int], Tensor] = {}
        self._masks: dict[int, Tensor] = {}

    def units(self) -> Iterator[_Unit]:
        """All heads of all rows, as many at once as the plan and the cache allow."""
        batch, n_kv = self.call.k.shape[0], self.call.k.shape[2]
        if self.plan.heads > 1:
            for b in range(batch):
                for h in range(self.call.q.shape[2]):
                    kv, g = divmod(h, self.n_groups)
                    map_ = (b if self.plan.batch > 1 else 0) * self.plan.heads + h
                    yield _Unit(slice(b, b + 1), slice(kv, kv + 1), slice(g, g + 1), map_, self.n_groups)
            return
        fits = _at_once(self.call, (self.plan.block_q, self.plan.block_k), self.scores)
        kv_step = min(n_kv, fits)
        row_step = 1 if self.plan.batch > 1 else min(batch, max(1, fits // n_kv))
        for b in range(0, batch, row_step):
            for kv in range(0, n_kv, kv_step):
                rows, heads = slice(b, min(b + row_step, batch)), slice(kv, min(kv + kv_step, n_kv))
                yield _Unit(rows, heads, slice(0, self.n_groups), b if self.plan.batch > 1 else 0, self.n_groups)

    def rows(self, unit: _Unit) -> Iterator[tuple[slice, list[_Tile]]]:
        """The queries of every row of tiles, and the tiles that are kept of it."""
        starts, key_tiles, masks = self.plan.lists
        plan, first = self.plan, unit.map * self.plan.n_query_tiles
        for i in range(plan.n_query_tiles):
            queries = slice(i * plan.block_q, min((i + 1) * plan.block_q, plan.n_queries))
            tiles = []
            for place in range(starts[first + i], starts[first + i + 1]):
                j = key_tiles[place]
                keys = slice(j * plan.block_k, min((j + 1) * plan.block_k, plan.n_keys))
                tiles.append(_Tile(j, keys, self._mask(masks[place], queries, keys)))
            yield queries, tiles

    def _mask(self, index: int, queries: slice, keys: slice) -> Tensor | None:
        if index == FULL:
            return None
        if index not in self._masks:
            if len(self._masks) >= 8:
                self._masks.clear()
            self._masks[index] = ~self.plan.mask(index)
        return self._masks[index][: queries.stop - queries.start, : keys.stop - keys.start]

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` in a buffer that is used again: fresh memory costs more than the product."""
        key = (name, a.shape[0], a.shape[1], b.shape[2])
        out = self._views.get(key)
        if out is None:
            out = self._views[key] = self._buffer(name, math.prod(key[1:])).view(key[1:])
        return torch.bmm(a, b, out=out)

    def _buffer(self, name: str, size: int) -> Tensor:
        """So many numbers, in the memory that ``name`` had before wherever that is enough."""
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
            self._buffers[name] = torch.empty(size, dtype=self.wide, device=self.call.q.device)
        return self._buffers[name][:size]

    def seen(self, name: str, unit: _Unit, x: Tensor) -> list[Tensor]:
        """The tiles of a unit's keys or values, (N, keys, E) in at least fp32; what nobody sees, NaN too, is zero."""
        # Dense: a product with strided factors takes a tenth longer. In one buffer: a heap keeps what pieces leave.
        tiles, unseen = unit.keys(x).split(self.plan.block_k, dim=1), self.plan.unseen
        made = [tile.copy_(given) for tile, given in zip(self._beside(name, tiles), tiles, strict=True)]
        if unseen is not None:
            heads, rows = unit.heads if self.plan.heads > 1 else slice(0, 1), unit.rows
            hidden = unseen[rows if self.plan.batch > 1 else slice(0, 1), heads, :, None]
            for tile, part in zip(made, hidden.split(self.plan.block_k, dim=2), strict=True):
                tile.unflatten(0, (rows.stop - rows.start, -1)).masked_fill_(part, 0)
        return made

    def zeros(self, name: str, tiles: list[Tensor]) -> list[Tensor]:
        """For each of ``tiles`` its gradient, each of them dense: batched products into strided memory are not."""
        return [part.zero_() for part in self._beside(name, tiles)]

    def _beside(self, name: str, tiles: Sequence[Tensor]) -> list[Tensor]:
        """Room for tensors like ``tiles``, one after the other."""
        sizes = [x.numel() for x in tiles]
        parts = self._buffer(name, sum(sizes)).split(sizes)
        return [part.view(x.shape) for part, x in zip(parts, tiles, strict=True)]

    def adjust(self, unit: _Unit, queries: slice, tile: _Tile, scores: Tensor) -> Tensor | None:
        """Bias, cap and mask in place; the slope of the cap, if there is one."""
        n, slope = queries.stop - queries.start, None
        if self.bias is not None:
            unit.by_head(scores, n).add_(self.bias.tile(unit.rows, unit.heads, queries, tile.keys))
        if self.call.softcap is not None:
            tanh = scores.div_(self.call.softcap).tanh_()
            slope = 1 - tanh.square()
            scores.mul_(self.call.softcap)
        if tile.hidden is not None:
            unit.by_head(scores, n).masked_fill_(tile.hidden, -math.inf)
        return slope

    def keep(self, unit: _Unit, queries: slice, tile: _Tile) -> Tensor | None:
        """Of dropout: what each weight of the tile (N, G t, keys) is multiplied with."""
        if self.call.dropout == 0:
            return None
        heads, n, m = unit.heads, queries.stop - queries.start, tile.keys.stop - tile.keys.start
        shape = (unit.rows.stop - unit.rows.start, heads.stop - heads.start, n, m)
        origin = (unit.rows.start, heads.start, queries.start, tile.keys.start)
        kept = keep_mask(self.call.seed, shape, self.call.dropout, self.call.q.device, origin=origin)
        kv = unit.kv.stop - unit.kv.start
        return (kept.to(self.wide) / (1 - self.call.dropout)).view(shape[0] * kv, -1, m)


def _forward(work: _Work) -> tuple[Tensor, Tensor]:
    """``out`` (B, T, H, Ev), and of every row (B, T, H, 2) its maximum to base 2 and the sum that goes with it."""
    call = work.call
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
    sums = torch.ones(*call.q.shape[:3], 2, dtype=work.wide, device=call.q.device)
    for unit in work.units():
        k_NME, v_NME = work.seen("k", unit, call.k), work.seen("v", unit, call.v)
        k_NEM = [x.mT for x in k_NME]
        for queries, tiles in work.rows(unit):
            if not tiles:
                continue
            q_NRE = unit.queries(call.q, queries) * call.factor
            top = q_NRE.new_full((*q_NRE.shape[:2], 1), -math.inf)
            total, mixed = torch.zeros_like(top), q_NRE.new_zeros(*q_NRE.shape[:2], call.v.shape[3])
            for tile in tiles:
                scores = work.product("scores", q_NRE, k_NEM[tile.number])
                work.adjust(unit, queries, tile, scores)
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True).mul_(_LOG2_E))
                shift = new_top if tile.hidden is None else new_top.masked_fill(new_top == -math.inf, 0)
                weights, shrink = _powers(scores, shift), torch.exp2(top - shift)
                total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                keep = work.keep(unit, queries, tile)
                if keep is not None:
                    weights.mul_(keep)
                mixed.mul_(shrink).baddbmm_(weights, v_NME[tile.number])
                top = new_top
            _finish(unit, queries, call.sink, top, total, mixed, (out, sums))
    return out, sums


def _powers(scores: Tensor, shift: Tensor) -> Tensor:
    """``exp(scores) / 2^shift`` in place; where it underflows, MKL's ``exp`` takes 200 times as long, ``exp2`` not."""
    return torch.add(-shift, scores, alpha=_LOG2_E, out=scores).exp2_()


def _finish(
    unit: _Unit, queries: slice, sink: Tensor | None, top: Tensor, total: Tensor, mixed: Tensor, into: Sequence[Tensor]
) -> None:
    """Divide by the sum, in which the sink takes its share; rows that saw nothing stay zero."""
    empty, shrink = total == 0, 1.0
    if sink is not None:
        extra = sink[unit.heads].to(top.dtype)[None, :, None, None] * _LOG2_E
        above = torch.maximum(unit.by_head(top, queries.stop - queries.start), extra)
        of_sink, above = _of_sink(unit, sink, above).view_as(top), above.view_as(top)
        shrink, top = torch.exp2(top - above), above
        total = total * shrink + of_sink
    out, sums = into
    unit.put(sums, queries, torch.cat([top.masked_fill(empty, 0), total.masked_fill(empty, 1)], -1))
    unit.put(out, queries, mixed.mul_((shrink / total).masked_fill_(empty, 0)))


class _Attention(torch.autograd.Function):
    """One node of the graph: keeps q, k, v, the result, and the maximum and sum of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        call: AttentionCall,
        plan: TilePlan,
        scores: int,
        *of_bias: Tensor,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, sums = _forward(_Work(call, plan, scores))
        ctx.save_for_backward(q, k, v, sink, out, sums)
        # The tensors come back as they were saved, so that hooks on them hold.
        ctx.call, ctx.plan, ctx.scores = replace(call, q=q[:0], k=k[:0], v=v[:0], sink=None), plan, scores
        return out

    @staticmethod
    @once("attention backend 'online'")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # type: ignore[bad-override]
        q, k, v, sink, out, sums = ctx.saved_tensors
        work = _Work(replace(ctx.call, q=q, k=k, v=v, sink=sink), ctx.plan, ctx.scores)
        grads = _backward(work, out, sums, d_out)
        of_bias = [] if work.bias is None else work.bias.finish()
        return (*grads, None, None, None, *of_bias)


def _backward(work: _Work, out: Tensor, sums: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sink."""
    call = work.call
    blind = work.plan.blind
    if blind is not None:
        # Queries that see nothing, and the gradients of their outputs, can hold anything: 0 * NaN is NaN.
        hidden = blind.transpose(1, 2)[..., None]
        call = work.call = replace(call, q=call.q.masked_fill(hidden, 0))
        d_out = d_out.masked_fill(hidden, 0)
    dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    d_sink = None if call.sink is None else torch.zeros_like(call.sink, dtype=work.wide)
    for unit in work.units():
        k_NME, v_NME = work.seen("k", unit, call.k), work.seen("v", unit, call.v)
        k_NEM, v_NEM = [x.mT for x in k_NME], [x.mT for x in v_NME]
        dk_NME, dv_NME = work.zeros("dk", k_NME), work.zeros("dv", v_NME)
        for queries, tiles in work.rows(unit):
            if not tiles:
                continue
            top, total = unit.queries(sums, queries).split(1, dim=-1)
            # Divided by the row's sum once, so that the weights of its tiles need not be.
            g_NRE = unit.queries(d_out, queries) / total
            delta = (g_NRE * unit.queries(out, queries)).sum(-1, keepdim=True)
            if d_sink is not None and call.sink is not None:
                d_sink[unit.heads] -= _sink_share(unit, queries, call.sink, top, delta)
            q_NRE = unit.queries(call.q, queries) * call.factor
            dq_NRE = torch.zeros_like(q_NRE)
            for tile in tiles:
                j = tile.number
                scores = work.product("scores", q_NRE, k_NEM[j])
                slope = work.adjust(unit, queries, tile, scores)
                weights = _powers(scores, top)
                d_scores = work.product("d_scores", g_NRE, v_NEM[j])
                keep = work.keep(unit, queries, tile)
                if keep is not None:
                    d_scores.mul_(keep)
                d_scores.sub_(delta).mul_(weights)
                dv_NME[j].baddbmm_((weights if keep is None else weights.mul_(keep)).mT, g_NRE)
                if slope is not None:
                    d_scores.mul_(slope)
                if work.bias is not None:
                    by_head = unit.by_head(d_scores, queries.stop - queries.start)
                    work.bias.add_grad(unit.rows, unit.heads, queries, tile.keys, by_head)
                dq_NRE.baddbmm_(d_scores, k_NME[j])
                dk_NME[j].baddbmm_(d_scores.mT, q_NRE)
            unit.put(dq, queries, dq_NRE.mul_(call.factor))
        _put_keys(unit, dk, dk_NME)
        _put_keys(unit, dv, dv_NME)
    return dq, dk, dv, None if d_sink is None or call.sink is None else d_sink.to(call.sink.dtype)


def _put_keys(unit: _Unit, into: Tensor, tiles: list[Tensor]) -> None:
    """Add the tiles (N, keys, E) of a unit to ``into`` (B, S, K, E)."""
    own = into[unit.rows, :, unit.kv].split(tiles[0].shape[1], dim=1)
    for part, tile in zip(own, tiles, strict=True):
        part.add_(tile.unflatten(0, (len(part), -1)).transpose(1, 2))


def _sink_share(unit: _Unit, queries: slice, sink: Tensor, top: Tensor, delta: Tensor) -> Tensor:
    """(heads,): the sink's weight of every row times what the row's output lost to it."""
    top, delta = (unit.by_head(x, queries.stop - queries.start) for x in (top, delta))
    return (_of_sink(unit, sink, top) * delta).sum((0, 2, 3))


def _of_sink(unit: _Unit, sink: Tensor, top: Tensor) -> Tensor:
    """(rows, heads, t, 1): the sink's weights, rounded as those of the scores."""
    return _powers(sink[unit.heads].to(top.dtype)[None, :, None, None].expand_as(top).clone(), top)

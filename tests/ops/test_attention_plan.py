"""Block maps by brute force: bounds never lie, and the plan holds exactly the pairs that the pattern allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import cases
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.plan import FULL, TilePlan, count_tiles, tile_plan
from phylon.patterns import (
    BigBird,
    Bounds,
    Causal,
    Document,
    Full,
    Global,
    Pattern,
    Prefix,
    Records,
    SameBlock,
    Strided,
    Summary,
    SymmetricWindow,
    Window,
    measured,
)

ONES = [case for _, case in cases(Pattern) if isinstance(case, Pattern)]
MORE: list[Pattern] = [
    *ONES,
    Window(size=9) | Strided(stride=5),
    (SameBlock(size=6) | Summary(size=6, count=2)) & Causal(),
    SymmetricWindow(radius=3) | Global(),
    Window(size=4) | (Global() & Causal()),
    Causal() | Prefix(),
    Causal() | Prefix(mark=2),
    BigBird(block=4, n_heads=3, n_random=2),
    BigBird(block=8, n_heads=2, n_random=1) & Causal(),
    (Window(size=5) | SymmetricWindow(radius=2)) & Document(),
]


def call(pattern: Pattern, t: int, s: int, query: Records | None, key: Records | None, batch: int = 1) -> AttentionCall:
    q = torch.zeros(batch, t, pattern.heads, 2)
    return AttentionCall(
        q=q, k=q.new_zeros(batch, s, 1, 2), v=q.new_zeros(batch, s, 1, 2), pattern=pattern, query=query, key=key
    )


def truth(made: AttentionCall) -> torch.Tensor:
    query, key = made.records()
    seen = made.visible.allowed(query.as_queries(), key.as_keys())
    return seen.expand(max(query.batch, key.batch), made.pattern.heads, made.q.shape[1], made.k.shape[1])


def check(made: AttentionCall, block_q: int, block_k: int) -> TilePlan:
    plan = tile_plan(made, block_q, block_k)
    expected = truth(made)
    assert torch.equal(plan.dense().expand_as(expected), expected)
    unseen = ~expected.any(2)
    assert torch.equal((plan.unseen if plan.unseen is not None else torch.zeros_like(unseen)).expand_as(unseen), unseen)
    again = transposed(plan)
    assert sorted(again) == sorted(zip(plan.row_of.tolist(), *plan.lists[1:], strict=True))
    kept_bits = plan.bits[plan.masks[plan.masks != FULL].long()]
    assert bool(kept_bits.flatten(1).any(1).all()), "an empty tile is not kept"
    return plan


def transposed(plan: TilePlan) -> list[tuple[int, int, int]]:
    """``(row, key tile, mask)`` of every tile, from the map by columns."""
    starts, tiles, masks = (x.tolist() for x in plan.columns)
    found = []
    for column in range(len(starts) - 1):
        map_, j = divmod(column, plan.n_key_tiles)
        own = tiles[starts[column] : starts[column + 1]]
        assert own == sorted(own)
        found += [
            (map_ * plan.n_query_tiles + i, j, m)
            for i, m in zip(own, masks[starts[column] : starts[column + 1]], strict=True)
        ]
    return found


@pytest.mark.parametrize("pattern", MORE, ids=repr)
@pytest.mark.parametrize(("t", "s"), [(1, 1), (63, 63), (129, 129), (5, 40), (40, 33)])
def test_aligned(pattern: Pattern, t: int, s: int) -> None:
    check(call(pattern, t, s, None, None), *((16, 32) if t < 100 else (32, 8)))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Records, Records]:
    """Rows of documents with padding anywhere, marks, and positions with gaps; queries are the last of the keys."""
    batch, s = draw(st.integers(1, 2)), draw(st.integers(1, 40))
    t = draw(st.integers(1, s))
    rows = []
    for _ in range(batch):
        row, document, position = [], 1, 0
        for _ in range(s):
            move = draw(st.sampled_from(("token",) * 12 + ("padding", "new", "gap")))
            document, position = (document + 1, 0) if move == "new" else (document, position)
            position += 3 * (move == "gap")
            mark = draw(st.sampled_from((0,) * 9 + (1, 2)))
            row.append((0, 0, 0) if move == "padding" else (position, document, mark))
            position += move != "padding"
        rows.append(row)
    fields = torch.tensor(rows).permute(2, 0, 1)
    if draw(st.booleans()):
        fields[1] = 1
    segments = None if draw(st.booleans()) and bool((fields[1] == 1).all()) else fields[1]
    key = Records(fields[0], segments, fields[2])
    query = key if t == s else key.map(lambda field: field[:, s - t :])
    return query, key


@pytest.mark.parametrize("pattern", MORE, ids=repr)
@given(both=sides(), blocks=st.sampled_from(((8, 8), (4, 16), (16, 8))))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_records(pattern: Pattern, both: tuple[Records, Records], blocks: tuple[int, int]) -> None:
    query, key = both
    made = call(pattern, query.positions.shape[1], key.positions.shape[1], query, key, query.batch)
    check(made, *blocks)
    query, key = measured(query, key)
    some, every = pattern.tiles(Bounds.of(query, blocks[0]).as_queries(), Bounds.of(key, blocks[1]).as_keys())
    seen = pattern.allowed(query.as_queries(), key.as_keys()).expand(
        query.batch, pattern.heads, query.positions.shape[1], key.positions.shape[1]
    )
    tiles = [list(rows.split(blocks[1], 3)) for rows in seen.split(blocks[0], 2)]
    holds = torch.stack([torch.stack([x.flatten(2).any(2) for x in row], -1) for row in tiles], -2)
    is_full = torch.stack([torch.stack([x.flatten(2).all(2) for x in row], -1) for row in tiles], -2)
    assert not bool((holds & ~some).any()), "a tile with a visible pair is never empty"
    assert not bool((every & ~is_full).any()), "a tile with a hidden pair is never full"


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (Full(), 64 * 64),
        (Causal(), 64 * 65 // 2),
        (Window(size=128), 64 * 3 - 3),
        (Window(size=129), 64 * 3 - 3),
        (Window(size=130), 64 * 4 - 6),
        (SymmetricWindow(radius=64), 64 * 3 - 2),
        (SameBlock(size=128), 64 * 2),
        (Strided(stride=64) & Window(size=64), 64),
    ],
    ids=repr,
)
def test_nothing_is_kept_in_vain(pattern: Pattern, kept: int) -> None:
    """64 tiles of 64 tokens: exactly the tiles that hold a pair, and few masks."""
    plan = tile_plan(call(pattern, 4096, 4096, None, None), 64, 64)
    assert plan.n_kept == kept <= count_tiles(call(pattern, 4096, 4096, None, None), 64, 64) < 2 * kept
    assert len(plan.bits) <= 3


def test_bigbird_keeps_its_blocks() -> None:
    """Ends see all; the others see both ends, themselves, two neighbours and two random blocks, all whole tiles."""
    plan = tile_plan(call(BigBird(block=64, n_heads=2, n_random=2), 4096, 4096, None, None), 64, 64)
    assert plan.n_kept == 2 * (2 * 64 + sum(len({0, 63, i - 1, i, i + 1}) + 2 for i in range(1, 63)))
    assert len(plan.bits) == 0


def test_packed_documents_do_not_meet() -> None:
    """Eight documents of 512 in a row: an eighth of the causal tiles of the whole, and nothing of the T x S map."""
    segments = torch.arange(1, 9).repeat_interleave(512)[None]
    records = Records(torch.arange(512).repeat(8)[None], segments)
    plan = tile_plan(call(Causal(), 4096, 4096, records, records), 64, 64)
    assert plan.n_kept == 8 * (8 * 9 // 2)


def test_blocks_of_one_pass_share_the_plan() -> None:
    records = Records(torch.arange(40)[None], torch.ones(1, 40, dtype=torch.int64))
    first, second = (tile_plan(call(Causal(), 40, 40, records, records), 16, 16) for _ in range(2))
    assert first is second
    assert tile_plan(call(Window(size=3), 40, 40, records, records), 16, 16) is not first
    same = Records(records.positions, records.segments)
    assert tile_plan(call(Causal(), 40, 40, same, same), 16, 16) is not first
    aligned = [tile_plan(call(Causal(), 40, 40, None, None), 16, 16) for _ in range(2)]
    assert aligned[0] is aligned[1]


def test_a_long_window_costs_what_it_keeps() -> None:
    """A window of 1,024 over 131,072 tokens: 1,024 x 17 tiles of 128, two masks."""
    plan = tile_plan(call(Window(size=1024), 2**17, 2**17, None, None), 128, 128)
    assert plan.n_kept == 1024 * 9 - 36
    assert plan.bits.shape == (2, 128, 16)

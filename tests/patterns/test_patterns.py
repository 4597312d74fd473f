"""Patterns by brute force: what each allows, how they compose, and whether ``streams`` and ``reach`` tell the truth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import cases
from phylon.patterns import (
    And,
    BigBird,
    Causal,
    Document,
    Full,
    Global,
    Or,
    Pattern,
    Prefix,
    Records,
    SameBlock,
    Strided,
    Summary,
    SymmetricWindow,
    Window,
    aligned,
    measured,
)
from phylon.spec import UserError

CASES = dict(cases(Pattern))
PARTS = (Global, Prefix, Summary)
"""What is only of use beside other patterns: some tokens see nothing."""
N = 12


def grid(pattern: Pattern, query: Records, key: Records) -> Tensor:
    """(T, S) of one row, any head."""
    return pattern.allowed(query.as_queries(), key.as_keys()).any(1)[0]


def line(n: int = N, segments: list[int] | None = None) -> Records:
    """One row, its first and sixth token marked; one document, or those of the segments."""
    ids = None if segments is None else torch.tensor([segments])
    marks = torch.tensor([[int(i in (0, 5)) for i in range(n)]])
    return measured(*[Records(torch.arange(n)[None], ids, marks)] * 2)[0]


@pytest.mark.parametrize("name", CASES)
def test_streams_and_reach_tell_the_truth(name: str) -> None:
    pattern = CASES[name]
    tokens = line()
    seen = grid(pattern, tokens, tokens).expand(N, N)
    ahead = bool(seen.triu(1).any())
    assert pattern.streams is not ahead, "streams exactly when nothing looks ahead"
    assert seen.diagonal().all() or isinstance(pattern, PARTS), "a token sees itself"
    if pattern.reach is not None:
        distance = torch.arange(N)[:, None] - torch.arange(N)
        assert not bool((seen & (distance >= pattern.reach)).any()), "nothing beyond the reach"
        assert bool((seen & (distance == pattern.reach - 1)).any()), "and no less than it says"


@pytest.mark.parametrize("name", CASES)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_only_records_count(name: str, queries: list[int], keys: list[int], random: object) -> None:
    """A pattern is a function of the two records: not of their place, their neighbours, or the call."""
    pattern = CASES[name]
    sides = [
        Records(*(torch.tensor([x]) for x in (p, [1 + i % 2 for i in p], [i % 3 for i in p], [21 + i % 2 for i in p])))
        for p in (queries, keys)
    ]
    whole = grid(pattern, *sides).expand(len(queries), len(keys))
    for i in range(len(queries)):
        for j in range(len(keys)):
            q, k = (side.map(lambda x, n=n: x[:, n : n + 1]) for side, n in zip(sides, (i, j), strict=True))
            assert bool(grid(pattern, q, k).all()) is bool(whole[i, j])


def test_basic_patterns_by_definition() -> None:
    definitions = [
        (Full(), lambda q, k: True),
        (Causal(), lambda q, k: k <= q),
        (Window(size=1), lambda q, k: k == q),
        (Window(size=4), lambda q, k: 0 <= q - k <= 3),
        (SymmetricWindow(radius=2), lambda q, k: abs(q - k) <= 2),
        (Causal() & SymmetricWindow(radius=2), lambda q, k: 0 <= q - k <= 2),
        (Window(size=2) | SymmetricWindow(radius=0), lambda q, k: 0 <= q - k <= 1),
    ]
    for pattern, allowed in definitions:
        expected = torch.tensor([[allowed(q, k) for k in range(N)] for q in range(N)])
        assert torch.equal(grid(pattern, line(), line()).expand(N, N), expected), pattern


def test_documents() -> None:
    segments = [0, 1, 1, 2, 0, 1]
    expected = torch.tensor([[q == k != 0 for k in segments] for q in segments])
    assert torch.equal(grid(Document(), line(6, segments), line(6, segments)), expected)
    ones = torch.tensor([[k == 1 for k in segments]]).expand(6, 6)
    assert torch.equal(grid(Document(), line(6), line(6, segments)), ones), "without segments, all is document 1"
    assert torch.equal(grid(Document(), line(6, segments), line(6)), ones.T)
    assert grid(Document(), line(3), line(6)).expand(3, 6).all()


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_algebra(data: st.DataObject) -> None:
    """``&`` and ``|`` are the truth-table ones, flat, and associative."""
    some = st.sampled_from([Causal(), Window(size=3), SymmetricWindow(radius=1), Full(), Document()])
    a, b, c = (data.draw(some) for _ in range(3))
    ids = data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    side = line(5, ids)
    wide = lambda p: grid(p, side, side).expand(5, 5)
    assert torch.equal(wide(a & b & c), wide(a) & wide(b) & wide(c))
    assert torch.equal(wide(a | b | c), wide(a) | wide(b) | wide(c))
    assert torch.equal(wide(a & (b | c)), wide((a & b) | (a & c)))
    assert (a & b) & c == a & (b & c) == And(patterns=(a, b, c))
    assert (a | b) | c == a | (b | c) == Or(patterns=(a, b, c))


def test_composed_streams_and_reach() -> None:
    assert (Causal() & Full()).streams
    assert not (Causal() | Full()).streams
    assert (Window(size=4) & Window(size=3)).reach == 3
    assert (Window(size=4) | Window(size=3)).reach == 4
    assert (Window(size=4) | Causal()).reach is None
    assert (Causal() & Window(size=4)).reach == 4


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 5), (3, 5), (5, 3)])
def test_bottom_right(n_queries: int, n_keys: int) -> None:
    query, key = aligned(n_queries, n_keys, torch.device("cpu"))
    assert int(query.positions[0, -1]) == int(key.positions[0, -1]) == n_keys - 1
    seen = grid(Causal(), query, key)
    expected = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(size=0),
        lambda: SymmetricWindow(radius=-1),
        lambda: And(patterns=()),
        lambda: Or(patterns=()),
        lambda: SameBlock(size=0),
        lambda: Strided(stride=0),
        lambda: Summary(size=3, count=0),
        lambda: BigBird(block=0, n_heads=1),
        lambda: BigBird(block=4, n_heads=1, n_random=-1),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(UserError, match="at least"):
        make()  # type: ignore[operator]


def test_heads_must_agree() -> None:
    two, three = (BigBird(block=4, n_heads=n) for n in (2, 3))
    assert (two & Causal()).heads == 2
    with pytest.raises(UserError, match="patterns for 2 and 3 heads cannot be composed"):
        two | three
    with pytest.raises(UserError, match="window must be an odd number of blocks, got 2"):
        BigBird(block=4, n_heads=1, window=2)
    with pytest.raises(UserError, match="at most the block size 3, got 4"):
        Summary(size=3, count=4)


def test_sparse_transformer_fixed() -> None:
    """Figure 3 (c) of arXiv:1904.10509 by its definition, block 4 and one summary position, and beyond."""
    pattern = (SameBlock(size=4) | Summary(size=4, count=1)) & Causal()
    expected = [[k <= q and (q // 4 == k // 4 or k % 4 == 3) for k in range(N)] for q in range(N)]
    assert torch.equal(grid(pattern, line(), line()), torch.tensor(expected))
    assert pattern.streams
    assert (SameBlock(size=4) & Causal()).reach == 4


def test_longformer_and_prefix() -> None:
    marked = (0, 5)
    longformer = grid(SymmetricWindow(radius=1) | Global(), line(), line())
    expected = [[abs(q - k) <= 1 or q in marked or k in marked for k in range(N)] for q in range(N)]
    assert torch.equal(longformer, torch.tensor(expected))
    causal = Window(size=2) | (Global() & Causal())
    assert causal.streams
    assert torch.equal(grid(causal, line(), line()), (torch.tensor(expected) & torch.ones(N, N).bool().tril()))
    prefix = Causal() | Prefix()
    assert not prefix.streams
    assert torch.equal(
        grid(prefix, line(), line()), torch.tensor([[k <= q or k in marked for k in range(N)] for q in range(N)])
    )
    bare = Records(torch.arange(N)[None])
    assert torch.equal(grid(prefix, bare, bare), grid(Causal(), bare, bare)), "without marks there is no prefix"


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 4), st.sampled_from((1, 3)), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_bigbird_draws_the_right_number(n_blocks: int, ends: int, n_random: int, window: int, seed: int) -> None:
    """Every block sees its window, the ends and exactly ``n_random`` others, or all where there are not so many."""
    pattern = BigBird(block=1, n_heads=5, window=window, ends=ends, n_random=n_random, seed=seed)
    tokens = measured(*[Records(torch.arange(n_blocks)[None])] * 2)[0]
    seen = pattern.allowed(tokens.as_queries(), tokens.as_keys())[0].expand(5, n_blocks, n_blocks)
    for q in range(n_blocks):
        is_end = lambda block: block < ends or block >= n_blocks - ends
        fixed = {k for k in range(n_blocks) if is_end(q) or is_end(k) or abs(q - k) <= window // 2}
        for h in range(5):
            own = set(seen[h, q].nonzero()[:, 0].tolist())
            assert fixed <= own
            assert len(own - fixed) == min(n_random, n_blocks - len(fixed))


def test_bigbird_plans_differ_by_head_seed_and_length() -> None:
    def plan(length: int, **changes: int) -> Tensor:
        tokens = measured(*[Records(torch.arange(length)[None])] * 2)[0]
        return BigBird(block=2, n_heads=4).replace(**changes).allowed(tokens.as_queries(), tokens.as_keys())[0]

    assert not torch.equal(plan(40)[0], plan(40)[1])
    assert not torch.equal(plan(40), plan(40, seed=1))
    assert torch.equal(plan(40), plan(40))
    shorter = plan(80)[:, :36, :36] != plan(40)[:, :36, :36]
    assert bool(shorter.any()), "the plan is the document's"
    with pytest.raises(AssertionError, match="measured"):
        BigBird(block=2, n_heads=4).allowed(*(Records(torch.arange(4)[None]) for _ in range(2)))
    assert not (BigBird(block=2, n_heads=4) & Causal()).streams, "a longer text would change what was seen"


def test_lengths_are_counted_by_document() -> None:
    ids = torch.tensor([[0, 1, 1, 2, 0, 1], [3, 3, 3, 3, 3, 3]])
    key = Records(torch.zeros(1, 6, dtype=torch.int64), ids)
    query = key.map(lambda x: x[:, 3:])
    of_query, of_key = measured(query, key)
    assert of_key.lengths is not None
    assert of_query.lengths is not None
    assert of_key.lengths[:, [1, 2, 3, 5]].tolist() == [[3, 3, 1, 3], [6, 6, 6, 6]]
    assert of_query.lengths[:, [0, 2]].tolist() == [[1, 3], [6, 6]]
    assert [x.lengths.tolist() for x in measured(line(2), line(5))] == [[[2, 2]], [[5] * 5]], "what is known stays"
    bare = [Records(torch.arange(n)[None]) for n in (2, 5)]
    assert [x.lengths.tolist() for x in measured(*bare)] == [[[5] * 2], [[5] * 5]]

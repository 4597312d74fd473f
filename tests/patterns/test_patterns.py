"""Patterns by brute force: what each allows, how they compose, and whether ``streams`` and ``reach`` tell the truth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import cases
from phylon.patterns import And, Causal, Document, Full, Or, Pattern, Records, SymmetricWindow, Window, aligned
from phylon.spec import UserError

CASES = dict(cases(Pattern))
N = 12


def grid(pattern: Pattern, query: Records, key: Records) -> Tensor:
    """(T, S) of one row, any head."""
    return pattern.allowed(query.as_queries(), key.as_keys()).any(1)[0]


def line(n: int = N, segments: list[int] | None = None) -> Records:
    return Records(torch.arange(n)[None], None if segments is None else torch.tensor([segments]))


@pytest.mark.parametrize("name", CASES)
def test_streams_and_reach_tell_the_truth(name: str) -> None:
    pattern = CASES[name]
    seen = grid(pattern, line(), line()).expand(N, N)
    ahead = bool(seen.triu(1).any())
    assert pattern.streams is not ahead, "streams exactly when nothing looks ahead"
    assert seen.diagonal().all(), "a token sees itself"
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
    sides = [Records(torch.tensor([p]), torch.tensor([[1 + i % 2 for i in p]])) for p in (queries, keys)]
    whole = grid(pattern, *sides).expand(len(queries), len(keys))
    for i in range(len(queries)):
        for j in range(len(keys)):
            q = Records(sides[0].positions[:, i : i + 1], sides[0].segments[:, i : i + 1])
            k = Records(sides[1].positions[:, j : j + 1], sides[1].segments[:, j : j + 1])
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
    [lambda: Window(size=0), lambda: SymmetricWindow(radius=-1), lambda: And(patterns=()), lambda: Or(patterns=())],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(UserError, match="at least"):
        make()  # type: ignore[operator]

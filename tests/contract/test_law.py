"""The same tokens give the same values, for every registered mechanism and arrangement."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_close, drawn, small_models
from law import CELLS, ROUTES, alone, check, chunked, documents, streams, values
from phylon.spec import UserError, entries, registry

NAMES = sorted(small_models())
STREAMING = [name for name in NAMES if streams(drawn(name))]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_law(name: str, route: str) -> None:
    check(drawn(name), route)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(STREAMING)))
def test_what_does_not_stream_says_why(name: str) -> None:
    with pytest.raises(UserError, match=r"cannot continue from a state: .+"):
        drawn(name).new_state(1)


def test_exceptions_name_known_cells() -> None:
    for entry in entries():
        assert set(entry.exceptions) <= set(CELLS), entry.kind
        assert all(reason.strip() for reason in entry.exceptions.values())


def test_a_registered_exception_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell is skipped with the reason, every other cell still runs."""
    entry = registry._entries["glu"]
    monkeypatch.setitem(registry._entries, "glu", dataclasses.replace(entry, exceptions={"padding": "it cannot"}))
    with pytest.raises(pytest.skip.Exception, match="registered exception: it cannot"):
        check(drawn("causal-0"), "padding-left")
    check(drawn("causal-0"), "batch")


@pytest.mark.parametrize("name", ["window-0", "window-1", "attention-2", "alternating"])
@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("cut", [(4, 4, 4), (3,) * 4, (2,) * 6, (7, 3, 1, 1, 1), (13,), (1,) * 13])
def test_window_and_chunks(name: str, length: int, cut: tuple[int, ...]) -> None:
    """Case 3: a window of 4 over 12 or 13 tokens in any chunks, wrapping the buffer at every phase."""
    docs = documents(drawn(name), (length, length), seed=length)
    for ours, theirs in zip(chunked(cut)(drawn(name), docs), alone(drawn(name), docs), strict=True):
        assert_close(ours, theirs)


def test_most_specs_stream() -> None:
    assert len(STREAMING) > len(NAMES) / 2


@st.composite
def sessions(draw: st.DrawFn) -> list[list[list[int]]]:
    """For each of some rows, its chunks as segment ids: documents of any length, cut and padded anywhere."""
    rows = []
    n_chunks = draw(st.integers(1, 5))
    widths = draw(st.lists(st.integers(1, 5), min_size=n_chunks, max_size=n_chunks))
    for _ in range(draw(st.integers(1, 3))):
        document, row = 1, []
        for width in widths:
            ids = []
            for _ in range(width):
                move = draw(st.sampled_from(("token", "token", "token", "token", "padding", "new")))
                document += move == "new"
                ids.append(0 if move == "padding" else document)
            row.append(ids)
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", STREAMING)
@given(rows=sessions())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_any_session(name: str, rows: list[list[list[int]]]) -> None:
    """Rows of packed, padded, cut documents, all at once, against every document alone."""
    model = drawn(name)
    state, seen, got = model.new_state(len(rows)), {}, {}
    for chunk, segments in enumerate(zip(*rows, strict=True)):
        ids = torch.tensor(segments)
        tokens = torch.stack(documents(model, [ids.shape[1]] * len(rows), seed=chunk))
        out = values(model, tokens, segments=ids, state=state)
        for row in range(len(rows)):
            for column, document in enumerate(ids[row].tolist()):
                if document:
                    seen.setdefault((row, document), []).append(tokens[row, column])
                    got.setdefault((row, document), []).append(out[row, column])
    expected = alone(model, [torch.stack(doc) for doc in seen.values()])
    for ours, theirs in zip(got.values(), expected, strict=True):
        assert_close(torch.stack(ours), theirs, what=name)

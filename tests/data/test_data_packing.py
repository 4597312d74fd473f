from collections import Counter

import numpy as np
import pytest
from data_toys import Characters, store_of
from hypothesis import given
from hypothesis import strategies as st

from phylon.data import IGNORE, PackedRows, Texts, pack_documents, tokenise
from phylon.spec.errors import UserError

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 20))
def test_rows_of_a_stream_equal_their_definition(lengths, seq_len):
    store = store_of(lengths)
    if seq_len > sum(lengths):
        with pytest.raises(UserError, match=rf"seq_len {seq_len} is more than the data \({sum(lengths)} tokens"):
            PackedRows(store, seq_len)
        return
    rows = PackedRows(store, seq_len)
    assert len(rows) * seq_len + rows.remainder == sum(lengths)
    assert rows.remainder < seq_len
    # Brute force: which document each token of the stream is of, and what follows it there.
    document_of = [document for document, length in enumerate(lengths) for _ in range(length)]
    stream = store.tokens.tolist()
    targets = [
        stream[at + 1] if at + 1 < len(stream) and document_of[at + 1] == document_of[at] else IGNORE
        for at in range(len(stream))
    ]
    for index in range(len(rows)):
        row, cut = rows.row(index), slice(index * seq_len, (index + 1) * seq_len)
        assert row.tokens.tolist() == stream[cut]
        assert row.targets.tolist() == targets[cut]
        assert row.segments.tolist() == [document - document_of[cut.start] + 1 for document in document_of[cut]]
        assert {part.dtype for part in row} == {np.dtype(np.int64)}
        assert {part.shape for part in row} == {(seq_len,)}


def test_a_document_over_two_rows_is_one_segment_in_each_and_keeps_its_target():
    rows = PackedRows(store_of([3, 6, 2]), 4)
    assert [row.segments.tolist() for row in map(rows.row, range(2))] == [[1, 1, 1, 2], [1, 1, 1, 1]]
    assert [row.tokens.tolist() for row in map(rows.row, range(2))] == [[0, 0, 26, 1], [1, 1, 1, 1]]
    assert [row.targets.tolist() for row in map(rows.row, range(2))] == [[0, 26, IGNORE, 1], [1, 1, 1, 26]]
    assert rows.remainder == 3


def test_boundaries_are_of_documents_not_of_token_ids():
    store = tokenise(Texts(("abba", "ab")), Characters("ab", end=False), None)
    row = PackedRows(store, 6).row(0)
    assert row.segments.tolist() == [1, 1, 1, 1, 2, 2]
    assert row.targets.tolist() == [1, 1, 0, IGNORE, 1, IGNORE]


def test_one_text_of_distinct_characters_repeated_fills_its_rows():
    sentence = "abcdefghijklmnopqab"
    tokenizer = Characters(sentence, end=False)
    rows = PackedRows(tokenise(Texts((sentence * 8,)), tokenizer, None), 38)
    assert (tokenizer.vocab_size, rows.store.n_tokens, len(rows), rows.remainder) == (17, 152, 4, 0)
    assert [int((rows.row(index).targets == IGNORE).sum()) for index in range(4)] == [0, 0, 0, 1]


def test_rows_refuse_what_cannot_be():
    store = store_of([5, 7])
    with pytest.raises(UserError, match=r"seq_len 13 is more than the data \(12 tokens in 2 documents\).* at most 12"):
        PackedRows(store, 13)
    with pytest.raises(UserError, match="seq_len is 0"):
        PackedRows(store, 0)
    with pytest.raises(AssertionError):
        PackedRows(store, 6).row(2)
    assert PackedRows(store, 6).fingerprint != PackedRows(store, 5).fingerprint


DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=14), min_size=1, max_size=25).filter(any)


@given(DOCUMENTS, st.integers(1, 16))
def test_packed_documents_lose_nothing(documents, seq_len):
    packed = pack_documents(documents, seq_len, longer="cut")
    assert packed.tokens.shape == packed.segments.shape == packed.origin.shape == (len(packed), seq_len)
    flat = [token for document in documents for token in document]
    found = Counter()
    for tokens, segments, origin in zip(packed.tokens, packed.segments, packed.origin, strict=True):
        used = int((segments > 0).sum())
        assert segments[:used].tolist() == sorted(segments[:used].tolist())
        assert set(segments[:used].tolist()) == set(range(1, segments.max() + 1))
        for rest, value in ((tokens, 0), (segments, 0), (origin, -1)):
            assert rest[used:].tolist() == [value] * (seq_len - used)
        assert tokens[:used].tolist() == [flat[at] for at in origin[:used]]
        for segment in range(1, segments.max() + 1):
            piece = origin[segments == segment]
            assert piece.tolist() == list(range(piece[0], piece[-1] + 1))
            found[(int(piece[0]), len(piece))] += 1
    at, wanted = 0, Counter()
    for document in documents:
        wanted.update((at + start, min(seq_len, len(document) - start)) for start in range(0, len(document), seq_len))
        at += len(document)
    assert found == wanted
    assert np.array_equal(packed.gather(documents, 0), packed.tokens)


@given(DOCUMENTS)
def test_packed_rows_are_few_and_targets_stay_inside(documents):
    packed = pack_documents(documents, 14)
    total = sum(map(len, documents))
    # Best fit leaves at most one row half empty.
    used = (packed.segments > 0).sum(axis=1)
    assert (used <= 7).sum() <= 1
    assert len(packed) <= max(1, 2 * total / 14 + 1)
    labels = Counter()
    for index in range(len(packed)):
        tokens, segments, targets = packed.row(index)
        for at in range(14):
            inside = at + 1 < 14 and segments[at] == segments[at + 1] != 0
            assert targets[at] == (tokens[at + 1] if inside else IGNORE)
        labels[True] += int((targets != IGNORE).sum())
    assert labels[True] == total - sum(1 for document in documents if document)


def test_packing_is_the_best_fit_and_gathers_alike():
    packed = pack_documents([[1] * 5, [2] * 3, [], [3] * 4, [4] * 4], 8)
    assert packed.segments.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 2, 2, 2, 2]]
    assert packed.tokens.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]]
    weights = [[0, 0, 0, 1, 1], [1, 0, 1], [], [0] * 4, [1] * 4]
    assert packed.gather(weights, 0).tolist() == [[0, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
    with pytest.raises(AssertionError, match="as many values"):
        packed.gather(weights[:-1], 0)


def test_packing_refuses_what_cannot_be():
    with pytest.raises(UserError, match="document 1 has 9 tokens, more than seq_len 8"):
        pack_documents([[1], [2] * 9], 8)
    with pytest.raises(UserError, match="no tokens to pack"):
        pack_documents([[], []], 8)
    with pytest.raises(UserError, match="seq_len is 0"):
        pack_documents([[1]], 0, longer="cut")

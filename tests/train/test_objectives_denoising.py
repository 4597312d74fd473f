"""T5's span corruption and what it was compared with: exact lengths, exact texts, and what is refused."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_toys import tiny

from phylon.data import IGNORE, Draws, Texts, tokenise
from phylon.model import build
from phylon.spec import UserError
from phylon.text import char_tokenizer
from phylon.train import train
from phylon.train.objectives import Denoising
from phylon.train.objectives.corruption import (
    Ids,
    IidSpans,
    IidTokens,
    RandomSpans,
    SplitPrefix,
    WholeText,
    partition,
    raw_length,
)
from phylon.train.objectives.denoising import CorruptedRows, joined_row
from phylon.train.recipe import model_spec

EOS = 1
IDS = Ids(sentinels=tuple(range(900, 1000)), eos=EOS, ordinary=np.arange(2, 900))
KINDS = [RandomSpans(), RandomSpans(share=0.5, mean_length=2.0), IidSpans(), IidTokens(), SplitPrefix(), WholeText()]


def restored(source: np.ndarray, target: np.ndarray) -> list[int]:
    """The raw text again: each mark of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1].tolist():
        if token in IDS.sentinels:
            spans[token] = current = []
        else:
            current.append(token)
    return [t for token in source[:-1].tolist() for t in spans.get(token, [token])]


def test_the_lengths_of_the_released_code():
    """512 tokens to read take 568 of raw text and give 114 to say, as in T5's own runs."""
    assert raw_length(RandomSpans(), 512, joined=False) == (568, 512, 114)
    assert raw_length(RandomSpans(), 128, joined=False).source == 128
    assert RandomSpans().lengths(568) == (568, 512, 114)
    # By hand: 20 tokens, round(3.0) = 3 hidden in round(1.0) = 1 span.
    assert RandomSpans().lengths(20) == (20, 20 - 3 + 1 + 1, 3 + 1 + 1)


@given(st.integers(8, 700), st.sampled_from([0.1, 0.15, 0.25, 0.5]), st.sampled_from([1.0, 2.0, 3.0, 5.0, 10.0]))
def test_every_length_is_filled_exactly_with_the_most_text(most, share, mean):
    spans = RandomSpans(share=share, mean_length=mean)
    raw, source, target = raw_length(spans, most, joined=False)
    assert max(source, target) <= most
    longer = spans.lengths(raw + 1)
    assert max(longer.source, longer.target) > most
    assert source == most or longer.target > most, "no row is padded"


@given(st.integers(2, 300), st.integers(0, 1000), st.sampled_from(KINDS))
def test_source_and_target_have_the_lengths_that_are_promised(length, index, corruption):
    tokens = np.arange(2, 2 + length)
    source, target = corruption.apply(tokens, IDS, Draws(3, 1, index))
    promised = corruption.lengths(length)
    assert len(source) <= promised.source
    assert len(target) <= promised.target
    assert source[-1] == target[-1] == EOS
    if isinstance(corruption, RandomSpans):
        assert (len(source), len(target)) == promised[1:]
    if isinstance(corruption, RandomSpans | IidSpans):
        assert restored(source, target) == tokens.tolist()
        marks = [t for t in source.tolist() if t in IDS.sentinels]
        assert marks == list(IDS.sentinels[: len(marks)]) == [t for t in target.tolist() if t in IDS.sentinels]
        assert len(marks) <= corruption.n_sentinels(length)
        hidden = len(target) - len(marks) - 1
        assert hidden == min(max(round(corruption.share * length), 1), length - 1)
        assert not any(a in IDS.sentinels and b in IDS.sentinels for a, b in pairwise(source.tolist()))
    again = corruption.apply(tokens, IDS, Draws(3, 1, index))
    assert source.tolist() == again[0].tolist()


def test_the_spans_are_three_tokens_on_average_and_every_place_is_hidden_now_and_then():
    tokens, lengths, places = np.arange(2, 570), [], np.zeros(568)
    for index in range(300):
        source, target = RandomSpans().apply(tokens, IDS, Draws(0, 0, index))
        at = np.flatnonzero(np.isin(target, IDS.sentinels))
        lengths += np.diff([*at, len(target) - 1]).tolist()
        places[np.setdiff1d(np.arange(568), source - 2)] += 1
        assert source[0] == 2, "a text starts with what stays"
    spans = np.array(lengths) - 1
    assert spans.mean() == pytest.approx(85 / 28)
    assert spans.min() == 1
    assert spans.max() > 8
    assert places[1:].min() > 10
    assert places.mean() == pytest.approx(300 * 85 / 568)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_partition_sums_up(total, parts):
    if parts > total:
        return
    found = partition(total, parts, Draws(0, 0, 1))
    assert found.sum() == total
    assert len(found) == parts
    assert found.min() >= 1


def test_every_partition_is_equally_likely():
    found = Counter(tuple(partition(5, 3, Draws(0, 0, index)).tolist()) for index in range(6000))
    assert len(found) == math.comb(4, 2)
    assert max(abs(count - 1000) for count in found.values()) < 4 * math.sqrt(1000 * 5 / 6)


def test_what_the_other_objectives_read_and_say():
    tokens = np.arange(10, 30)
    source, target = IidTokens(share=0.15, random=0.0).apply(tokens, IDS, Draws(0, 0, 0))
    assert target.tolist() == [*tokens, EOS]
    assert (source == IDS.sentinels[0]).sum() == 3
    assert (source[:-1][source[:-1] != IDS.sentinels[0]] == tokens[source[:-1] != IDS.sentinels[0]]).all()
    source, target = IidTokens(share=0.15, random=1.0).apply(tokens, IDS, Draws(0, 0, 0))
    assert not np.isin(source, IDS.sentinels).any()
    assert (source[:-1] != tokens).sum() == 3
    source, target = SplitPrefix().apply(tokens, IDS, Draws(0, 0, 5))
    assert [*source[:-1], *target] == [*tokens, EOS]
    cuts = {len(SplitPrefix().apply(tokens, IDS, Draws(0, 0, i))[0]) - 1 for i in range(300)}
    assert cuts == set(range(1, 20))
    source, target = WholeText().apply(tokens, IDS, Draws(0, 0, 0))
    assert (source.tolist(), target.tolist()) == ([EOS], [*tokens, EOS])


def test_a_row_for_a_decoder_alone():
    row = {k: v.tolist() for k, v in joined_row(np.array([5, 6, EOS]), np.array([7, 8, EOS]), 7, pad=0).items()}
    no = IGNORE
    assert row["tokens"] == [5, 6, EOS, 7, 8, 0, 0]
    assert row["targets"] == [no, no, 7, 8, EOS, no, no]
    assert row["marks"] == [1, 1, 1, 0, 0, 0, 0]
    assert row["segments"] == [1, 1, 1, 1, 1, 0, 0]


def rows(corruption, joined=False, seed=0):
    text = "the cat sat on the mat and saw a dog in the yard. " * 12
    tokenizer = char_tokenizer(text, specials=Denoising().reserved())
    store = tokenise(Texts((text,)), tokenizer, None, end=())
    lengths = raw_length(corruption, 40 + joined, joined=joined)
    ids = Ids(tokenizer.sentinel_ids, tokenizer.eos_ids[0], np.arange(102, tokenizer.vocab_size))
    return CorruptedRows(store, corruption, lengths, ids, tokenizer.pad_id, seed, joined=joined), tokenizer


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("corruption", KINDS, ids=repr)
def test_rows_are_of_one_shape_and_drawn_anew_every_epoch(corruption, joined):
    mine, _ = rows(corruption, joined)
    shapes = {tuple((k, v.shape) for k, v in mine.example(i, e).items()) for i in range(len(mine)) for e in range(3)}
    assert len(shapes) == 1
    assert max(v.shape[0] for v in mine.example(0, 0).values()) <= 40

    def flat(index, epoch):
        return np.concatenate(list(mine.example(index, epoch).values()))

    assert all((flat(i, 1) == flat(i, 1)).all() for i in range(len(mine)))
    if not isinstance(corruption, WholeText):
        assert sum((flat(i, 0) != flat(i, 1)).any() for i in range(len(mine))) > 0.8 * len(mine)


def test_a_row_is_filled_and_the_decoder_reads_what_it_has_said():
    mine, tokenizer = rows(RandomSpans())
    row = mine.example(2, 0)
    assert (row["source_segments"] == 1).all()
    assert (row["segments"] == 1).all()
    assert row["source"].shape == (40,)
    assert row["tokens"][0] == tokenizer.pad_id
    assert (row["tokens"][1:] == row["targets"][:-1]).all()
    assert row["targets"][-1] == tokenizer.eos_ids[0]


def test_the_source_counts_only_where_the_prefix_is_marked():
    """With Causal | Prefix the first token sees the last of the source; without marks it would not."""
    spec = model_spec(tiny("denoising", 3), 130)
    model = build(spec, seed=0, device="cpu").eval()
    mine, _ = rows(SplitPrefix(), joined=True)
    row = {k: torch.from_numpy(v)[None] for k, v in mine.example(0, 0).items()}
    prefix = int(row["marks"].sum())
    changed = row["tokens"].clone()
    changed[0, prefix - 1] = 105 + (int(changed[0, prefix - 1]) == 105)
    for marks, moves in ((row["marks"], True), (None, False)):
        one, two = (model(t, segments=row["segments"], marks=marks).hidden[0, 0] for t in (row["tokens"], changed))
        assert (not torch.equal(one, two)) == moves


def test_balance_counts_each_stacks_own_tokens():
    objective = Denoising(balance=0.01, z_loss=0.001)
    segments, source = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    batch = {
        "segments": segments,
        "source_segments": source,
        "targets": torch.tensor([[5, 1, IGNORE], [1, IGNORE, IGNORE]]),
    }
    assert objective.counts(batch) == {
        "lm": 3,
        "decoder.balance": 2,
        "decoder.z_loss": 3,
        "encoder.balance": 2,
        "encoder.z_loss": 7,
    }
    assert objective.n_tokens(batch) == 10


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (0, {"model": {"family": "bert"}}, "denoising trains a decoder that says text"),
        (0, {"data.seq_len": 2}, "data.seq_len 2 is too short"),
        (0, {"objective.corruption.share": 1.0}, "share must lie between 0 and 1"),
        (0, {"objective.corruption.mean_length": 0.5}, "mean_length must be at least 1"),
        (0, {"objective.corruption": "random_span"}, "did you mean 'random_spans'"),
        (0, {"objective.n_sentinels": 0}, "raise objective.n_sentinels"),
        (0, {"data.source.texts": ["a few words."]}, "too few to hold out"),
    ],
)
def test_mistakes_are_one_line(tmp_path, number, changes, words):
    with pytest.raises(UserError) as caught:
        train(tiny("denoising", number), out=tmp_path / "run", overrides=changes, device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()

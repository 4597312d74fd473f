"""BERT's two tasks: shares, marks, pairs, rows, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_toys import DATA, ENCODER, tiny

from phylon.data import IGNORE, Draws, Texts, tokenise
from phylon.data.sentences import sentences
from phylon.model import build
from phylon.spec import UserError
from phylon.text.train import char_tokenizer, train_bpe, train_unigram
from phylon.text.wordpiece import train_wordpiece
from phylon.train import recipe_from_toml, train
from phylon.train.objectives.masked_language import MaskedRows
from phylon.train.objectives.masking import Masker, Pieces, WholeWords, ordinary_ids, words_of
from phylon.train.objectives.pairs import Chunks, FullSentences, Marks, NextSentence, PairedTexts, truncated

MARKS = Marks(cls=1, sep=2, pad=0)
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


def word(number: int) -> str:
    return chr(ord("a") + number % 26) * 3


def store_of(documents: list[list[str]]):
    """A store of documents given as sentences, one id a character; ids 0 to 3 are the marks."""
    texts = tuple("\n".join(document) for document in documents)
    tokenizer = char_tokenizer("".join(texts), specials=SPECIALS)
    return tokenise(Texts(texts), tokenizer, None, end=(), cut=sentences), tokenizer


def some_documents(n_documents: int = 12, n_sentences: int = 9):
    return store_of([[word(d + s) * (1 + (3 * d + s) % 5) for s in range(n_sentences)] for d in range(n_documents)])


def masker(unit=Pieces(), **shares) -> Masker:  # noqa: B008 - frozen
    goes_on = np.zeros(200, bool)
    kept = {"share": 0.15, "masked": 0.8, "random": 0.1, **shares}
    return Masker(**kept, unit=unit, mask_id=3, ordinary=np.arange(4, 200), words=words_type(goes_on))


def words_type(goes_on: np.ndarray):
    from phylon.train.objectives.masking import Words

    return Words(goes_on, np.ones(len(goes_on), bool))


def test_sentences_are_lines_and_what_ends_with_a_stop():
    text = 'One. Two?  "Three!" Four\nfive.six 7.5\n\n  \n    indented = 1\n'
    assert sentences(text) == ["One. ", "Two?  ", '"Three!" ', "Four", "five.six 7.5", "    indented = 1"]
    assert "".join(sentences("a. b. c")) == "a. b. c"


def test_the_shares_are_those_of_the_paper():
    """15 % of the tokens exactly (rounded a row); 80/10/10 of them, within four standard errors of 60,000 draws."""
    tokens = np.tile(np.arange(4, 200), 11)[:2000]
    free = np.ones(2000, bool)
    free[::10] = False
    hide, counted = masker(), np.zeros(4)
    places = np.zeros(2000)
    for index in range(220):
        read, targets = hide(tokens, free, Draws(1, 0, index))
        hidden = targets != IGNORE
        assert int(hidden.sum()) == round(0.15 * 1800)
        assert not hidden[~free].any()
        assert (targets[hidden] == tokens[hidden]).all()
        assert (read[~hidden] == tokens[~hidden]).all()
        places += hidden
        masked, same = read[hidden] == 3, read[hidden] == tokens[hidden]
        counted += [hidden.sum(), masked.sum(), same.sum(), (~masked & ~same).sum()]
        assert (read[hidden & (read != 3)] >= 4).all(), "a random token is an ordinary one"
    n, masked, same, other = counted
    for found, share in ((masked, 0.8), (same, 0.1 + 0.1 / 196), (other, 0.1 * 195 / 196)):
        assert abs(found / n - share) < 4 * math.sqrt(share * (1 - share) / n), (found / n, share)
    assert places[free].min() > 10, "every place is hidden now and then"


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.integers(0, 99))
def test_the_number_of_hidden_tokens_is_exact(length, share, index):
    _, targets = masker(share=share)(np.arange(4, 4 + length), np.ones(length, bool), Draws(0, 0, index))
    assert (targets != IGNORE).sum() == min(length, max(1, math.floor(share * length + 0.5)))


def test_a_row_without_free_tokens_hides_none():
    read, targets = masker()(np.array([1, 2]), np.zeros(2, bool), Draws(0, 0, 0))
    assert read.tolist() == [1, 2]
    assert (targets == IGNORE).all()


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(0, 50))
def test_whole_words_are_hidden_whole_or_not_at_all(begins, index):
    tokens = np.where(begins, 10, 11)
    goes_on = np.zeros(200, bool)
    goes_on[11] = True
    hide = masker(WholeWords(), share=0.4)._replace(words=words_type(goes_on))
    _, targets = hide(tokens, np.ones(len(tokens), bool), Draws(4, 0, index))
    hidden = targets != IGNORE
    assert hidden.sum() <= max(1, math.floor(0.4 * len(tokens) + 0.5))
    starts = np.flatnonzero(np.array([True, *begins[1:]]))
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        assert len(set(hidden[start:stop].tolist())) == 1


@pytest.mark.parametrize("train_one", ["wordpiece", "unigram", "bpe"])
def test_words_are_seen_in_every_kind_of_vocabulary(train_one):
    text = "unbelievable things happen, unbelievable days (happening) 2024 " * 4
    made = {
        "wordpiece": lambda: train_wordpiece([text], 48, specials=("[UNK]", *SPECIALS)),
        "unigram": lambda: train_unigram([text], 45),
        "bpe": lambda: train_bpe([text], 268),
    }[train_one]()
    ids = np.array(made.encode("unbelievable things (happen)", special=False))
    continues = words_of(made).continues(ids, np.ones(len(ids), bool))
    words: list[str] = []
    for i, joined in zip(ids, continues, strict=True):
        piece = made.token(int(i)).removeprefix("##").replace("Ġ", " ").replace("▁", " ")
        words = [*words[:-1], words[-1] + piece] if joined else [*words, piece]
    assert [w.strip() for w in words if "unb" in w or "thin" in w] == ["unbelievable", "things"]
    assert len(ids) > len(words), "some word is of several pieces, or the test says nothing"


def rows(pairs=None, seq_len=32, seed=7):
    store, tokenizer = some_documents()
    texts = FullSentences(store, seq_len, MARKS) if pairs is None else PairedTexts(store, seq_len, MARKS, pairs)
    words = words_of(tokenizer)
    hide = Masker(0.15, 0.8, 0.1, Pieces(), 3, ordinary_ids(tokenizer), words)
    return MaskedRows(texts, hide, seed)


@pytest.mark.parametrize("pairs", [None, NextSentence()])
def test_an_example_is_a_pure_function_of_seed_epoch_and_index(pairs):
    mine, same, other = rows(pairs), rows(pairs), rows(pairs, seed=8)

    def flat(source, index, epoch):
        return np.concatenate([np.atleast_1d(array) for array in source.example(index, epoch).values()])

    for index in range(len(mine)):
        assert (flat(mine, index, 3) == flat(same, index, 3)).all()
    for changed in (lambda i: flat(mine, i, 4), lambda i: flat(other, i, 3)):
        moved = [(flat(mine, i, 3) != changed(i)).any() for i in range(len(mine))]
        assert sum(moved) > 0.9 * len(mine), "hidden anew in every epoch, and under every seed"
    assert mine.fingerprint == same.fingerprint


def test_pairs_follow_each_other_or_come_from_another_document():
    store, _ = some_documents()
    chunks = Chunks(store, 29)
    labels = []
    for index in range(len(chunks)):
        for epoch in range(30):
            draws = Draws(0, epoch, index)
            first, second, label = NextSentence().pair(chunks, index, draws)
            labels.append(label)
            start, stop = chunks.span(index)
            assert (first == store.tokens[start : start + len(first)]).all()
            assert len(first) >= 1 <= len(second)
            if not label:
                assert (second == store.tokens[start + len(first) : stop]).all()
                inside = [at for at in store.pieces if start < at < stop]
                assert start + len(first) in (inside or [(start + stop) // 2]), "the middle of a single sentence"
    share = np.mean(labels)
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(len(labels)), "half follow, half are random"


def test_a_random_second_sentence_is_never_of_the_same_document():
    # Each document is written in one letter, so that a span says where it is from.
    store, _ = store_of([[chr(97 + d) * (2 + s) for s in range(6)] for d in range(5)])
    chunks = Chunks(store, 12)
    seen = set()
    for index in range(len(chunks)):
        for epoch in range(20):
            first, second, label = NextSentence(random=1.0).pair(chunks, index, Draws(0, epoch, index))
            assert label == 1
            assert len(set(first)) == len(set(second)) == 1
            assert first[0] != second[0]
            assert len(second) <= max(1, 12 - len(first))
            seen.add(int(second[0]))
    assert len(seen) == 5


def test_a_pair_as_a_row():
    store, tokenizer = store_of([["aa", "bbb"], ["cc", "dd"]])
    texts = PairedTexts(store, 12, MARKS, NextSentence(random=0.0))
    text = texts.text(0, Draws(0, 0, 0))
    a, b = tokenizer.id("a"), tokenizer.id("b")
    assert text.tokens.tolist() == [1, a, a, 2, b, b, b, 2, 0, 0, 0, 0]
    assert text.types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert text.segments.tolist() == [1] * 8 + [0] * 4
    assert text.free.tolist() == [False, True, True, False, True, True, True, False, False, False, False, False]
    assert text.label == 0


@given(st.integers(0, 30), st.integers(0, 30), st.integers(2, 40), st.integers(0, 9))
def test_what_is_too_long_is_cut_from_the_longer_one(n, m, most, index):
    a, b = truncated(np.arange(n), np.arange(100, 100 + m), most, Draws(0, 0, index))
    assert len(a) + len(b) == min(n + m, most)
    for span in (a, b):
        assert (np.diff(span) == 1).all(), "one run of the text"
    if n + m > most:
        assert abs(len(a) - len(b)) <= 1 or len(a) == n < len(b) or len(b) == m < len(a)


def test_full_sentences_hold_every_token_once_with_a_mark_at_every_end():
    store, tokenizer = store_of([["aa", "bbb"], ["c", "dddddddddddd"], ["ee"]])
    found = [FullSentences(store, 10, MARKS).text(i, Draws(0, 0, 0)) for i in range(3)]
    decoded = ["".join(tokenizer.token(i) for i in t.tokens[t.segments == 1].tolist()) for t in found]
    assert decoded == ["[CLS]aabbb[SEP]c[SEP]", "[CLS]dddddddd[SEP]", "[CLS]dddd[SEP]ee[SEP]"]
    text = "".join(decoded).replace("[CLS]", "").replace("[SEP]", "")
    assert text == "aabbbcddddddddddddee"
    assert all(len(t.tokens) == 10 for t in found)
    assert not any(t.free[np.isin(t.tokens, [0, 1, 2])].any() for t in found)


@given(st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(8, 20))
def test_full_sentences_lose_nothing(lengths, seq_len):
    store, _ = store_of([[chr(97 + i % 20) * n for i, n in enumerate(document)] for document in lengths])
    texts = FullSentences(store, seq_len, MARKS)
    parts = [texts.text(i, Draws(0, 0, 0)) for i in range(len(texts))]
    assert np.concatenate([t.tokens[t.free] for t in parts]).tolist() == store.tokens.tolist()
    assert {len(t.tokens) for t in parts} == {seq_len}


def test_the_loss_is_the_sum_of_the_two_means_and_that_of_plain_pytorch(tmp_path):
    recipe = tiny("masked_language")
    recipe = recipe.replace(model=recipe.model | {"dropout": 0.0}, run=recipe.run.replace(steps=1))
    result = train(recipe, out=tmp_path, device="cpu")
    from phylon.train import read_metrics

    records = {r["kind"]: r for r in read_metrics(tmp_path / "metrics.jsonl")}
    step, evaluated = records["step"], records["eval"]
    assert step["loss"] == pytest.approx(step["losses"]["mlm"] + step["losses"]["nsp"])
    assert evaluated["loss"] == pytest.approx(evaluated["metrics"]["mlm"] + evaluated["metrics"]["nsp"])
    assert set(evaluated["metrics"]) == {"mlm", "nsp", "mlm_accuracy", "nsp_accuracy"}

    def batch(seed):
        return {name: torch.from_numpy(np.stack([r.example(i, 0)[name] for i in range(4)])) for name in r.example(0, 0)}

    r = rows(NextSentence(), seq_len=24)
    given = batch(0)
    given["tokens"] = given["tokens"] % result.tokenizer.vocab_size
    given["mlm"] = torch.where(given["mlm"] < 0, given["mlm"], given["mlm"] % result.tokenizer.vocab_size)
    model = result.model
    out = model(given["tokens"], segments=given["segments"], types=given["types"])
    losses = recipe.objective.measure(model, given)
    wanted = torch.nn.functional.cross_entropy(out.heads["mlm"].flatten(0, 1), given["mlm"].flatten())
    torch.testing.assert_close(losses["mlm"].mean, wanted)
    torch.testing.assert_close(losses["nsp"].mean, torch.nn.functional.cross_entropy(out.heads["nsp"], given["nsp"]))
    known = given["mlm"] != IGNORE
    right = (out.heads["mlm"].argmax(-1)[known] == given["mlm"][known]).sum()
    assert (int(losses["mlm_accuracy"].sum), int(losses["mlm_accuracy"].count)) == (int(right), int(known.sum()))
    assert recipe.objective.counts(given) == {"mlm": int(known.sum()), "nsp": 4}


def test_a_batch_without_hidden_tokens_is_a_loss_of_zero():
    spec = tiny("masked_language")
    from phylon.train.recipe import model_spec

    model = build(model_spec(spec, 30), seed=0, device="cpu")
    tokens = torch.ones(2, 6, dtype=torch.int64)
    out = model(tokens, targets={"mlm": torch.full_like(tokens, IGNORE)}, logits="none")
    out.losses["mlm"].sum.backward()
    assert (float(out.losses["mlm"].sum.detach()), int(out.losses["mlm"].count)) == (0.0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.heads": ["nsp"]}, "needs a head 'mlm' (MaskedLM); this model has nsp"),
        ({"model.heads": ["mlm"]}, "objective.pairs needs a head 'nsp' (Classify); this model has mlm"),
        ({"model.n_types": 1}, "set model.n_types to 2"),
        ({"model": {"family": "llama"}}, "masked_language trains an encoder alone"),
        ({"data.seq_len": 25}, "data.seq_len 25 is more than the model's max_seq_len 24"),
        ({"data.seq_len": 7}, "data.seq_len must be at least 8"),
        ({"objective.share": 0.0}, "share must lie between 0 and 1"),
        ({"objective.masked": 0.95}, "masked and random are shares"),
        ({"objective.unit": "whole_word"}, "did you mean 'whole_words'"),
        ({"objective.pair": "next_sentence"}, "did you mean 'pairs'"),
        ({"data.source.texts": ["one single document. it has two sentences."]}, "drawn from other documents"),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, words):
    with pytest.raises(UserError) as caught:
        train(tiny("masked_language"), out=tmp_path / "run", overrides=changes, device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_without_a_mask_is_refused(tmp_path):
    char_tokenizer("abc. \n" + "".join(map(chr, range(97, 123)))).save(tmp_path / "plain")
    changes = {"data.tokenizer": {"kind": "load", "path": str(tmp_path / "plain")}}
    with pytest.raises(UserError, match=r"this vocabulary has no \[MASK\], \[CLS\], \[SEP\], \[PAD\]"):
        train(tiny("masked_language"), out=tmp_path / "run", overrides=changes, device="cpu")


def test_a_wordpiece_run_saves_its_marks_and_loads_as_bert(tmp_path):
    """The family that the recipe names is the format; the tokenizer says its marks again after a round trip."""
    from phylon import hub

    text = "schema = 1\n" + ENCODER + DATA.replace('"char"', '"wordpiece", vocab_size = 90')
    text += '[objective]\nkind = "masked_language"\npairs = "next_sentence"\n[run]\nsteps = 2\n'
    result = train(recipe_from_toml(text), out=tmp_path / "run", device="cpu")
    assert result.model.family == "bert"
    loaded = hub.load(tmp_path / "run" / "model", device="cpu")
    assert loaded.family == "bert"
    found = loaded.tokenizer
    names = [found.token(i) for i in (found.cls_id, found.sep_id, found.mask_id, found.pad_id)]
    assert names == ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    hub.save(loaded, tmp_path / "hf", format="hf")
    assert '"BertForPreTraining"' in (tmp_path / "hf" / "config.json").read_text()

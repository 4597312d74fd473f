"""Trained vocabularies: what they promise, and the definition of WordPiece's merges."""

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.spec.errors import UserError
from phylon.text import char_tokenizer, load_tokenizer, train_bpe, train_unigram, train_wordpiece
from phylon.text.wordpiece import likelihood_merges

TEXTS = ["The cat sat on the mat, the cats sat on mats.", "A hat! A bat? That rat.", "Zürich 司機 12 12 12"] * 5


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_bpe_encodes_everything(text):
    tokenizer = BPE
    assert tokenizer.decode(tokenizer.encode(text)) == text


BPE = train_bpe(TEXTS, 290)


def test_bpe_layout():
    assert BPE.vocab_size == 290
    assert (BPE.token(0), BPE.bos_id, BPE.eos_ids, BPE.pad_id) == ("<|endoftext|>", 0, (0,), 0)
    assert sorted(len(BPE.token(id)) for id in range(1, 257)) == [1] * 256
    assert BPE.encode("a<|endoftext|>") == [BPE.id("a"), 0]
    assert [BPE.backend.to_str()] * 2 == [train_bpe(iter(TEXTS), 290).backend.to_str() for _ in range(2)]


@settings(deadline=None, max_examples=100)
@given(
    counts=st.dictionaries(st.text("abc", min_size=1, max_size=7), st.integers(1, 9), min_size=1, max_size=8),
    least=st.integers(1, 3),
)
def test_wordpiece_merges_are_the_best_by_definition(counts, least):
    spelled = {word: [word[0], *("##" + char for char in word[1:])] for word in sorted(counts)}
    naive = {word: list(symbols) for word, symbols in spelled.items()}
    for left, right, joined in likelihood_merges(spelled, counts, least):
        scores, frequency = naive_scores(naive, counts, least)
        assert scores[left, right] == max(scores.values())
        equal = [frequency[pair] for pair, score in scores.items() if score == scores[left, right]]
        assert frequency[left, right] == max(equal)
        for symbols in naive.values():
            i = 0
            while i < len(symbols) - 1:
                if (symbols[i], symbols[i + 1]) == (left, right):
                    symbols[i : i + 2] = [joined]
                i += 1
    assert naive == spelled
    assert not naive_scores(naive, counts, least)[0]


def naive_scores(words, counts, least):
    symbols, pairs = Counter(), Counter()
    for word, spelling in words.items():
        for symbol in spelling:
            symbols[symbol] += counts[word]
        for pair in pairwise(spelling):
            pairs[pair] += counts[word]
    scores = {(a, b): Fraction(n, symbols[a] * symbols[b]) for (a, b), n in pairs.items() if n >= least}
    return scores, pairs


def test_wordpiece_prefers_likelihood_to_frequency():
    # "th" is met most, but "qu" always goes together: its gain is larger.
    text = "the tha tho thi hat hit oat tea that this quo qua"
    tokenizer = train_wordpiece([text] * 3, 5 + 16)
    assert tokenizer.id("qu") is not None
    assert tokenizer.id("th") is None


def test_wordpiece_is_berts_format(tmp_path):
    tokenizer = train_wordpiece(TEXTS, 80)
    assert tokenizer.vocab_size <= 80
    ids = tokenizer.encode("The CATS zurich")
    assert [tokenizer.token(ids[0]), tokenizer.token(ids[-1])] == ["[CLS]", "[SEP]"]
    assert tokenizer.decode(ids, skip_special=True) == "the cats zurich"
    assert tokenizer.encode_pair("cat", "mat")[1][-1] == 1
    assert tokenizer.token(tokenizer.encode("ж", special=False)[0]) == "[UNK]"
    (tmp_path / "vocab.txt").write_text("".join(tokenizer.token(i) + "\n" for i in range(tokenizer.vocab_size)))
    again = load_tokenizer(tmp_path)
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)
    cased = train_wordpiece(TEXTS, 80, lowercase=False)
    assert cased.id("T") is not None


def test_unigram(tmp_path):
    tokenizer = train_unigram(TEXTS, 60)
    assert tokenizer.vocab_size <= 60
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, 1, (2,), 3)
    text = "the cat sat on that mat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


def test_characters_in_sorted_order(tmp_path):
    text = "今天天气很好，\n好 好"
    tokenizer = char_tokenizer(text * 8)
    assert [tokenizer.token(i) for i in range(tokenizer.vocab_size)] == sorted(set(text))
    assert tokenizer.encode(text) == [sorted(set(text)).index(char) for char in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stream = tokenizer.stream()
    assert [stream.push(id) for id in tokenizer.encode("好 今")] == ["好", " ", "今"]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["好", text])):
        with pytest.raises(UserError, match="character 'x' is not in the vocabulary of 8 characters"):
            encode("好x")


@pytest.mark.parametrize("train", [train_bpe, train_wordpiece, train_unigram])
def test_impossible_training(train):
    with pytest.raises(UserError, match=r"vocab_size 20 is too small: .* alone are"):
        train(TEXTS, 20)
    for texts in ([], [""], ["", " \n"]):
        with pytest.raises(UserError, match="no text to train"):
            train(texts, 300)


def test_other_bad_training():
    with pytest.raises(UserError, match="no text to take characters from"):
        char_tokenizer("")
    with pytest.raises(UserError, match="needs '<unk>'"):
        train_unigram(TEXTS, 100, specials=())
    with pytest.raises(UserError, match=r"needs \[CLS\], \[SEP\]"):
        train_wordpiece(TEXTS, 100, specials=("[UNK]",))


def test_text_needs_no_torch():
    code = (
        "import sys, phylon.text; print([m for m in ('torch', 'jinja2', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Measures of predictions, against values worked out by hand and peers where they are installed."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phylon.spec import UserError
from phylon.train.measures import (
    accuracy,
    bleu,
    exact_match,
    f1_of,
    macro_f1,
    mean_squared_error,
    normalised_answer,
    pearson,
    ranks,
    retrieval_accuracy,
    spearman,
    token_f1,
)


def test_accuracy_and_f1_by_hand():
    said, right = [1, 1, 0, 1, 2, 2], [1, 0, 0, 1, 2, 1]
    assert accuracy(said, right) == pytest.approx(4 / 6)
    # Class 1: 2 hits, 3 predicted, 3 labels; class 0: 1, 1, 2; class 2: 1, 2, 1.
    assert [f1_of(said, right, which) for which in (0, 1, 2)] == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert f1_of([1, 1, 1, 0], [1, 0, 0, 0], 1) == pytest.approx(2 * 1 / (3 + 1))
    assert macro_f1([1, 1, 1, 0], [1, 0, 0, 0]) == pytest.approx((0.5 + 2 * 1 / (1 + 3)) / 2)
    assert macro_f1([0, 3], [0, 0]) == pytest.approx((2 / 3 + 0) / 2)  # a class that is only predicted counts
    assert f1_of([0], [0], 1) == 0.0


def test_answers_are_compared_as_squad_does():
    assert normalised_answer("  The  Rock's, an `Answer'!") == "rocks answer"
    assert normalised_answer("Theatre a-the b") == "theatre athe b"  # articles are whole words, after punctuation
    assert exact_match("The Eiffel Tower.", ["tower", "eiffel tower"]) == 1.0
    assert exact_match("Eiffel", ["eiffel tower"]) == 0.0
    assert token_f1("in the Eiffel Tower", ["Eiffel Tower", "Paris"]) == pytest.approx(2 * 2 / (3 + 2))
    assert token_f1("a b b c", ["b b b"]) == pytest.approx(2 * 2 / (3 + 3))  # 'a' is an article; the count is clipped
    assert (token_f1("", [""]), token_f1("the", [""]), token_f1("x", [""])) == (1.0, 1.0, 0.0)


def test_equal_values_share_their_mean_rank():
    assert ranks([10, 20, 20, 5, 20]).tolist() == [2, 4, 4, 1, 4]
    assert spearman([1, 2, 3, 4], [10, 100, 1000, 10_000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5, squares 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 5, 3, 9]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0
    assert mean_squared_error([1, 2], [3, 2]) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=20))
def test_spearman_sees_only_the_order(pairs):
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    found = spearman(xs, ys)
    assert -1 - 1e-9 <= found <= 1 + 1e-9
    assert spearman([x**3 + 7 for x in xs], ys) == pytest.approx(found)
    assert spearman([-x for x in xs], ys) == pytest.approx(-found)
    assert pearson(ys, xs) == pytest.approx(pearson(xs, ys))


def test_retrieval_finds_its_own():
    eye = np.eye(3)
    assert retrieval_accuracy(eye, 5 * eye) == 1.0
    assert retrieval_accuracy(eye, eye[[1, 0, 2]]) == pytest.approx(1 / 3)
    assert retrieval_accuracy(np.ones((4, 2)), np.ones((4, 2))) == pytest.approx(1 / 4)


def test_bleu_by_hand():
    pytest.importorskip("sacrebleu")
    score, signature = bleu(["the cat sat on the mat"], ["the cat sat on a mat"])
    # Precisions 5/6, 3/5, 2/4, 1/3; equal lengths, so no penalty.
    assert score == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert "tok:13a" in signature
    assert "smooth:exp" in signature
    short, _ = bleu(["the cat sat on"], ["the cat sat on the mat"])
    assert short == pytest.approx(100 * np.exp(1 - 6 / 4))


def test_bleu_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(UserError, match=r"pip install 'phylon\[translate\]'"):
        bleu(["a"], ["a"])


@pytest.mark.parametrize("measure", [accuracy, macro_f1, spearman, pearson, mean_squared_error])
def test_nothing_to_measure_is_said(measure):
    with pytest.raises(UserError, match="no labels"):
        measure([], [])
    with pytest.raises(UserError, match="2 predictions and 1 labels"):
        measure([1, 2], [1])

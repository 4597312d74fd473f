"""Beam search against every continuation there is."""

import itertools

import gen_toys as toys
import pytest

from phylon.generate import beam_search, generate
from phylon.patterns import Window
from phylon.spec import UserError

V, EOS = 5, 4


def every_continuation(made, prompt, steps, penalty):
    """``(score, tokens)`` of all continuations that end with EOS or after ``steps`` tokens, best first."""
    found = []
    for length in range(1, steps + 1):
        for tokens in itertools.product(range(V), repeat=length):
            if EOS in tokens[:-1] or (length < steps and tokens[-1] != EOS):
                continue
            logprobs = toys.whole_logits(made, [*prompt, *tokens]).log_softmax(-1)
            total = sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens))
            found.append((total / length**penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("options", [{}, {"pattern": Window(size=3)}])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_wide_beam_finds_the_best_of_all(options, penalty):
    made = toys.model(tokenizer=False, vocab_size=V, seed=3, **options)
    prompt = [1, 2, 3, 0]
    expected = every_continuation(made, prompt, 3, penalty)
    rows = beam_search(made, [prompt], n_beams=150, max_new_tokens=3, length_penalty=penalty, eos_ids=[EOS])[0]
    assert [row["tokens"] for row in rows[:10]] == [tokens for _, tokens in expected[:10]]
    assert [row["score"] for row in rows] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_one_beam_is_greedy_and_more_are_no_worse():
    made = toys.model()
    prompts = ["hello", "the Answer"]
    greedy = generate(made, prompts, max_new_tokens=8, temperature=0)
    narrow = beam_search(made, prompts, n_beams=1, max_new_tokens=8)
    wide = beam_search(made, prompts, n_beams=6, max_new_tokens=8, prefill_chunk=2)
    for one, row, best in zip(greedy, narrow, wide, strict=True):
        assert (row[0]["tokens"], row[0]["text"]) == (one["tokens"], one["text"])
        assert best[0]["score"] >= row[0]["score"] - 1e-6
        assert [r["score"] for r in best] == sorted((r["score"] for r in best), reverse=True)


def test_case_23_the_length_penalty_divides_by_the_new_tokens():
    made = toys.model()
    row = beam_search(made, [[1] * 8], max_new_tokens=5, eos_ids=())[0][0]
    assert len(row["tokens"]) == 5
    assert row["score"] == pytest.approx(sum(row["logprobs"]) / 5)
    squared = beam_search(made, [[1] * 8], max_new_tokens=5, eos_ids=(), length_penalty=2.0)[0][0]
    assert squared["score"] == pytest.approx(sum(squared["logprobs"]) / 25)


def test_bad_input():
    for options, word in (({"n_beams": 0}, "n_beams"), ({"length_penalty": -1}, "length_penalty")):
        with pytest.raises(UserError, match=word):
            beam_search(toys.model(), "a", **options)

"""Scores of given texts against whole passes; choices by character span."""

import json
import math

import gen_toys as toys
import pytest

import phylon.generate.scoring as module
from phylon.generate import generate, score, score_choices
from phylon.patterns import Window
from phylon.spec import UserError


def direct(made, ids, start=1):
    logprobs = toys.whole_logits(made, ids).log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]


@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("options", [{}, {"pattern": Window(size=4)}, {"learned": True}])
def test_scores_equal_whole_passes_batched_and_in_chunks(monkeypatch, chunk, options):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    made = toys.model(**options)
    texts = ["hello there", "a,", "the Answer is 司é, xyz", [5, 6, 7, 8]]
    rows = score(made, texts, batch_size=3)
    for text, row in zip(texts, rows, strict=True):
        ids = made.tokenizer.encode(text) if isinstance(text, str) else text
        expected = direct(made, ids) if len(ids) > 1 else []
        assert row["tokens"] == ids
        assert row["logprobs"][0] is None
        assert row["logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        assert row["total"] == pytest.approx(sum(expected), abs=1e-3)
        assert row["n_scored"] == len(ids) - 1
        assert row["mean_nll"] == pytest.approx(-sum(expected) / len(expected), abs=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(row["mean_nll"]))
    assert json.loads(json.dumps(rows)) == rows


def test_scores_agree_with_generated_logprobs():
    made = toys.model()
    prompt = made.tokenizer.encode("hello")
    row = generate(made, [prompt], max_new_tokens=6, eos_ids=())[0]
    scored = score(made, [[*prompt, *row["tokens"]]])[0]
    assert scored["logprobs"][len(prompt) :] == pytest.approx(row["logprobs"], abs=1e-4)


def test_case_33_choices_are_scored_by_character_span():
    made = toys.model()
    # "Answer" and "hello wor" are single tokens here: one merges over the boundary, the other ends at it.
    merged, split = score_choices(made, "an Ans", ["wer", "y"])
    assert merged["tokens"] == made.tokenizer.encode("an Answer")
    assert merged["n_scored"] == 1
    assert merged["total"] == pytest.approx(direct(made, merged["tokens"])[-1], abs=1e-4)
    assert split["n_scored"] == 1
    hello = score_choices(made, "hello wor", ["ld", "m!"])
    assert [row["n_scored"] for row in hello] == [2, 2]
    ids = made.tokenizer.encode("hello world")
    assert hello[0]["total"] == pytest.approx(sum(direct(made, ids)), abs=1e-4)
    assert [row["text"] for row in hello] == ["ld", "m!"]


def test_a_choice_without_anything_before_it_is_read_after_bos_or_eos():
    made = toys.model()
    rows = score_choices(made, "Ans", ["wer", "t"])
    assert [row["tokens"][0] for row in rows] == [toys.EOS, toys.EOS]
    assert rows[0]["total"] == pytest.approx(direct(made, [toys.EOS, 259])[-1], abs=1e-4)
    bos = toys.model(bos=True)
    assert score_choices(bos, "", ["ab"])[0]["tokens"] == [toys.BOS, 265]
    made.tokenizer.eos_ids = ()
    with pytest.raises(UserError, match="longer context"):
        score_choices(made, "", ["ab"])


def test_bad_input():
    made = toys.model(max_seq_len=8)
    with pytest.raises(UserError, match="9 tokens and the model takes 8"):
        score(made, [[1] * 9])
    with pytest.raises(UserError, match="text 1 has 1 tokens"):
        score(made, ["xyz", "x"])
    with pytest.raises(UserError, match="choice 1 is empty"):
        score_choices(made, "x", ["a", ""])
    with pytest.raises(UserError, match="choices"):
        score_choices(made, "x", [])
    with pytest.raises(UserError, match="out of range"):
        score(made, [[1, 9999]])

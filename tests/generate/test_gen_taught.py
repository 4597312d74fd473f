"""What fine-tuned encoders say of texts: numbers, words, answers, as their heads score them."""

import pytest
import torch

from phylon.families.bert import bert_spec
from phylon.generate import answer, label_words, rate, taught
from phylon.layers.heads.classify import Classify, Span
from phylon.layers.heads.pools import First
from phylon.model import build
from phylon.spec import UserError
from phylon.text.wordpiece import train_wordpiece

TEXT = "the cat sat on the mat and the dog saw it"


def model_with(head, name):
    tokenizer = train_wordpiece([TEXT] * 3, 60)
    spec = bert_spec(d_model=16, n_layers=1, n_heads=2, d_ff=24, max_seq_len=32, vocab_size=tokenizer.vocab_size)
    model = build(spec.replace(heads={name: head}, ties=()), seed=1, device="cpu").eval()
    model.tokenizer = tokenizer
    return model


def test_a_number_and_the_classes_of_words_are_the_heads():
    model = model_with(Classify(n_classes=1, pool=First()), "class")
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.inference_mode():
        expected = model(ids, segments=torch.ones_like(ids)).heads["class"][0, 0]
    assert rate(model, [TEXT, "the dog"])[0] == {"text": TEXT, "score": pytest.approx(float(expected), rel=1e-5)}
    words = model_with(Classify(n_classes=3), "token")
    words.labels = {"token": ("A", "B", "C")}
    (found,) = label_words(words, ["the  unknownword dog"])
    assert [row["word"] for row in found["words"]] == ["the", "unknownword", "dog"]
    joint = words.tokenizer.encode_joint("the unknownword dog")
    ids = torch.tensor([joint.ids])
    with torch.inference_mode():
        best = words(ids, segments=torch.ones_like(ids)).heads["token"][0].argmax(-1).tolist()
    firsts = [
        next(i for i, span in enumerate(joint.spans) if joint.texts[i] == 0 and span[0] == at) for at in (0, 4, 16)
    ]
    assert [row["label"] for row in found["words"]] == ["ABC"[best[i]] for i in firsts]


def test_an_answer_is_a_part_of_the_context(monkeypatch):
    model = model_with(Span(), "span")
    joint = model.tokenizer.encode_joint("the cat", TEXT)
    scores = torch.zeros(len(joint.ids), 2)
    places = [i for i, text in enumerate(joint.texts) if text == 1]
    scores[places[2], 0] = scores[places[3], 1] = 9.0
    scores[1] = 99.0  # of the question, which holds no answer
    monkeypatch.setattr("phylon.generate.finetuned._scores", lambda *_: [scores])
    found = answer(model, "the cat", TEXT)
    assert found["answer"] == TEXT[joint.spans[places[2]][0] : joint.spans[places[3]][1]] != ""
    assert found["score"] == 18.0


def test_each_is_asked_of_its_own_model():
    span, words = model_with(Span(), "span"), model_with(Classify(n_classes=3), "token")
    assert (taught(span), taught(words)) == ("answers", "words")
    assert taught(model_with(Classify(n_classes=2, pool=First()), "class")) is None
    with pytest.raises(UserError, match=r"no head for scores \(its heads: span\)"):
        rate(span, ["a"])
    with pytest.raises(UserError, match="the context is empty"):
        answer(span, "the cat", "")
    span.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        answer(span, "the cat", TEXT)

"""Classes of texts: shares that sum to one, or one for each class where a text may be of several."""

import pytest
import torch

from phylon.families.bert import bert_spec
from phylon.generate import classify
from phylon.model import build


class Letters:
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) % 20 for letter in text] for text in texts]


@pytest.mark.parametrize("several", [False, True])
def test_shares(several: bool) -> None:
    spec = bert_spec(d_model=16, n_layers=1, n_heads=2, d_ff=24, vocab_size=20, max_seq_len=16, heads=("class",))
    model = build(spec.replace(heads={"class": spec.heads["class"].replace(n_classes=3)}), device="cpu").eval()
    model.tokenizer, model.labels = Letters(), {"class": ("a", "b", "a")}
    with torch.no_grad():
        model.heads["class"].proj.bias.copy_(torch.tensor([3.0, 2.0, 1.0]))
        scores = model(torch.tensor([[ord(letter) % 20 for letter in "abc"]])).heads["class"][0]
    model.kept = {"problem_type": "multi_label_classification" if several else "single_label_classification"}
    a, b, c = (scores.sigmoid() if several else scores.softmax(-1)).tolist()
    found = classify(model, ["abc"])[0]
    assert found["label"] == "a"
    assert found["probabilities"] == pytest.approx({"a": max(a, c) if several else a + c, "b": b}, abs=1e-5)

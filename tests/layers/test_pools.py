"""Pools and the heads on them: one row a document, so that packed equals alone."""

import pytest
import torch

from helpers import assert_close, draw, pre
from law import documents, packed_row, padded
from phylon.layers.heads.classify import Classify, Pooled, Span
from phylon.layers.heads.pools import First, Last, Mean
from phylon.model import Model
from phylon.spec import Pool, UserError

LENGTHS = (5, 1, 7)


def model_with(pool: Pool) -> Model:
    heads = {"class": Classify(n_classes=3, pool=pool, activation="tanh"), "vector": Pooled(pool=pool)}
    return draw(pre(heads=heads))


@pytest.mark.parametrize("pool", [First(), Last(), Mean()])
@pytest.mark.parametrize("way", ["left", "right", "packed"])
def test_one_row_a_document(pool: Pool, way: str) -> None:
    model = model_with(pool)
    docs = documents(model, LENGTHS)
    tokens, segments = packed_row(docs, [5, 2, 9]) if way == "packed" else padded(docs, way)
    with torch.no_grad():
        together = model(tokens, segments=segments).heads
        for i, doc in enumerate(docs):
            alone = model(doc[None])
            for name in ("class", "vector"):
                assert_close(together[name][i], alone.heads[name][0])
            expected = {"First": alone.hidden[0, 0], "Last": alone.hidden[0, -1], "Mean": alone.hidden[0].mean(0)}
            assert_close(alone.heads["vector"][0], expected[type(pool).__name__])
    assert len(together["class"]) == len(docs)


def test_losses_of_classes_and_spans() -> None:
    model = draw(pre(heads={"class": Classify(n_classes=3, pool=Mean()), "span": Span()}))
    tokens = torch.stack(documents(model, (6, 6)))
    out = model(tokens, targets={"class": torch.tensor([2, -100]), "span": torch.tensor([[1, 4], [0, 99]])})
    assert int(out.losses["class"].count) == 1
    expected = torch.nn.functional.cross_entropy(out.heads["class"], torch.tensor([2, -100]))
    assert_close(out.losses["class"].mean, expected)
    assert int(out.losses["span"].count) == 3
    start, end = out.heads["span"].unbind(-1)
    by_hand = -(start.log_softmax(-1)[[0, 1], [1, 0]].sum() + end.log_softmax(-1)[0, 4]) / 3
    assert_close(out.losses["span"].mean, by_hand)
    with pytest.raises(UserError, match="class 3 is out of range"):
        model(tokens, targets={"class": torch.tensor([3, 0])})

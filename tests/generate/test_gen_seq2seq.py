"""Texts of encoder-decoders: the source goes to the encoder once, rows do not touch each other, what is refused."""

import pytest
import torch

from phylon.families.t5 import t5_spec
from phylon.generate import ChatSession, beam_search, generate, score
from phylon.layers.inits import FanInInit
from phylon.model import GenerationDefaults, Model, build
from phylon.spec import UserError

SOURCES = [[5, 6, 7, 8, 9], [3], [4, 4, 2, 10, 9, 8, 7, 6]]


@pytest.fixture(scope="module")
def model() -> Model:
    spec = t5_spec(d_model=24, n_layers=2, n_heads=3, head_dim=8, d_ff=40, vocab_size=37, init=FanInInit(gain=2.0))
    made = build(spec, device="cpu").eval()
    made.generation = GenerationDefaults(decoder_start_id=0, pad_id=0)
    return made


def greedy(model: Model, source: list[int], n: int) -> list[int]:
    """The whole target is read anew for every token."""
    tokens = [model.generation.decoder_start_id]
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens]), source=torch.tensor([source])).logits[0, -1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_row_is_what_its_source_gives(model: Model, batch_size: int) -> None:
    found = generate(model, SOURCES, max_new_tokens=9, temperature=0, eos_ids=(), batch_size=batch_size)
    expected = [greedy(model, source, 9) for source in SOURCES]
    assert [row["tokens"] for row in found] == expected
    assert len({tuple(row) for row in expected}) == 3, "control: the source shows"


def test_beams_and_ends(model: Model) -> None:
    expected = greedy(model, SOURCES[0], 8)
    assert beam_search(model, SOURCES[:1], n_beams=1, max_new_tokens=8, eos_ids=())[0][0]["tokens"] == expected
    ended = generate(model, SOURCES[:1], max_new_tokens=8, temperature=0, eos_ids=(expected[2],))[0]
    assert ended["tokens"] == expected[: expected.index(expected[2]) + 1]
    assert ended["finish_reason"] == "eos"


def test_refusals(model: Model) -> None:
    with pytest.raises(UserError, match="the source is empty"):
        generate(model, [[]])
    with pytest.raises(UserError, match="token id 99 is out of range"):
        generate(model, [[99]])
    with pytest.raises(UserError, match="no tokenizer"):
        generate(model, "a text")
    for refused in (lambda: score(model, [[1, 2]]), lambda: ChatSession(model)):
        with pytest.raises(UserError, match="encoder-decoder"):
            refused()
    start, model.generation = model.generation, GenerationDefaults()
    try:
        with pytest.raises(UserError, match="decoder_start_id"):
            generate(model, [[1]])
    finally:
        model.generation = start

"""Encoder-decoders: padded and packed sources, the state's memory, and what is refused."""

import pytest
import torch
from torch import Tensor

from helpers import assert_close, draw, encoder_decoder
from phylon.layers.mixers.cross import CrossAttention
from phylon.layers.norms import RMSNorm
from phylon.model import Model, pre_norm
from phylon.spec import UserError


@pytest.fixture(scope="module")
def model() -> Model:
    return draw(encoder_decoder(pre_norm(CrossAttention(n_heads=4, head_dim=6), RMSNorm())))


@pytest.fixture(scope="module")
def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(11, (2, 9), generator=generator), torch.randint(11, (2, 8), generator=generator)


def run(model: Model, tokens: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        logits = model(tokens, **options).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_of_the_source(model: Model, texts: tuple[Tensor, Tensor], side: str) -> None:
    source, tokens = texts
    segments = torch.zeros(2, 13, dtype=torch.int64)
    columns = {"left": slice(4, 13), "right": slice(0, 9), "middle": [0, 2, 3, 4, 6, 7, 8, 10, 12]}[side]
    wide = torch.full((2, 13), 7)
    wide[:, columns], segments[:, columns] = source, 1
    assert_close(run(model, tokens, source=wide, source_segments=segments), run(model, tokens, source=source))


def test_every_source_token_matters(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    before = run(model, tokens, source=source)
    for column in (0, 8):
        changed = source.clone()
        changed[:, column] = (changed[:, column] + 1) % 11
        assert bool(((run(model, tokens, source=changed) - before).abs().amax(-1) > 1e-3).all())


def test_packed_pairs_equal_the_pairs_alone(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    alone = [run(model, tokens[i : i + 1], source=source[i : i + 1])[0] for i in range(2)]
    ids = lambda n: torch.tensor([[4] * n + [9] * n])
    packed = run(
        model,
        tokens.reshape(1, -1),
        segments=ids(8),
        source=source.flip(0).reshape(1, -1),
        source_segments=torch.tensor([[9] * 9 + [4] * 9]),
    )
    assert_close(packed[0], torch.cat(alone))


def test_state_reads_the_source_once(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    segments = torch.ones(2, 12, dtype=torch.int64)
    segments[0, :3] = 0
    wide = torch.cat([torch.full((2, 3), 7), source], dim=1)
    whole = run(model, tokens, source=wide, source_segments=segments)
    state = model.new_state(2)
    first = run(model, tokens[:, :3], source=wide, source_segments=segments, state=state)
    swapped = state.rows([1, 0])
    rest = [run(model, tokens[:, i : i + 1].flip(0), state=swapped).flip(0) for i in range(3, 8)]
    assert_close(torch.cat([first, *rest], dim=1), whole)
    with pytest.raises(UserError, match="has read its source already"):
        run(model, tokens[:, :1], source=source, state=state)


def test_a_row_of_another_state_brings_its_source(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    mine, other = model.new_state(2), model.new_state(1)
    run(model, tokens[:, :4], source=source, state=mine)
    longer = torch.arange(14)[None] % 11
    run(model, tokens[:1, :4], source=longer, state=other)
    mine.insert([1], other)
    after = run(model, tokens[:1, 4:].expand(2, -1), state=mine)
    assert_close(after[:1], run(model, tokens[:1], source=source[:1])[:, 4:])
    assert_close(after[1:], run(model, tokens[:1], source=longer)[:, 4:])


def test_a_failed_first_call_leaves_no_source(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    state = model.new_state(2)
    with pytest.raises(UserError, match="out of range"):
        run(model, tokens + 100, source=source, state=state)
    assert state.source is None
    assert_close(run(model, tokens, source=source, state=state), run(model, tokens, source=source))


def test_refusals(model: Model, texts: tuple[Tensor, Tensor]) -> None:
    source, tokens = texts
    with pytest.raises(UserError, match="needs source"):
        run(model, tokens)
    with pytest.raises(UserError, match="source has 1 rows, tokens 2"):
        run(model, tokens, source=source[:1])
    with pytest.raises(UserError, match="source must be"):
        run(model, tokens, source=source.float())
    with pytest.raises(UserError, match="source_segments"):
        run(model, tokens, source=source, source_segments=torch.ones(2, 3, dtype=torch.int64))

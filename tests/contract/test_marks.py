"""Patterns over marks obey the law: a marked document gives the same values alone, padded, batched and packed."""

import pytest
import torch
from torch import Tensor

from helpers import ATTENTION, assert_close, draw, pre
from law import documents, padded
from phylon.model import Model
from phylon.ops.attention import dispatch
from phylon.patterns import BigBird, Causal, Global, Pattern, Prefix, SymmetricWindow, Window
from phylon.spec import UserError

PATTERNS: dict[str, Pattern] = {
    "longformer": SymmetricWindow(radius=2) | Global(),
    "causal longformer": Window(size=3) | (Global() & Causal()),
    "prefix": Causal() | Prefix(),
    "prefix beside globals": Window(size=3) | Prefix(mark=2) | (Global() & Causal()),
    "bigbird and globals": BigBird(block=2, n_heads=4, n_random=1) | Global(),
}
LENGTHS = (13, 5, 9)
BACKENDS = [name for name, backend in dispatch.backends.items() if backend.available() is None]


def model(name: str) -> Model:
    return draw(pre(mixer=ATTENTION.replace(pattern=PATTERNS[name])))


def marked(docs: list[Tensor]) -> list[Tensor]:
    return [((torch.arange(len(doc)) % 6 == 1).int() + 2 * (torch.arange(len(doc)) == 3).int()) for doc in docs]


def hidden(made: Model, tokens: Tensor, marks: Tensor | None, segments: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return made(tokens, marks=marks, segments=segments).hidden


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_law_with_marks(name: str, backend: str) -> None:
    made = model(name)
    docs = documents(made, LENGTHS)
    marks = marked(docs)
    alone = [hidden(made, doc[None], mark[None])[0] for doc, mark in zip(docs, marks, strict=True)]
    with dispatch.force(backend):
        try:
            for side in ("left", "right"):
                tokens, segments = padded(docs, side)
                wide = torch.where(segments != 0, padded(marks, side)[0], 1)
                for ours, own, expected in zip(hidden(made, tokens, wide, segments), segments, alone, strict=True):
                    assert_close(ours[own != 0], expected, what=side)
            ids = torch.cat([torch.full_like(doc, i) for doc, i in zip(docs, (5, 2, 9), strict=True)])
            row = hidden(made, torch.cat(docs)[None], torch.cat(marks)[None], ids[None])[0]
        except UserError as error:
            pytest.skip(str(error))
        for ours, expected in zip(row.split(LENGTHS), alone, strict=True):
            assert_close(ours, expected, what="packed")
    plain = hidden(made, docs[0][None], None)[0]
    assert bool(((plain - alone[0]).abs().amax(-1) > 1e-3).any()), "control: marks show"


def test_no_later_token_moves_an_earlier_output() -> None:
    """Case 34 for the causal global pattern: 16 tokens, the last one changed."""
    made = model("causal longformer")
    tokens = documents(made, (16,))[0]
    marks = marked([tokens])[0][None]
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % 11
    before, after = (hidden(made, x[None], marks)[0] for x in (tokens, changed))
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.equal(before[-1], after[-1])


def test_a_row_has_its_own_prefix() -> None:
    """Within its prefix a row looks ahead, behind it not."""
    made = model("prefix")
    tokens = torch.stack(documents(made, (12, 12)))
    marks = (torch.arange(12) < torch.tensor([[4], [8]])).int()
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    moved = (hidden(made, tokens, marks) - hidden(made, changed, marks)).abs().amax(-1) > 1e-4
    assert not moved[0, :6].any(), "position 6 of the first row is behind its prefix"
    assert bool(moved[1].all()), "and within that of the second"


def test_bigbird_does_not_stream_and_says_why() -> None:
    with pytest.raises(UserError, match="depends on how long the text will be"):
        model("bigbird and globals").new_state(1)
    with pytest.raises(UserError, match="the pattern is for 3 heads, the mixer has 4"):
        ATTENTION.replace(pattern=BigBird(block=2, n_heads=3))
    made = model("causal longformer")
    with pytest.raises(UserError, match="a state does not keep marks"):
        made(torch.zeros(1, 3, dtype=torch.int64), marks=torch.ones(1, 3, dtype=torch.int64), state=made.new_state(1))

"""The law (design, section 3) as routes: ways to run documents through a model that must all give the same values.

A route takes a model and documents (a list of 1-D token tensors) and returns each document's values (T, hidden + V).
The reference is every document alone in one plain call.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from helpers import assert_close, mechanisms
from phylon.model import Model
from phylon.ops.attention import dispatch
from phylon.patterns import Records, measured
from phylon.spec import Mixer, UserError, entry_of

Docs = list[Tensor]
Route = Callable[[Model, Docs], list[Tensor]]
CELLS = ("chunks", "padding", "packing", "batch", "history", "backends", "positions", "state")
EVEN, RAGGED = (13, 13), (13, 5, 1, 9)
CUTS = ((4, 4, 5), (7, 3, 1, 1, 1), (2, 2, 2, 2, 2, 2, 1), (1,) * 13)


def documents(model: Model, lengths: Sequence[int], seed: int = 0) -> Docs:
    generator = torch.Generator().manual_seed(seed)
    vocab = model.spec.last_stack.embed.vocab_size  # type: ignore[attr-defined]
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def values(model: Model, tokens: Tensor, **options: object) -> Tensor:
    """(B, T, D + what every head gives for each token); of the others `tests/layers/heads` has the law."""
    with torch.no_grad():
        out = model(tokens, **options, **source_for(model, len(tokens), options.get("state")))
    heads = [out.heads[name] for name, head in model.spec.heads.items() if not head.per_document]
    return torch.cat([out.hidden, *heads], dim=-1)


def source_for(model: Model, batch: int, state: object) -> dict[str, Tensor]:
    """What an encoder-decoder reads on its first call: the same source for every document id that a route may use."""
    if model.encoder is None or model.decoder is None or getattr(state, "source", None) is not None:
        return {}
    ids = torch.arange(1, 31).repeat_interleave(5)
    source = torch.tensor([3, 1, 4, 1, 5]).repeat(30)
    return {"source": source.expand(batch, -1), "source_segments": ids.expand(batch, -1)}


def alone(model: Model, docs: Docs) -> list[Tensor]:
    return [values(model, doc[None])[0] for doc in docs]


def padded(docs: Docs, side: str) -> tuple[Tensor, Tensor]:
    """Tokens and segments (B, T); padding holds a real token id, which must not matter."""
    width = max(map(len, docs))
    tokens = torch.full((len(docs), width), 3)
    segments = torch.zeros(len(docs), width, dtype=torch.int64)
    for row, doc in enumerate(docs):
        where = slice(width - len(doc), width) if side == "left" else slice(0, len(doc))
        tokens[row, where], segments[row, where] = doc, 1
    return tokens, segments


def split(values_BTV: Tensor, segments: Tensor, ids: Sequence[int] | None = None) -> list[Tensor]:
    """The real tokens of every row, or of every document of row 0."""
    if ids is not None:
        return [values_BTV[0, segments[0] == i] for i in ids]
    return [row[real != 0] for row, real in zip(values_BTV, segments, strict=True)]


def batched(model: Model, docs: Docs) -> list[Tensor]:
    return list(values(model, torch.stack(docs)))


def left_padded(model: Model, docs: Docs) -> list[Tensor]:
    tokens, segments = padded(docs, "left")
    return split(values(model, tokens, segments=segments), segments)


def right_padded(model: Model, docs: Docs) -> list[Tensor]:
    tokens, segments = padded(docs, "right")
    return split(values(model, tokens, segments=segments), segments)


def gapped(model: Model, docs: Docs) -> list[Tensor]:
    """Padding after every real token."""
    tokens, segments = padded(docs, "left")
    wide_tokens = torch.stack([tokens, torch.full_like(tokens, 5)], dim=-1).flatten(1)
    wide = torch.stack([segments, torch.zeros_like(segments)], dim=-1).flatten(1)
    return split(values(model, wide_tokens, segments=wide), wide)


def packed_row(docs: Docs, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    gap = torch.full((2,), 3)
    tokens = torch.cat([torch.cat([doc, gap]) for doc in docs])
    segments = torch.cat([torch.cat([torch.full_like(d, i), gap * 0]) for d, i in zip(docs, ids, strict=True)])
    return tokens[None], segments[None]


def packed(model: Model, docs: Docs) -> list[Tensor]:
    """All in one row, with padding between, ids in no order."""
    ids = [7, 2, 5, 1][: len(docs)]
    tokens, segments = packed_row(docs, ids)
    return split(values(model, tokens, segments=segments), segments, ids)


def packed_in_chunks(model: Model, docs: Docs) -> list[Tensor]:
    ids = [7, 2, 5, 1][: len(docs)]
    tokens, segments = packed_row(docs, ids)
    whole = in_chunks(model, tokens, (3, 1, 4, 1, 5, 2, 6), segments)
    return split(whole, segments, ids)


def in_chunks(model: Model, tokens: Tensor, cut: Sequence[int], segments: Tensor | None = None) -> Tensor:
    state, pieces, start = model.new_state(len(tokens)), [], 0
    sizes = [*cut, *[4] * tokens.shape[1]]
    while start < tokens.shape[1]:
        size = sizes.pop(0)
        piece = slice(start, start + size)
        given = {} if segments is None else {"segments": segments[:, piece]}
        pieces.append(values(model, tokens[:, piece], state=state, **given))
        start += size
    real = tokens.shape[1] if segments is None else (segments != 0).sum(1).tolist()
    assert state.lengths == ([real] * len(tokens) if isinstance(real, int) else real), "padding was appended"
    return torch.cat(pieces, dim=1)


def chunked(cut: Sequence[int]) -> Route:
    return lambda model, docs: list(in_chunks(model, torch.stack(docs), cut))


def chunked_padded(side: str) -> Route:
    def route(model: Model, docs: Docs) -> list[Tensor]:
        tokens, segments = padded(docs, side)
        return split(in_chunks(model, tokens, (2, 1, 5, 1, 1), segments), segments)

    return route


def bounded(model: Model, docs: Docs) -> list[Tensor]:
    """A state with ``max_len``: buffers of their final size from the start."""
    tokens, state = torch.stack(docs), model.new_state(len(docs), max_len=len(docs[0]))
    return list(torch.cat([values(model, t, state=state) for t in tokens.split([5, 1, 7], dim=1)], dim=1))


def after_others(model: Model, docs: Docs) -> list[Tensor]:
    """Case 6: what ran before on the same object does not matter."""
    values(model, torch.stack(documents(model, (3,), seed=5)))
    values(model, torch.stack(documents(model, (40, 40), seed=6)))
    return alone(model, docs)


def given_positions(model: Model, docs: Docs) -> list[Tensor]:
    tokens = torch.stack(docs)
    return list(values(model, tokens, positions=torch.arange(tokens.shape[1]).expand(tokens.shape)))


def forced(backend: str, inner: Route) -> Route:
    def route(model: Model, docs: Docs) -> list[Tensor]:
        with dispatch.force(backend):
            try:
                return inner(model, docs)
            except UserError as error:
                pytest.skip(str(error))

    return route


def routes() -> Iterator[tuple[str, str, Route, tuple[int, ...], bool]]:
    """``(cell, name, route, document lengths, whether it needs a state)``."""
    for cut in CUTS:
        yield "chunks", "chunks-" + "+".join(map(str, cut)), chunked(cut), EVEN, True
    yield "chunks", "chunks-bounded", bounded, EVEN, True
    yield "padding", "padding-left", left_padded, RAGGED, False
    yield "padding", "padding-right", right_padded, RAGGED, False
    yield "padding", "padding-gaps", gapped, RAGGED, False
    yield "padding", "padding-left-chunks", chunked_padded("left"), RAGGED, True
    yield "padding", "padding-right-chunks", chunked_padded("right"), RAGGED, True
    yield "packing", "packing", packed, RAGGED, False
    yield "packing", "packing-chunks", packed_in_chunks, RAGGED, True
    yield "batch", "batch", batched, (*EVEN, 13), False
    yield "history", "history", after_others, RAGGED, False
    yield "positions", "positions", given_positions, EVEN, False
    for name in (name for name, backend in dispatch.backends.items() if backend.available() is None):
        yield "backends", f"{name}-alone", forced(name, alone), EVEN, False
        yield "backends", f"{name}-padded", forced(name, left_padded), RAGGED, False
        yield "backends", f"{name}-chunks", forced(name, chunked((4, 1, 1, 7))), EVEN, True


ROUTES = {name: (cell, route, lengths, state) for cell, name, route, lengths, state in routes()}


def looks_back(model: Model) -> bool:
    """Whether any mixer lets a token see the one before it; without, history cannot matter."""
    records = measured(*[Records(torch.arange(2)[None])] * 2)[0]
    for node in mechanisms(model.spec):
        pattern = getattr(node, "pattern", None)
        if pattern is not None and bool(pattern.allowed(records.as_queries(), records.as_keys())[..., 1, 0].any()):
            return True
        if isinstance(node, Mixer) and pattern is None:
            return True
    return False


def streams(model: Model) -> bool:
    return model.decoder is not None and all(
        n.streams() is None for n in mechanisms(model.spec.decoder) if isinstance(n, Mixer)
    )


def exception(model: Model, cell: str) -> str | None:
    """The registered reason why a mechanism of the model does not obey one cell of the law."""
    reasons = (entry_of(node).exceptions.get(cell) for node in mechanisms(model.spec, evaluation=True))
    return next((f"registered exception: {reason}" for reason in reasons if reason), None)


def check(model: Model, name: str) -> None:
    """One route against every document alone, and again after the first tokens changed: the control."""
    cell, route, lengths, needs_state = ROUTES[name]
    reason = exception(model, cell)
    if reason:
        pytest.skip(reason)
    if needs_state and not streams(model):
        pytest.skip("does not stream")
    for docs, expected in reference(model, lengths):
        for ours, theirs in zip(route(model, docs), expected, strict=True):
            assert_close(ours, theirs, what=name)


@functools.cache
def reference(model: Model, lengths: tuple[int, ...]) -> list[tuple[Docs, list[Tensor]]]:
    """Documents and their values alone; then the same with another first token, whose values must differ."""
    docs = documents(model, lengths)
    vocab = model.spec.last_stack.embed.vocab_size  # type: ignore[attr-defined]
    changed = [torch.cat([(doc[:1] + 1) % vocab, doc[1:]]) for doc in docs]
    before, after = alone(model, docs), alone(model, changed)
    for old, new in zip(before, after, strict=True):
        moved = (old - new).abs().amax(-1) > 1e-3 * old.abs().max()
        assert bool(moved[0]), "control: the changed token itself shows"
        assert not looks_back(model) or len(moved) == 1 or bool(moved[1]), "control: a changed history must show"
    return [(docs, before), (changed, after)]

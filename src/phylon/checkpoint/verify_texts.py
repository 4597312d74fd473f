"""The part of the law that token ids can break: how texts are split over calls, padded, packed and batched."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from phylon.checkpoint.compare import Reference, compare
from phylon.checkpoint.law import (
    DISPATCHES,
    Cell,
    Got,
    NotApplicable,
    Readable,
    Report,
    Subject,
    Values,
    enough_rows,
    kernels,
    must_differ,
    on_backend,
)
from phylon.layers.state import FIRST_CAPACITY
from phylon.model import Model
from phylon.model.model import Output
from phylon.spec.base import Mixer
from phylon.spec.errors import UserError

Side = Literal["left", "right", "within"]


def verify_texts(s: "Texts", reference: Reference | None) -> Report:
    """Cells of three random documents."""
    ways: list[tuple[str, str, Callable[[Texts], Got]]] = [
        ("chunks", "chunks", lambda s: s.ran([[0]], cuts=(3, 4, s.lengths[0] // 2 + 2))),
        ("steps", "chunks", lambda s: s.ran([[0]], cuts=range(1, s.lengths[0]))),
        ("state_growth", "packing", _state_growth),
        ("left_padding", "padding", lambda s: s.ran([[0], [1], [2]], side="left", pad=2)),
        ("right_padding", "padding", lambda s: s.ran([[0], [1], [2]], pad=2)),
        ("padding_within", "padding", lambda s: s.ran([[0], [1], [2]], side="within", pad=2)),
        ("padded_chunks", "padding", _padded_chunks),
        ("source_padding", "padding", _source_padded),
        ("packing", "packing", lambda s: s.ran([[1, 2]])),
        ("packed_chunks", "packing", _packed_chunks),
        ("batching", "batch", _batched),
        ("after_another_call", "history", _after_another),
    ]
    for dispatch in DISPATCHES:
        for name in dispatch.backends:
            ways.append((f"backend_{dispatch.op}_{name}", "backends", on_backend(dispatch, name, _plain_and_padded)))
    cells = [s.cell(name, law, way) for name, law, way in ways]
    cells += [*kernels(_Large(s)), _window(s), *_controls(s)]
    if reference is not None:
        cells += compare(s, reference)
    return Report(dtype=str(s.model.dtype).removeprefix("torch."), lengths=s.lengths, cells=cells)


@dataclass(frozen=True)
class _Document:
    """``tokens`` (T,), and the ``source`` (S,) that an encoder-decoder reads for it; a stranger has no ``number``."""

    tokens: Tensor
    source: Tensor | None
    number: int | None = None


class Texts(Subject):
    """The model, its documents and what they give alone."""

    def __init__(self, model: Model, length: int | None, seed: int) -> None:
        super().__init__(model, seed)
        embed = model.spec.last_stack.embed
        self.vocab: int = getattr(embed, "vocab_size", 0)
        if not self.vocab:
            raise UserError(f"verify reads tokens, and this model's input is {type(embed).__name__}")
        patterns = [node.pattern for node in self.mechanisms if hasattr(node, "pattern")]  # type: ignore[attr-defined]
        self.reach: int | None = min((p.reach for p in patterns if p.reach is not None), default=None)
        self.mixes = any(isinstance(node, Mixer) for node in self.mechanisms)
        if length is not None and length < 6:
            raise UserError(f"verify needs texts of 6 tokens at least, got a length of {length}")
        wanted = length or (self.reach + 8 if self.reach is not None and 16 < self.reach <= 128 else 24)
        limits = [getattr(node, "max_seq_len", None) for node in self.mechanisms]
        longest = min([wanted, *(n for n in limits if n is not None)])
        if longest < 6:
            raise UserError(f"verify needs texts of 6 tokens at least, the model or the length given allows {longest}")
        self.lengths = [longest, max(3, longest // 3), max(4, 2 * longest // 3)]
        self.reads_source = model.encoder is not None and model.decoder is not None
        self.documents = [self.document(n, m, i) for i, (n, m) in enumerate(zip(self.lengths, (5, 6, 3), strict=True))]
        scored = (f"heads.{name}.logits" for name, head in model.heads.items() if getattr(head, "token_wise", False))
        self.main = next(scored, "hidden")
        self.run_alone()

    def document(self, length: int, source: int, number: int | None = None) -> _Document:
        tokens = self.random(length)
        return _Document(tokens, self.random(source) if self.reads_source else None, number)

    def random(self, n: int) -> Tensor:
        return torch.randint(self.vocab, (n,), generator=self.generator).to(self.model.device)

    def each(self, model: Model) -> list[Values]:
        return [values for i in range(len(self.documents)) for _, _, values in self.ran([[i]], model=model)]

    def ran(self, rows: Sequence[Sequence[int | _Document]], *, model: Model | None = None, **layout: Any) -> Got:
        """What a call gives for the documents in each of ``rows``, by number; see ``_called``."""
        chosen = [[self.documents[d] if isinstance(d, int) else d for d in row] for row in rows]
        return [
            (document.number, slice(None), values)
            for document, values in self._called(model or self.model, chosen, **layout)
            if document.number is not None
        ]

    def _called(
        self,
        model: Model,
        rows: list[list[_Document]],
        *,
        side: Side = "right",
        pad: int = 0,
        source_pad: int | None = None,
        cuts: Iterable[int] | None = None,
    ) -> Iterator[tuple[_Document, Values]]:
        """One call, or one a chunk onto a state, where ``cuts`` are the columns at which chunks begin.

        ``pad``: columns of padding beyond the longest row, in the source too unless ``source_pad`` says otherwise. They
        are to the ``side`` of the row's texts or, "within", in their middle.
        """
        tokens, ids = self._laid([[d.tokens for d in row] for row in rows], side, pad)
        given: dict[str, Any] = {}
        if self.reads_source:
            sources = [[d.source for d in row if d.source is not None] for row in rows]
            source, source_ids = self._laid(sources, side, pad if source_pad is None else source_pad)
            given = {"source": source, "source_segments": _unless_plain(source_ids)}
        if cuts is None:
            out = self.values(model(tokens, segments=_unless_plain(ids), **given))
        else:
            inner, state = sorted({c for c in cuts if 0 < c < tokens.shape[1]}), self.state(len(rows))
            segments, parts = _unless_plain(ids), []
            for start, end in zip([0, *inner], [*inner, tokens.shape[1]], strict=True):
                part = None if segments is None else segments[:, start:end]
                parts.append(self.values(model(tokens[:, start:end], segments=part, state=state, **given)))
                given = {}
            # One row a document is of the tokens of one call.
            out = {name: torch.cat([p[name] for p in parts], 1) for name in parts[0] if name not in self.pooled}
        before = 0
        for i, row in enumerate(rows):
            for k, document in enumerate(row):
                real = ids[i] == len(row) - k
                yield document, {n: v[before : before + 1] if n in self.pooled else v[i, real] for n, v in out.items()}
                before += 1

    def _laid(self, rows: list[list[Tensor]], side: Side, pad: int) -> tuple[Tensor, Tensor]:
        """Texts one after the other in each row, with falling ids; what stands at padding is a token like any other."""
        sizes = [sum(map(len, row)) for row in rows]
        width = max(sizes) + pad
        tokens = self.random(width * len(rows)).view(len(rows), width)
        ids = torch.zeros_like(tokens)
        for i, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            where = torch.arange(size) + (width - size if side == "left" else 0)
            where[size // 2 :] += pad if side == "within" else 0
            tokens[i, where] = torch.cat(row)
            ids[i, where] = torch.cat([torch.full_like(text, len(row) - k) for k, text in enumerate(row)])
        return tokens, ids

    @property
    def pooled(self) -> set[str]:
        """The values of which there is one row a document."""
        return {f"heads.{name}.logits" for name, head in self.model.spec.heads.items() if head.per_document}

    def values(self, out: Output) -> Values:
        """Hidden states and what every head gives, in at least fp32: (B, T, W), or (documents, W)."""
        wide = torch.promote_types(out.hidden.dtype, torch.float32)
        return {"hidden": out.hidden.to(wide)} | {f"heads.{n}.logits": v.to(wide) for n, v in out.heads.items()}

    def shared_inputs(self) -> dict[str, Tensor]:
        """One text. Others know padding by its id, so none stands in it; T5's classes are read at the source's end."""
        ends, pad = self.model.generation.eos_ids, self.model.generation.pad_id
        told = {*ends, *(() if pad is None else (pad,))}
        plain = next((i for i in range(self.vocab) if i not in told), 0)
        row = self.documents[0].tokens
        row = torch.where(torch.isin(row, torch.tensor(sorted(told), device=row.device)), plain, row)
        if not self.reads_source:
            return {"tokens": row[None]}
        source = row.clone()
        source[-1] = ends[0] if ends else plain
        return {"tokens": row[None], "source": source[None]}

    def state(self, batch: int) -> Any:
        try:
            return self.model.new_state(batch)
        except UserError as error:
            raise NotApplicable(str(error)) from None

    def changed(self, at: int) -> _Document:
        """The first document with another token ``at`` one place."""
        first = self.documents[0]
        tokens = first.tokens.clone()
        tokens[at] = (tokens[at] + 1) % self.vocab
        return _Document(tokens, first.source, first.number)


class _Large(Readable, Texts):
    """The documents, and rows enough for every kernel to act."""

    def __init__(self, of: Texts) -> None:
        self.of: Texts = of
        super().__init__(of.model, of.lengths[0], 1)

    def run_alone(self) -> None:
        self.documents = self.of.documents
        length = self.lengths[0]
        self.rows = [[self.document(length, 5, 3 + i)] for i in range(enough_rows(self.model, length))]
        super().run_alone()

    def each(self, model: Model) -> list[Values]:
        return super().each(model) + [values for _, _, values in self.ran(self.rows, model=model)]


def _unless_plain(ids: Tensor) -> Tensor | None:
    """``ids``, or ``None`` where every row is one document and nothing else: what leaving them out says."""
    return None if bool((ids == 1).all()) else ids


def _padded_chunks(s: Texts) -> Got:
    width = max(s.lengths) + 2
    every = [[0], [1], [2]]
    return [got for side in ("left", "right") for got in s.ran(every, side=side, pad=2, cuts=range(5, width, 5))]


def _source_padded(s: Texts) -> Got:
    if not s.reads_source:
        raise NotApplicable("the model reads no source")
    return [got for side in ("left", "right") for got in s.ran([[0]], side=side, source_pad=3)]


def _packed_chunks(s: Texts) -> Got:
    """A document that begins with a call, and one that begins within one."""
    first, second = s.lengths[1], s.lengths[1] + s.lengths[2]
    width = second + s.lengths[0]
    return s.ran([[1, 2, 0]], cuts=(2, first, first + 2, second - 1, *range(second + 2, width, 7)))


def _state_growth(s: Texts) -> Got:
    """The last document begins just before the first buffers are full; what was in them must be there afterwards."""
    start, filled, filler, ends = FIRST_CAPACITY - 3, 0, [], []
    while filled < start:
        filler.append(s.document(min(start - filled, s.lengths[0]), 4))
        filled += len(filler[-1].tokens)
        ends.append(filled)
    return s.ran([[*filler, 0]], cuts=(*ends, start + 2, start + 3, start + 4))


def _batched(s: Texts) -> Got:
    first = s.documents[0]
    sizes = len(first.tokens), 0 if first.source is None else len(first.source)
    return s.ran([[s.document(*sizes)], [first], [s.document(*sizes)]])


def _after_another(s: Texts) -> Got:
    s.ran([[s.document(s.lengths[0], 5)], [s.document(s.lengths[0], 5)]])
    s.ran([[s.document(2, 3)]])
    return _plain(s)


def _plain(s: Texts) -> Got:
    return [(i, slice(None), values) for i, values in enumerate(s.each(s.model))]


def _plain_and_padded(s: Texts) -> Got:
    return _plain(s) + s.ran([[0], [1], [2]], side="left", pad=2)


def _window(s: Texts) -> Cell:
    """Whether the texts were long enough for a window to matter: said, never assumed."""
    if s.reach is None:
        return Cell(name="window", passed=None, reason="no pattern bounds how far a token looks back")
    if s.reach >= s.lengths[0]:
        reason = f"the window of {s.reach} is not shorter than the {s.lengths[0]} tokens read; give a greater length"
        return Cell(name="window", passed=None, reason=reason)
    return Cell(name="window", passed=True, error=0.0, bound=0.0, reason=f"texts are longer than the window {s.reach}")


def _controls(s: Texts) -> Iterator[Cell]:
    """What must make a difference: without these, a model that ignores its history would pass everything."""
    main = s.main
    blind = "no mixer looks at other tokens" if s.reach == 1 or not s.mixes else None
    if blind:
        yield Cell(name="control_history", passed=None, reason=blind)
        yield Cell(name="control_state", passed=None, reason=blind)
        return
    after = s.ran([[s.changed(1)]])[0][2][main]
    yield must_differ(s, "control_history", main, after[2:4], s.alone[0][main][2:4])
    try:
        s.state(1)
    except NotApplicable as error:
        yield Cell(name="causality", passed=None, reason=str(error))
        yield Cell(name="control_state", passed=None, reason=str(error))
        return
    last = s.ran([[s.changed(-1)]])[0][2]
    before = {name: value[:-1] for name, value in last.items() if name not in s.pooled}
    yield s.judge("causality", [(0, slice(0, -1), before)])
    once, again = (s.ran([[document]], cuts=(2, 4))[0][2][main][2:4] for document in (s.changed(1), s.documents[0]))
    yield must_differ(s, "control_state", main, once, again)

"""The law (design, section 3) checked on a model as it is: its own weights, vocabulary, dtype and device.

Each cell runs a few random documents another way and compares with every document alone in one plain call. A cell that
does not apply says why; positive controls show that the comparison could fail.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phylon.checkpoint.compare import Reference, compare
from phylon.checkpoint.law import (
    DISPATCHES,
    Cell,
    Got,
    NotApplicable,
    Report,
    Subject,
    must_differ,
    on_backend,
)
from phylon.checkpoint.verify_images import Images, verify_images
from phylon.model import Model
from phylon.spec.base import Mixer
from phylon.spec.errors import UserError, check_seed


def verify(model: Model, *, reference: Reference | None = None, length: int | None = None, seed: int = 0) -> Report:
    """Run the law's table on ``model``, with random documents of at most ``length`` tokens of its own vocabulary.

    Two ways agree if they differ by at most 1e-5 of the largest value (fp32), or if the other way is at most twice as
    far from a run in higher precision as the plain pass is, with these inputs or with some a rounding away (deep
    models; the only rule in low precision). ``length`` defaults to 24, or to eight more than a window that is no longer
    than 128. A model that reads images is given a few of random pixels: alone, beside others, after another call, on
    every backend.

    Raises:
        UserError: the model reads neither tokens nor images, or ``length`` is given for images.
    """
    check_seed("seed", seed)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if not hasattr(model.spec.last_stack.embed, "image_shape"):
                return _run(_Texts(model, length, seed), reference)
            if length is not None:
                raise UserError("a length is one of token ids, and this model reads images; leave it out")
            return verify_images(model, reference, seed)
    finally:
        model.train(was_training)


def against(model: Model, reference: Reference, *, seed: int = 0) -> list[Cell]:
    """The cells of ``verify`` that compare ``model``, in eval mode, with ``reference``, and no others."""
    with torch.no_grad():
        sees = hasattr(model.spec.last_stack.embed, "image_shape")
        return compare(Images(model, seed) if sees else _Texts(model, None, seed), reference)


def _run(subject: "_Texts", reference: Reference | None) -> Report:
    ways: list[tuple[str, str, Callable[[_Texts], Got]]] = [
        ("chunks", "chunks", _chunks),
        ("steps", "chunks", _steps),
        ("left_padding", "padding", lambda s: _padded(s, left=True)),
        ("right_padding", "padding", lambda s: _padded(s, left=False)),
        ("padded_chunks", "padding", _padded_chunks),
        ("packing", "packing", _packed),
        ("batching", "batch", _batched),
        ("after_another_call", "history", _after_another),
    ]
    for dispatch in DISPATCHES:
        for name in dispatch.backends:
            ways.append((f"backend_{dispatch.op}_{name}", "backends", on_backend(dispatch, name, _plain_and_padded)))
    cells = [subject.cell(name, law, way) for name, law, way in ways]
    cells += [_window(subject), *_controls(subject)]
    if reference is not None:
        cells += compare(subject, reference)
    return Report(dtype=str(subject.model.dtype).removeprefix("torch."), lengths=subject.lengths, cells=cells)


class _Texts(Subject):
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
        self.rows = [self.random(n) for n in self.lengths]
        self.sources = [self.random(n) for n in (5, 5, 5)] if model.encoder and model.decoder else None
        self.run_alone()

    def each(self, model: Model) -> list[Tensor]:
        return [self.run(row[None], [i], model)[0] for i, row in enumerate(self.rows)]

    def random(self, n: int) -> Tensor:
        return torch.randint(self.vocab, (n,), generator=self.generator).to(self.model.device)

    def run(self, tokens: Tensor, documents: list[int], model: Model | None = None, **given: Any) -> Tensor:
        """(B, T, W): what the model gives at every token; ``documents`` says which source each row goes with."""
        state = given.get("state")
        if self.sources is not None and (state is None or not any(state.lengths)):
            given["source"] = torch.stack([self.sources[i] for i in documents])
        out = (model or self.model)(tokens, **given)
        scored = out.logits is not None and out.logits.ndim == 3 and out.logits.shape[:2] == tokens.shape
        return (out.logits if scored else out.hidden).to(torch.promote_types(out.hidden.dtype, torch.float32))

    def shared_inputs(self) -> dict[str, Tensor]:
        """One text. Others know padding by its id, so none stands in it; T5's classes are read at the source's end."""
        ends, pad = self.model.generation.eos_ids, self.model.generation.pad_id
        told = {*ends, *(() if pad is None else (pad,))}
        plain = next((i for i in range(self.vocab) if i not in told), 0)
        row = torch.where(
            torch.isin(self.rows[0], torch.tensor(sorted(told), device=self.model.device)), plain, self.rows[0]
        )
        if self.sources is None:
            return {"tokens": row[None]}
        source = row.clone()
        source[-1] = ends[0] if ends else plain
        return {"tokens": row[None], "source": source[None]}

    def state(self, batch: int) -> Any:
        try:
            return self.model.new_state(batch)
        except UserError as error:
            raise NotApplicable(str(error)) from None


def _chunks(s: _Texts) -> Got:
    state, parts = s.state(1), []
    sizes = [3, 1, s.lengths[0] // 2 - 2]
    for part in s.rows[0][None].split([*sizes, s.lengths[0] - sum(sizes)], dim=1):
        parts.append(s.run(part, [0], state=state))
    return [(0, slice(None), torch.cat(parts, dim=1)[0])]


def _steps(s: _Texts) -> Got:
    state = s.state(1)
    parts = [s.run(token, [0], state=state) for token in s.rows[0][None].split(1, dim=1)]
    return [(0, slice(None), torch.cat(parts, dim=1)[0])]


def _rows(s: _Texts, left: bool) -> tuple[Tensor, Tensor]:
    """All documents, one a row; what stands at padding is a token like any other."""
    width = max(s.lengths) + 2
    tokens = s.random(width * len(s.rows)).view(len(s.rows), width)
    segments = torch.zeros_like(tokens)
    for i, row in enumerate(s.rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, where], segments[i, where] = row, 1
    return tokens, segments


def _real(values: Tensor, segments: Tensor) -> Got:
    return [(i, slice(None), row[real != 0]) for i, (row, real) in enumerate(zip(values, segments, strict=True))]


def _padded(s: _Texts, left: bool) -> Got:
    tokens, segments = _rows(s, left)
    return _real(s.run(tokens, [0, 1, 2], segments=segments), segments)


def _padded_chunks(s: _Texts) -> Got:
    state = s.state(len(s.rows))
    tokens, segments = _rows(s, left=True)
    parts = [
        s.run(t, [0, 1, 2], segments=ids, state=state)
        for t, ids in zip(tokens.split(5, dim=1), segments.split(5, dim=1), strict=True)
    ]
    return _real(torch.cat(parts, dim=1), segments)


def _packed(s: _Texts) -> Got:
    if s.sources is not None:
        raise NotApplicable("an encoder-decoder packs sources and targets together; verify gives one source a row")
    short = s.rows[1:]
    tokens = torch.cat(short)
    segments = torch.cat([torch.full_like(row, i + 1) for i, row in enumerate(short)])
    values = s.run(tokens[None], [0], segments=segments[None])[0]
    return [(i + 1, slice(None), values[segments == i + 1]) for i in range(len(short))]


def _batched(s: _Texts) -> Got:
    others = [s.random(s.lengths[0]) for _ in range(2)]
    values = s.run(torch.stack([others[0], s.rows[0], others[1]]), [1, 0, 2])
    return [(0, slice(None), values[1])]


def _after_another(s: _Texts) -> Got:
    s.run(torch.stack([s.random(s.lengths[0]), s.random(s.lengths[0])]), [0, 1])
    s.run(s.random(2)[None], [0])
    return _plain(s)


def _plain(s: _Texts) -> Got:
    return [(i, slice(None), values) for i, values in enumerate(s.each(s.model))]


def _plain_and_padded(s: _Texts) -> Got:
    return _plain(s) + _padded(s, left=True)


def _window(s: _Texts) -> Cell:
    """Whether the texts were long enough for a window to matter: said, never assumed."""
    if s.reach is None:
        return Cell(name="window", passed=None, reason="no pattern bounds how far a token looks back")
    if s.reach >= s.lengths[0]:
        reason = f"the window of {s.reach} is not shorter than the {s.lengths[0]} tokens read; give a greater length"
        return Cell(name="window", passed=None, reason=reason)
    return Cell(name="window", passed=True, error=0.0, bound=0.0, reason=f"texts are longer than the window {s.reach}")


def _controls(s: _Texts) -> Iterator[Cell]:
    """What must make a difference: without these, a model that ignores its history would pass everything."""
    row = s.rows[0].clone()
    row[1] = (row[1] + 1) % s.vocab
    blind = "no mixer looks at other tokens" if s.reach == 1 or not s.mixes else None
    if blind:
        yield Cell(name="control_history", passed=None, reason=blind)
        yield Cell(name="control_state", passed=None, reason=blind)
        return
    yield must_differ(s, "control_history", s.run(row[None], [0])[0, 2:4], s.alone[0][2:4])
    try:
        s.state(1)
    except NotApplicable as error:
        yield Cell(name="causality", passed=None, reason=str(error))
        yield Cell(name="control_state", passed=None, reason=str(error))
        return
    last = s.rows[0].clone()
    last[-1] = (last[-1] + 1) % s.vocab
    yield s.judge("causality", [(0, slice(0, -1), s.run(last[None], [0])[0, :-1])])
    after = []
    for start in (row[None, :2], s.rows[0][None, :2]):
        state = s.state(1)
        s.run(start, [0], state=state)
        after.append(s.run(s.rows[0][None, 2:4], [0], state=state)[0])
    yield must_differ(s, "control_state", after[0], after[1])

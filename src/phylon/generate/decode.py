"""Prefill and decode over a state: one loop for one prompt or many, at once or as a stream."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor

from phylon.generate.request import Options, Prompt, Request, make_requests
from phylon.generate.sampling import Settings, draw_key, sample
from phylon.generate.text import RowText
from phylon.layers.state import State
from phylon.model import Model
from phylon.spec import UserError
from phylon.spec.errors import check_size


class Generation(TypedDict):
    """What came of one prompt, ready for JSON.

    ``tokens`` are all the model chose, the one that ended the row included; ``logprobs`` are their natural-log
    probabilities under the model itself, before any sampling option (``None`` when not asked for). ``text`` is
    without the end token, special tokens, and the stop string and what follows it (``None`` without a tokenizer).
    ``finish_reason``: "eos" an end id, "stop" a stop string or stop id, "length" the limit asked for, or the model's.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str


class Row:
    """One prompt and what has come of it."""

    def __init__(self, model: Model, request: Request, number: int) -> None:
        self.request = request
        self.number = number
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None if request.max_new_tokens else "length"
        tokenizer = model.tokenizer
        self._text = None if tokenizer is None else RowText(tokenizer, request.prompt, request.stop)

    @property
    def open(self) -> bool:
        return self.finish_reason is None

    def accept(self, token: int, logprob: float | None) -> None:
        """Take the next token and see whether it ends the row."""
        request = self.request
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in request.eos_ids or token in request.stop_ids:
            self.finish_reason = "eos" if token in request.eos_ids else "stop"
        elif self._text is None:
            self.pieces.append("")
        else:
            self._show(self._text.push(token))
            if self._text.stopped:
                self.finish_reason = "stop"
        if self.open and len(self.tokens) >= request.max_new_tokens:
            self.finish_reason = "length"
        if not self.open and self._text is not None:
            self._show(self._text.flush())

    def _show(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)

    def generation(self) -> Generation:
        """The row as it stands."""
        return Generation(
            text=None if self._text is None else "".join(self.pieces),
            tokens=list(self.tokens),
            logprobs=list(self.logprobs) if self.request.logprobs else None,
            finish_reason=self.finish_reason or "length",
        )


class Batch:
    """Rows that decode together; each ``step`` gives every open row one token.

    Unequal prompts are padded on the left, which segments say. A finished row is fed padding, which a state never
    keeps, and leaves the state when half of the rows are finished. With a ``state`` of one row that holds the first
    ``known`` tokens of the prompt already, only the rest is read.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        state: State | None = None,
        known: int = 0,
        prefill_chunk: int = 512,
        first_number: Sequence[int] | None = None,
    ) -> None:
        check_size("prefill_chunk", prefill_chunk)
        assert known == 0 or (state is not None and len(requests) == 1 and known < len(requests[0].prompt))
        self.model = model
        numbers = first_number or range(len(requests))
        self.rows = [Row(model, request, number) for request, number in zip(requests, numbers, strict=True)]
        self.state = state
        self._known = known
        self._prefill_chunk = prefill_chunk
        self._live = [row for row in self.rows if row.open]
        self._logprobs = any(row.request.logprobs for row in self.rows)
        self._settings: Settings | None = None
        self._seen: Tensor | None = None
        self._started = False

    @property
    def open(self) -> bool:
        """Whether any row goes on."""
        return any(row.open for row in self._live)

    def step(self) -> None:
        """The next token of every open row."""
        with evaluating(self.model):
            scores = self._feed() if self._started else self._prefill()
            self._started = True
            self._choose(scores)

    def _prefill(self) -> Tensor:
        """Read the prompts; the scores (B, V) of what follows."""
        prompts = [row.request.prompt[self._known :] for row in self._live]
        if self.state is None:
            most = max(len(row.request.prompt) + row.request.max_new_tokens for row in self._live)
            self.state = self.model.new_state(len(prompts), max_len=most)
        sources = [row.request.source for row in self._live] if self.state.source is None else []
        return prefill(self.model, self.state, prompts, self._prefill_chunk, sources)

    def _feed(self) -> Tensor:
        """Read the last token of every open row; the scores (B, V) of what follows."""
        assert self.state is not None
        stays = [i for i, row in enumerate(self._live) if row.open]
        if 2 * len(stays) <= len(self._live):
            self.state = self.state.rows(stays)
            self._live = [self._live[i] for i in stays]
            self._settings = None
            self._seen = None if self._seen is None else self._seen[stays]
        is_open = [row.open for row in self._live]
        device = self.model.device
        tokens = torch.tensor([[row.tokens[-1] if row.open else 0] for row in self._live], device=device)
        segments = None if all(is_open) else torch.tensor(is_open, device=device).long()[:, None]
        return next_scores(self.model, self.state, tokens, segments)

    def _choose(self, scores: Tensor) -> None:
        rows = self._live
        if self._settings is None:
            samplings = [row.request.sampling for row in rows]
            self._settings = Settings.of(samplings, scores.shape[-1], scores.device)
            if self._settings.repetition_penalty is not None and self._seen is None:
                self._seen = _seen(rows, scores)
        keys = [draw_key(r.request.sampling.seed, r.request.stream, len(r.tokens)) for r in rows]
        finite = scores.amax(-1).isfinite().tolist()
        for row, ok in zip(rows, finite, strict=True):
            if row.open and not ok:
                raise UserError(
                    f"the scores of prompt {row.number} are not finite after {len(row.tokens)} new tokens: "
                    "load the model as float32 or bfloat16, or check its weights with 'phylon verify'"
                )
        chosen = sample(scores, self._settings, keys, self._seen)[:, None]
        if self._seen is not None:
            self._seen.scatter_(1, chosen, True)
        logprobs: list[float | None] = [None] * len(rows)
        if self._logprobs:
            picked = scores.gather(1, chosen)[:, 0] - scores.logsumexp(-1)
            logprobs = [p if r.request.logprobs else None for p, r in zip(picked.tolist(), rows, strict=True)]
        for row, token, logprob in zip(rows, chosen[:, 0].tolist(), logprobs, strict=True):
            if row.open:
                row.accept(token, logprob)


def prefill(
    model: Model,
    state: State,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    sources: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Read the prompts into ``state``, padded on the left, ``chunk`` tokens at a time; the scores (B, V) after them.

    The first call of an encoder-decoder takes its ``sources``.
    """
    width, device = max(map(len, prompts)), model.device
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    segments = None
    if any(len(p) < width for p in prompts):
        segments = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    read = _source(sources, device) if any(sources) else {}
    last = (width - 1) // chunk * chunk
    for start in range(0, last, chunk):
        part = None if segments is None else segments[:, start : start + chunk]
        model(tokens[:, start : start + chunk], segments=part, state=state, logits="none", **read)
        read = {}
    return next_scores(model, state, tokens[:, last:], None if segments is None else segments[:, last:], read)


def _source(sources: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    width = max(map(len, sources))
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sources], device=device)
    segments = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sources], device=device)
    return {"source": tokens, "source_segments": segments}


def next_scores(
    model: Model, state: State, tokens: Tensor, segments: Tensor | None = None, read: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Append ``tokens`` (B, T) to ``state``; the scores (B, V) in fp32 after each row's last real one.

    ``read``: the source of an encoder-decoder, on the first call.
    """
    logits = model(tokens, segments=segments, state=state, logits="last", **(read or {})).logits
    return logits[:, -1].float()


def _seen(rows: Sequence[Row], like: Tensor) -> Tensor:
    """(B, V): which tokens each row holds."""
    seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    for i, row in enumerate(rows):
        seen[i, torch.tensor([*row.request.prompt, *row.tokens], device=like.device)] = True
    return seen


@contextmanager
def evaluating(model: Model) -> Generator[None, None, None]:
    """Inference mode, and eval mode for a model that is being trained."""
    modes = [(module, module.training) for module in model.modules()] if model.training else []
    if modes:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def generate(
    model: Model,
    prompts: str | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    eos_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
    logprobs: bool = True,
    batch_size: int = 16,
    prefill_chunk: int = 512,
) -> list[Generation]:
    """What follows each prompt (a text, or token ids), in the order of the prompts.

    An encoder-decoder reads the prompts as sources, and its texts start from ``model.generation.decoder_start_id``.

    ``temperature`` 0 is greedy; it and the other sampling options default to the model's own, else to plain sampling
    (see ``Sampling`` for their meaning and order). ``stop`` and ``stop_ids`` are for all rows, or a list for each row;
    ``eos_ids`` default to the model's (``()``: none). ``seed`` is for all rows or one each: the same prompt, options
    and seed give the same text alone and in any batch; equal prompts under one seed draw from different streams.
    At most ``batch_size`` rows run together, ``prefill_chunk`` prompt tokens at a time. Text ends at the model's
    ``max_seq_len`` with the reason "length"; a longer prompt is a ``UserError``.
    """
    check_size("batch_size", batch_size)
    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        stop_ids=stop_ids,
        eos_ids=eos_ids,
        seed=seed,
        logprobs=logprobs,
    )
    requests = make_requests(model, prompts, options)
    return run(model, requests, batch_size=batch_size, prefill_chunk=prefill_chunk)


def run(
    model: Model, requests: Sequence[Request], *, batch_size: int = 16, prefill_chunk: int = 512
) -> list[Generation]:
    """``generate`` for rows with settings of their own."""
    # Rows of about the same length run together, so that little is padding.
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    done: dict[int, Generation] = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        chosen = [requests[i] for i in numbers]
        batch = Batch(model, chosen, prefill_chunk=prefill_chunk, first_number=numbers)
        while batch.open:
            batch.step()
        done.update((row.number, row.generation()) for row in batch.rows)
    return [done[i] for i in range(len(requests))]


class TextStream(Iterator[str]):
    """Pieces of text as they become safe to show; together they are the text. ``generation`` is the row so far."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._row = batch.rows[0]
        self._shown = 0

    @property
    def generation(self) -> Generation:
        return self._row.generation()

    def __next__(self) -> str:
        while self._shown == len(self._row.pieces):
            if not self._batch.open:
                raise StopIteration
            self._batch.step()
        self._shown += 1
        return self._row.pieces[self._shown - 1]


def stream(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] | None = None,
    stop_ids: Sequence[int] | None = None,
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    logprobs: bool = True,
    prefill_chunk: int = 512,
) -> TextStream:
    """``generate`` for one prompt, piece by piece; the options are the same, and so is the text.

    Characters that are not whole yet are held back, and so is what may still become a stop string. What is wrong with
    the arguments is said at once, not at the first piece. A model without a tokenizer takes token ids; every token is
    then an empty piece, and ``generation["tokens"]`` holds them.
    """
    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        stop_ids=stop_ids,
        eos_ids=eos_ids,
        seed=seed,
        logprobs=logprobs,
    )
    return TextStream(Batch(model, make_requests(model, [prompt], options), prefill_chunk=prefill_chunk))

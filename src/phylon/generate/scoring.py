"""How probable given texts are: per token, as perplexity, and as choices after a context."""

import math
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from phylon.generate.decode import evaluating
from phylon.generate.request import (
    Prompt,
    check_continues,
    check_ids,
    default_eos_ids,
    encoded,
    first_id,
    listed,
    listed_ids,
    needed_tokenizer,
)
from phylon.model import Model
from phylon.spec import UserError
from phylon.spec.errors import check_size

_CHUNK = 512


class Score(TypedDict):
    """Natural-log probabilities of the tokens of one text, ready for JSON.

    ``logprobs`` goes with ``tokens``; it is ``None`` where nothing comes before (the first token), and for tokens that
    are not scored (the context of a choice). ``total`` is their sum, ``n_scored`` their number, ``mean_nll`` the mean
    negative one in nats a token, ``perplexity`` its exponential. ``text`` is ``None`` for prompts of ids.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float | None]
    total: float
    n_scored: int
    mean_nll: float
    perplexity: float


def score(model: Model, texts: str | Sequence[Prompt], *, batch_size: int = 8) -> list[Score]:
    """The probability of every text (or list of ids), in order. The first token is not predicted by anything."""
    check_continues(model, "tell how probable a text is")
    prompts = listed(texts)
    rows = [encoded(model, p) if isinstance(p, str) else listed_ids(p) for p in prompts]
    for i, ids in enumerate(rows):
        if len(ids) < 2:
            raise UserError(f"text {i} has {len(ids)} tokens; at least two are needed, for the first is not predicted")
    names = [p if isinstance(p, str) else None for p in prompts]
    found = _logprobs(model, rows, batch_size)
    return [_scored(name, ids, found[i], 1) for i, (name, ids) in enumerate(zip(names, rows, strict=True))]


def score_choices(model: Model, context: str, choices: Sequence[str], *, batch_size: int = 8) -> list[Score]:
    """The probability of every choice after ``context``, in order; ``text`` is the choice.

    Context and choice are encoded as one text. The tokens of the choice are those that reach beyond the last character
    of the context, so that a token that merged with the context counts as a whole, and no choice is without one.
    Where such a token would be the very first, all choices are read after the model's BOS, else its EOS.
    """
    check_continues(model, "tell how probable a text is")
    tokenizer = needed_tokenizer(model)
    if isinstance(choices, str) or not choices:
        raise UserError("choices must be a list of at least one text")
    if "" in choices:
        raise UserError(f"choice {list(choices).index('')} is empty; there is nothing to score")
    rows, starts = [], []
    for i, choice in enumerate(choices):
        ids, spans = tokenizer.encode_with_offsets(context + choice)
        inside = [n for n, (_, end) in enumerate(spans) if end > len(context)]
        if not inside:
            raise UserError(f"choice {i} has no token: the tokenizer dropped all of {choice!r}")
        rows.append(list(ids[: inside[-1] + 1]))
        starts.append(inside[0])
    if 0 in starts:
        first = first_id(model)
        first = next(iter(default_eos_ids(model)), None) if first is None else first
        if first is None:
            raise UserError("nothing comes before the choice, and the model has no BOS or EOS; give a longer context")
        rows, starts = [[first, *ids] for ids in rows], [start + 1 for start in starts]
    found = _logprobs(model, rows, batch_size)
    return [_scored(choice, rows[i], found[i], starts[i]) for i, choice in enumerate(choices)]


def _scored(text: str | None, ids: list[int], logprobs: list[float], start: int) -> Score:
    """``logprobs`` are those of ``ids[1:]``; scored are the tokens from ``start`` on."""
    scored = logprobs[start - 1 :]
    total = math.fsum(scored)
    mean = -total / len(scored)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Score(
        text=text,
        tokens=ids,
        logprobs=[None] * start + scored,
        total=total,
        n_scored=len(scored),
        mean_nll=mean,
        perplexity=perplexity,
    )


def _logprobs(model: Model, rows: Sequence[Sequence[int]], batch_size: int) -> list[list[float]]:
    """The log-probability of every token but the first, row by row."""
    check_size("batch_size", batch_size)
    limit = model.spec.max_seq_len
    for i, ids in enumerate(rows):
        check_ids(model, ids)
        if limit is not None and len(ids) > limit:
            raise UserError(f"text {i} has {len(ids)} tokens and the model takes {limit}; score it in parts")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, list[float]] = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        found.update(zip(numbers, _batch_logprobs(model, [rows[i] for i in numbers]), strict=True))
    return [found[i] for i in range(len(rows))]


def _batch_logprobs(model: Model, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    width = max(map(len, rows))
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in rows], device=model.device)
    segments = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in rows], device=model.device)
    parts: list[Tensor] = []
    with evaluating(model):
        # The scores of a long text, tokens x vocabulary, never exist at once.
        state = None if width <= _CHUNK + 1 else model.new_state(len(rows), max_len=width)
        for start in range(0, width - 1, _CHUNK):
            end = min(start + _CHUNK, width - 1)
            out = model(tokens[:, start:end], segments=segments[:, start:end], state=state)
            assert out.logits is not None
            scores, targets = out.logits.float(), tokens[:, start + 1 : end + 1, None]
            parts.append(scores.gather(-1, targets)[..., 0] - scores.logsumexp(-1))
        values = torch.cat(parts, 1).tolist()
    found = [row[: len(ids) - 1] for row, ids in zip(values, rows, strict=True)]
    for row in found:
        if not all(math.isfinite(value) for value in row):
            raise UserError("the scores are not finite: load the model as float32 or bfloat16, or check its weights")
    return found

"""Beam search: the most probable continuations by breadth, on ``State.fork`` and ``State.reorder``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from phylon.generate.decode import evaluating, next_scores, prefill
from phylon.generate.request import Options, Prompt, Request, make_requests
from phylon.model import Model
from phylon.spec import UserError
from phylon.spec.errors import check_number, check_size


class Hypothesis(TypedDict):
    """A generation and its ``score``: total log-probability divided by ``n_new_tokens ** length_penalty``."""

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    score: float


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def score(self, length_penalty: float) -> float:
        return self.total / max(len(self.tokens), 1) ** length_penalty


def beam_search(
    model: Model,
    prompts: str | Sequence[Prompt],
    *,
    n_beams: int = 4,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
    eos_ids: Sequence[int] | None = None,
    prefill_chunk: int = 512,
) -> list[list[Hypothesis]]:
    """The ``n_beams`` best finished continuations of every prompt that the search finds, best first.

    Graves (arXiv:1211.3711), algorithm 1, with the score of Wu et al. (arXiv:1609.08144), section 7, in its plain form:
    the length counts new tokens only, the end token included; a ``length_penalty`` of 0 compares totals. A prompt stops
    when no open beam can come to a better score any more. ``n_beams=1`` is greedy.
    """
    check_size("n_beams", n_beams)
    check_size("prefill_chunk", prefill_chunk)
    check_number("length_penalty", length_penalty)
    if not 0 <= length_penalty < float("inf"):
        raise UserError(f"length_penalty must be at least 0, got {length_penalty}")
    requests = make_requests(model, prompts, Options(max_new_tokens=max_new_tokens, eos_ids=eos_ids))
    return [_search(model, request, n_beams, length_penalty, prefill_chunk) for request in requests]


def _search(model: Model, request: Request, n_beams: int, penalty: float, chunk: int) -> list[Hypothesis]:
    budget = request.max_new_tokens
    done: list[_Beam] = []
    beams = [_Beam()]
    with evaluating(model):
        state = model.new_state(1, max_len=len(request.prompt) + budget)
        scores = prefill(model, state, [request.prompt], chunk, [request.source]) if budget else None
        for step in range(budget):
            assert scores is not None
            beams, parents, ended = _grow(beams, scores, request.eos_ids, n_beams)
            done = sorted([*done, *ended], key=lambda beam: -beam.score(penalty))[:n_beams]
            hope = max((beam.total for beam in beams), default=-float("inf")) / budget**penalty
            if not beams or step == budget - 1 or (len(done) == n_beams and hope <= done[-1].score(penalty)):
                break
            state.reorder(parents)
            tokens = torch.tensor([[beam.tokens[-1]] for beam in beams], device=model.device)
            scores = next_scores(model, state, tokens)
    cut = [beam for beam in beams if len(beam.tokens) == budget]
    best = sorted([*done, *cut], key=lambda beam: -beam.score(penalty))[:n_beams]
    return [_hypothesis(model, request, beam, penalty) for beam in best]


def _grow(
    beams: list[_Beam], scores: Tensor, eos_ids: frozenset[int], n_beams: int
) -> tuple[list[_Beam], list[int], list[_Beam]]:
    """The best ``n_beams`` open continuations with the row each comes from, and what ended among the best."""
    if not bool(scores.amax(-1).isfinite().all()):
        raise UserError("the scores are not finite: load the model as float32 or bfloat16, or check its weights")
    logprobs = scores.log_softmax(-1)
    totals = torch.tensor([beam.total for beam in beams], dtype=torch.float64, device=scores.device)[:, None] + logprobs
    # Enough that n_beams stay open even if every beam's end tokens come first.
    best = totals.flatten().topk(min(n_beams + len(beams) * len(eos_ids), totals.numel()))
    grown, parents, ended = [], [], []
    for total, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        row, token = divmod(index, scores.shape[-1])
        if len(grown) == n_beams or total == -float("inf"):
            break
        logprob = float(logprobs[row, token])
        beam = _Beam((*beams[row].tokens, token), (*beams[row].logprobs, logprob), total)
        if token in eos_ids:
            ended.append(beam)
        else:
            grown.append(beam)
            parents.append(row)
    return grown, parents, ended


def _hypothesis(model: Model, request: Request, beam: _Beam, penalty: float) -> Hypothesis:
    ended = beam.tokens[-1:] != () and beam.tokens[-1] in request.eos_ids
    text = None
    if model.tokenizer is not None:
        decoder = model.tokenizer.stream(skip_special=True)
        for token in request.prompt:
            decoder.push(token)
        text = "".join(map(decoder.push, beam.tokens[:-1] if ended else beam.tokens)) + decoder.flush()
    return Hypothesis(
        text=text,
        tokens=list(beam.tokens),
        logprobs=list(beam.logprobs),
        finish_reason="eos" if ended else "length",
        score=beam.score(penalty),
    )

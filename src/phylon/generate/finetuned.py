"""What a fine-tuned encoder says of a text: a number, the class of every word, where a question is answered in it."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from phylon.generate.encode import check_lengths, has_types, joined, padded
from phylon.generate.kinds import task_of, task_of_head, tokenizer_of
from phylon.model import Model
from phylon.spec import from_data, to_data
from phylon.spec.base import Spec
from phylon.spec.errors import UserError, check_size
from phylon.text import Tokenizer
from phylon.text.tokenizer import Joint

_OF_TASKS, _ANSWERING = "task_specific_params", "phylon_answers"  # where a config.json keeps it


class Answering(Spec, frozen=True, kw_only=True):
    """How answers are read, as a model has been taught; the defaults are those of BERT's released code.

    ``max_answer`` tokens at most; a context that does not fit into rows of ``max_tokens`` (the model's own limit, where
    none is given) is read in windows that move by ``stride`` tokens; with a ``threshold`` there is no answer unless it
    beats column 0 of its window by that much.
    """

    max_answer: int = 30
    stride: int = 128
    threshold: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_answer", "stride", "max_tokens"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))


class Rated(TypedDict):
    """The number that a text is given, or one with a second text."""

    text: str
    score: float
    pair: NotRequired[str]


class Word(TypedDict):
    """A word, as it stands between spaces, and its class."""

    word: str
    label: str


class Labelled(TypedDict):
    """The words of a text with their classes."""

    text: str
    words: list[Word]


class Answer(TypedDict):
    """The likeliest span of the context, and by how much it beats that there is no answer (column 0).

    The answer is empty where that is no more than the threshold the model was taught with.
    """

    question: str
    context: str
    answer: str
    score: float


def taught(model: Model) -> Literal["scores", "words", "answers"] | None:
    """Which of these a head of the model has been taught; ``None`` for another model, or one that writes text."""
    task = task_of(model)
    return None if task == "classes" else task


@torch.inference_mode()
def rate(
    model: Model, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_tokens: int | None = None
) -> list[Rated]:
    """The number of every text, of a model trained with ``text_scores``.

    ``pairs`` holds a second text for each, for a model that was taught pairs. ``max_tokens`` cuts what is longer, as
    ``data.seq_len`` does in training: at the ends, of the longer text first.
    """
    head, tokenizer = _head(model, "scores")
    scores = _scores(model, head, joined(tokenizer, texts, pairs, max_tokens))
    found = [Rated(text=text, score=float(row[0])) for text, row in zip(texts, scores, strict=True)]
    for rated, pair in zip(found, pairs or (), strict=False):
        rated["pair"] = pair
    return found


@torch.inference_mode()
def label_words(model: Model, texts: Sequence[str]) -> list[Labelled]:
    """The class of every word of every text, read at its first token, of a model trained with ``word_classes``."""
    head, tokenizer = _head(model, "words")
    split = [text.split() for text in texts]
    joints = [tokenizer.encode_joint(" ".join(words)) for words in split]
    names = model.labels.get(head)
    found = []
    for text, words, joint, scores in zip(texts, split, joints, _scores(model, head, joints), strict=True):
        classes = scores.argmax(-1).tolist()
        labels = [classes[place] for place in first_tokens(joint, words) if place is not None]
        said = [str(label) if names is None else names[label] for label in labels]
        found.append(Labelled(text=text, words=[Word(word=w, label=s) for w, s in zip(words, said, strict=False)]))
    return found


@torch.inference_mode()
def answer(model: Model, question: str, context: str) -> Answer:
    """Where the context answers the question, of a model trained with ``answers``, as its evaluation has read it."""
    head, tokenizer = _head(model, "answers")
    joint, how = tokenizer.encode_joint(question, context), answering(model)
    if not any(text == 1 for text in joint.texts):
        raise UserError("the context is empty: it has no tokens")
    limits = [most for most in (how.max_tokens, model.spec.max_seq_len) if most is not None]
    rows = list(windows(joint, min(limits, default=len(joint.ids)), how.stride))
    if not rows:
        raise UserError(f"the question alone fills a row of {min(limits)} tokens; make it shorter")
    found = [
        best_span(scores, torch.tensor(context_spans(row)), how.max_answer)
        for row, scores in zip(rows, _scores(model, head, rows), strict=True)
    ]
    margin, first, last = max(found, key=lambda span: span[0])
    said = context[first:last] if how.threshold is None or margin > how.threshold else ""
    return Answer(question=question, context=context, answer=said, score=margin)


def windows(joint: Joint, most: int, stride: int) -> Iterator[Joint]:
    """A question with its context in rows of at most ``most`` tokens: windows of the context that move by ``stride``
    tokens, or by their own length where that is less; none where the question leaves no room."""
    places = [place for place, text in enumerate(joint.texts) if text == 1]
    room = most - len(joint.ids) + len(places)
    if room < 1 or not places:
        return
    first, last = places[0], places[-1] + 1
    for at in range(first, last, min(stride, room)):
        end = min(at + room, last)
        yield joint.keep([*range(first), *range(at, end), *range(last, len(joint.ids))])
        if end == last:
            return


def context_spans(joint: Joint) -> list[tuple[int, int]]:
    """The characters of the context that each token is; (-1, -1) for what is no context."""
    return [span if text == 1 else (-1, -1) for text, span in zip(joint.texts, joint.spans, strict=True)]


def answering(model: Model) -> Answering:
    """How the model has been taught to answer, from what ``remember_answering`` has left."""
    given = _of_tasks(model).get(_ANSWERING, {})
    try:
        return from_data(Answering, given)
    except UserError as error:
        raise UserError(f"'{_OF_TASKS}' of this model's configuration cannot be read: {error}") from None


def remember_answering(model: Model, how: Answering) -> None:
    """Leave with the model how answers are to be read: in ``task_specific_params`` of its configuration."""
    model.kept = model.kept | {_OF_TASKS: _of_tasks(model) | {_ANSWERING: to_data(how)}}


def _of_tasks(model: Model) -> dict[str, Any]:
    found = model.kept.get(_OF_TASKS)
    return found if isinstance(found, dict) else {}


def best_span(scores: Tensor, spans: Tensor, most: int) -> tuple[float, int, int]:
    """The best span of at most ``most`` tokens of the context: by how much it beats column 0, and its characters.

    ``scores`` (T, 2) are those of start and end; only tokens with ``spans`` (T, 2) of the context may be either.
    """
    inside = spans[:, 0] >= 0
    start, end = (scores[:, side].masked_fill(~inside, -torch.inf) for side in (0, 1))
    both = start[:, None] + end[None, :]
    both = both.masked_fill(~torch.ones_like(both, dtype=torch.bool).triu().tril(most - 1), -torch.inf)
    first, last = divmod(int(both.argmax()), len(scores))
    return float(both[first, last] - scores[0].sum()), int(spans[first, 0]), int(spans[last, 1])


def first_tokens(joint: Joint, words: Sequence[str]) -> list[int | None]:
    """The place of the first token of every word of a text of words between single spaces; ``None`` where it has none.

    A byte-level token may hold the space before its word, so that its span begins with the word or before it.
    """
    found: list[int | None] = []
    start = token = 0
    for word in words:
        end = start + len(word)
        while token < len(joint.ids) and (joint.texts[token] is None or joint.spans[token][1] <= start):
            token += 1
        if token < len(joint.ids) and joint.spans[token][0] < end:
            found.append(token)
            token += 1
        else:
            found.append(None)
        start = end + 1
    return found


def _head(model: Model, task: str) -> tuple[str, Tokenizer]:
    if taught(model) != task:
        have = ", ".join(model.spec.heads) or "none"
        raise UserError(f"this model has no head for {task} (its heads: {have})")
    tokenizer = tokenizer_of(model, "read texts")
    return next(name for name, head in model.spec.heads.items() if task_of_head(head) == task), tokenizer


def _scores(model: Model, head: str, joints: Sequence[Joint]) -> list[Tensor]:
    """What a head says of every row, in fp32 on the CPU: (C,) of a text, or (T, C) of its tokens."""
    check_lengths([joint.ids for joint in joints], model.spec.max_seq_len)
    found = []
    for joint in joints:
        tokens, segments = padded([joint.ids], model.device)
        more = {"types": torch.tensor([joint.types], device=model.device)} if has_types(model.spec) else {}
        found.append(model(tokens, segments=segments, **more).heads[head][0].float().cpu())
    return found

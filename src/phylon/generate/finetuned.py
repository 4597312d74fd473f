"""What a fine-tuned encoder says of a text: a number, the class of every word, where a question is answered in it."""

from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from phylon.generate.encode import check_lengths, has_types, joined, padded
from phylon.layers.heads.classify import Classify, Span
from phylon.model import Model
from phylon.spec.base import Head
from phylon.spec.errors import UserError
from phylon.text import Tokenizer
from phylon.text.tokenizer import Joint

MOST_ANSWER = 30  # tokens, as in BERT's released code


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
    """The likeliest span of the context, and by how much it beats that there is no answer (column 0)."""

    question: str
    context: str
    answer: str
    score: float


def taught(model: Model) -> Literal["scores", "words", "answers"] | None:
    """Which of these a head of the model has been taught; ``None`` for another model, or one that writes text."""
    if model.decoder is not None or any(hasattr(head, "vocab_size") for head in model.spec.heads.values()):
        return None
    return next((task for head in model.spec.heads.values() if (task := _task(head))), None)


def _task(head: Head) -> Literal["scores", "words", "answers"] | None:
    if isinstance(head, Span):
        return "answers"
    if not isinstance(head, Classify):
        return None
    return "words" if not head.per_document else "scores" if head.n_classes == 1 else None


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
    """Where the context answers the question, of a model trained with ``answers``; both must fit into one row."""
    head, tokenizer = _head(model, "answers")
    joint = tokenizer.encode_joint(question, context)
    if not any(text == 1 for text in joint.texts):
        raise UserError("the context is empty: it has no tokens")
    spans = torch.tensor([span if text == 1 else (-1, -1) for text, span in zip(joint.texts, joint.spans, strict=True)])
    margin, first, last = best_span(_scores(model, head, [joint])[0], spans, MOST_ANSWER)
    return Answer(question=question, context=context, answer=context[first:last], score=margin)


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
    if model.tokenizer is None:
        raise UserError("this model has no tokenizer; load one from a folder that holds its vocabulary")
    return next(name for name, head in model.spec.heads.items() if _task(head) == task), model.tokenizer


def _scores(model: Model, head: str, joints: Sequence[Joint]) -> list[Tensor]:
    """What a head says of every row, in fp32 on the CPU: (C,) of a text, or (T, C) of its tokens."""
    check_lengths([joint.ids for joint in joints], model.spec.max_seq_len)
    found = []
    for joint in joints:
        tokens, segments = padded([joint.ids], model.device)
        more = {"types": torch.tensor([joint.types], device=model.device)} if has_types(model.spec) else {}
        found.append(model(tokens, segments=segments, **more).heads[head][0].float().cpu())
    return found

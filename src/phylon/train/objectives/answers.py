"""Answers in a context: where they begin and end. BERT (arXiv:1810.04805), sections 4.2 and 4.3."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from phylon.data.labelled import Answered, GivesRecords, read_answers
from phylon.data.passed import usable
from phylon.generate.finetuned import Answering, best_span, context_spans, remember_answering, windows
from phylon.layers.heads.classify import Span
from phylon.model import Model, ModelSpec
from phylon.ops.loss import Loss
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.train.measures import exact_match, token_f1
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, n_learned, need_head, weighed
from phylon.train.objectives.supervised import Arrays, RecordObjective, inputs, joint_arrays, parts, row_feed

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

SEPARATOR = "\x1f"  # between the answers of a question


class Answers(RecordObjective, frozen=True, kw_only=True):
    """Cross-entropy of the first and of the last token of an answer. BERT (arXiv:1810.04805), section 4.2.

    ``question``, ``context``, ``answer`` and ``start`` name the fields of a record: ``start`` is the character of the
    context where the (first) answer begins; an empty answer says that there is none (section 4.3), which is column 0.
    ``weight`` names a field with what a question counts. A context longer than ``data.seq_len`` leaves room for is read
    in windows that move by ``stride`` tokens, or by their own length where that is less (released code), each a row of
    its own; in a window without the whole answer there is none. A prediction is the best span of at most ``max_answer``
    tokens over all windows; with a ``threshold`` it is none unless it beats column 0 of its window by that much.
    Evaluation reports ``exact_match`` and ``f1`` as SQuAD does (arXiv:1606.05250, section 6.1), in shares of 1.
    """

    question: str = "question"
    context: str = "context"
    answer: str = "answer"
    start: str = "start"
    stride: int = 128
    max_answer: int = 30
    threshold: float | None = None
    head: str = "span"
    weight: str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("stride", "max_answer"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")

    def split_by(self) -> tuple[str, ...]:
        return (self.context,)

    def text_fields(self) -> tuple[str, ...]:
        return self.question, self.context

    def read(self, source: GivesRecords) -> Iterator[Answered]:
        return read_answers(source, self.question, self.context, self.answer, self.start, self.weight)

    def measured(self) -> tuple[str, ...]:
        return "exact_match", "f1"

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        need_head(spec, self.head, Span, "answers")

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        if tokenizer.encode_joint("a", "a").texts[:1] != [None]:
            raise UserError("answers needs a token in front of the question ([CLS]), and the tokenizer adds none")

    def feed(self, material: Material) -> Feed:
        made: dict[str, list[Arrays]] = {}
        for which, source in parts(material):
            asked = list(usable(source, self.read(source), lambda row: (row, list(self.windows(material, row)))))
            made[which] = [
                self.with_weight(example, row.weight) | (_reference(row, number) if which == "held-out" else {})
                for number, (row, windows) in enumerate(asked)
                for example in windows
            ]
            lost = [row.where for row, windows in asked if row.start is not None and not any(map(_answered, windows))]
            if lost:
                material.say(
                    f"the answers of {len(lost):,} {which} questions ({', '.join(lost[:3])}, …) are whole in no window "
                    "and learned as none: raise data.seq_len, or lower objective.stride"
                )
        return row_feed(material, made["training"], made.get("held-out"))

    def windows(self, material: Material, row: Answered) -> Iterator[Arrays]:
        """What is read for a question: ``tokens``, ``segments``, ``types``, and the ``targets`` (2,).

        ``spans`` (T, 2) are the characters of the context that a token is, -1 for what is no context.
        """
        joint = material.text.encode_joint(row.question, row.context)
        places = [text for text in joint.texts if text == 1]
        if not places:
            raise UserError(f"{row.where}: the context gives no tokens")
        room = material.recipe.data.seq_len
        if len(joint.ids) - len(places) >= room:
            raise UserError(f"{row.where}: the question alone fills data.seq_len {room} tokens")
        for window in windows(joint, room, self.stride):
            spans = np.array(context_spans(window))
            target = np.array(_columns(spans, row), np.int64)
            yield joint_arrays(window, material.spec, row.where) | {"targets": target, "spans": spans}

    def remember(self, model: Model, recipe: "Recipe") -> None:
        how = Answering(max_answer=self.max_answer, stride=self.stride, threshold=self.threshold)
        remember_answering(model, how.replace(max_tokens=recipe.data.seq_len))

    def scored(self, spec: ModelSpec, batch: Batch) -> dict[str, int]:
        return {self.head: batch["tokens"].numel()}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: n_learned(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = model(**inputs(batch), targets={self.head: weighed(batch)}, logits="none")
        return {self.head: out.losses[self.head]}

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        best: dict[int, tuple[float, str]] = {}
        answers: dict[int, list[str]] = {}
        total = count = 0.0
        for batch in batches:
            out = model(**inputs(batch), targets={self.head: weighed(batch)})
            loss = out.losses[self.head]
            total, count = total + float(loss.sum), count + float(loss.count)
            scores = out.heads[self.head].float().cpu()
            for row, question in enumerate(batch["question"].tolist()):
                margin, first, last = best_span(scores[row], batch["spans"][row].cpu(), self.max_answer)
                context = _text(batch["context"][row])
                said = context[first:last] if self.threshold is None or margin > self.threshold else ""
                if question not in best or margin > best[question][0]:
                    best[question] = (margin, said)
                answers[question] = _text(batch["answers"][row]).split(SEPARATOR)
        pairs = [(said, answers[question]) for question, (_, said) in best.items()]
        return {
            "loss": total / (count or 1.0),
            "exact_match": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "f1": sum(token_f1(*pair) for pair in pairs) / len(pairs),
        }


def _answered(window: Arrays) -> bool:
    """Whether the answer is in the window."""
    return bool(window["targets"].any())


def _columns(spans: np.ndarray, row: Answered) -> tuple[int, int]:
    """The columns of the tokens that hold the first and the last character of the answer; (0, 0) where one is not in
    the window."""
    if row.start is None:
        return 0, 0
    ends = [
        np.flatnonzero((spans[:, 0] >= 0) & (spans[:, 0] <= at) & (spans[:, 1] > at))
        for at in (row.start, row.start + len(row.answers[0]) - 1)
    ]
    return (int(ends[0][0]), int(ends[1][-1])) if len(ends[0]) and len(ends[1]) else (0, 0)


def _reference(row: Answered, number: int) -> Arrays:
    """What a prediction is compared with, as code points, since a batch holds numbers."""
    return {
        "question": np.array(number),
        "context": np.array([ord(letter) for letter in row.context], np.int64),
        "answers": np.array([ord(letter) for letter in SEPARATOR.join(row.answers) or SEPARATOR], np.int64),
    }


def _text(points: Tensor) -> str:
    """The text of padded code points."""
    return "".join(map(chr, points.tolist())).rstrip("\0")


register(Answers, paper="arXiv:1810.04805 §4.2", cases=lambda: [Answers(), Answers(threshold=0.0, stride=64)])

"""What kind of model one is, in words, and the command that shows what it does: so that a refusal names both."""

from typing import Literal, NamedTuple

from phylon.layers.heads.classify import Classify, Span
from phylon.model import Model
from phylon.spec.base import Head
from phylon.spec.errors import UserError
from phylon.text import Tokenizer

Task = Literal["classes", "scores", "words", "answers"]


class Kind(NamedTuple):
    """``name`` with its article; ``shown_by`` is what does run it."""

    name: str
    shown_by: str


_SCORED: dict[Task, Kind] = {
    "classes": Kind("a classifier of texts", "phylon score says the class of a text"),
    "scores": Kind("a model that gives a text a number", "phylon score says the number of a text"),
    "words": Kind("a classifier of words", "phylon score says the class of every word"),
    "answers": Kind("a model that answers questions", "phylon score finds the answer in a context"),
}


def kind_of(model: Model) -> Kind:
    """The kind of a model by its stacks and heads."""
    both = model.encoder is not None and model.decoder is not None
    if not reads_text(model):
        return Kind("a model of images", "no command reads them, call it in Python with images=")
    if writes_text(model):
        if both:
            return Kind("an encoder-decoder", "phylon generate writes what it makes of a text")
        return Kind("a language model", "phylon generate goes on from a text")
    if both:
        return Kind("an encoder-decoder without a language-model head", "phylon show says what it has")
    if (task := task_of(model)) is not None:
        return _SCORED[task]
    name = "an encoder without a task's head" if model.decoder is None else "a decoder without a language-model head"
    if model.decoder is None and _has_vocabulary(model):
        name = "a masked language model"
    return Kind(name, "phylon encode gives the vectors of texts")


def refused(model: Model, what: str) -> UserError:
    """The error for a model that does not do ``what``."""
    kind = kind_of(model)
    return UserError(f"this is {kind.name}, which does not {what}: {kind.shown_by}")


def reads_text(model: Model) -> bool:
    """Whether what the model begins with is text; images are not."""
    first = model.spec.encoder or model.spec.decoder
    return hasattr(getattr(first, "embed", None), "vocab_size")


def writes_text(model: Model) -> bool:
    """Whether the model writes text token by token: a decoder whose first head is of a vocabulary."""
    return model.decoder is not None and hasattr(next(iter(model.spec.heads.values()), None), "vocab_size")


def task_of(model: Model) -> Task | None:
    """What a head says of one text: "classes", "scores", "words" or "answers"; beside a language model it is there for
    training, and an encoder-decoder reads two."""
    if (model.encoder is not None and model.decoder is not None) or _has_vocabulary(model):
        return None
    return next((task for head in model.spec.heads.values() if (task := task_of_head(head))), None)


def task_of_head(head: Head) -> Task | None:
    """What one head says, by the names of ``task_of``."""
    if isinstance(head, Span):
        return "answers"
    if head.per_document and getattr(head, "n_classes", 0) > 1:
        return "classes"
    if not isinstance(head, Classify):
        return None
    return "scores" if head.per_document else "words"


def tokenizer_of(model: Model, what: str) -> Tokenizer:
    """The tokenizer of a model that is to read text for ``what``."""
    if not reads_text(model):
        raise refused(model, what)
    if model.tokenizer is None:
        raise UserError("this model has no tokenizer; load one from a folder that holds its vocabulary")
    return model.tokenizer


def _has_vocabulary(model: Model) -> bool:
    return any(hasattr(head, "vocab_size") for head in model.spec.heads.values())

"""Classes of texts, by the names that the model has been taught."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import torch

from phylon.generate.encode import batches, check_lengths, has_types, joined, padded, shortened
from phylon.generate.kinds import task_of, task_of_head, tokenizer_of
from phylon.model import Model
from phylon.spec.errors import UserError, check_size


class Classified(TypedDict):
    """The likeliest class of a text (or of a pair), and the probability of each by name; ready for JSON.

    They sum to 1, but for a model whose texts may be of several classes at once, where each has its own.
    """

    text: str
    label: str
    probabilities: dict[str, float]
    pair: NotRequired[str]


def classifier(model: Model) -> str | None:
    """The head that gives a text classes, if the model has one; beside a language model it is there for training."""
    if task_of(model) is None:
        return None
    return next((name for name, head in model.spec.heads.items() if task_of_head(head) == "classes"), None)


@torch.inference_mode()
def classify(
    model: Model,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_tokens: int | None = None,
    batch_tokens: int = 4096,
) -> list[Classified]:
    """The class of each text, in order. Classes without names (``model.labels``) are called by their numbers.

    A model whose config says ``problem_type`` "multi_label_classification" (``model.kept``) judges each class apart, by
    a sigmoid; every other one by a softmax over all.

    ``pairs`` holds a second text for each, for a model that was taught pairs. ``max_tokens`` shortens a text as
    ``encode`` does, and two as ``data.seq_len`` does in training: at the ends, of the longer text first; without it a
    text longer than the model's positions is refused.

    Raises:
        UserError: no head with classes of texts, no tokenizer, an empty text, a text that is too long.
    """
    if isinstance(texts, str):
        raise UserError("classify takes a list of texts; write classify(model, [text])")
    head = classifier(model)
    if head is None:
        have = ", ".join(model.spec.heads) or "none"
        raise UserError(f"this model has no head that gives a text classes (its heads: {have}); train text_classes")
    tokenizer = tokenizer_of(model, "read texts")
    check_size("batch_tokens", batch_tokens)
    n_classes: int = model.spec.heads[head].n_classes  # type: ignore[attr-defined]
    names = model.labels.get(head, tuple(map(str, range(n_classes))))
    types: list[list[int]] | None = None
    if pairs is None:
        rows = [shortened(ids, max_tokens) for ids in tokenizer.encode_batch(texts)]
    else:
        joints = joined(tokenizer, texts, pairs, max_tokens)
        rows = [joint.ids for joint in joints]
        types = [joint.types for joint in joints] if has_types(model.spec) else None
    check_lengths(rows, model.spec.max_seq_len)
    several = model.kept.get("problem_type") == "multi_label_classification"
    shares = torch.empty(len(rows), n_classes)
    for chosen in batches([len(ids) for ids in rows], batch_tokens):
        tokens, segments = padded([rows[i] for i in chosen], model.device)
        of_types = None if types is None else padded([types[i] for i in chosen], model.device)[0]
        scores = model(tokens, segments=segments, types=of_types).heads[head].float()
        shares[chosen] = (scores.sigmoid() if several else scores.softmax(-1)).cpu()
    found = []
    for text, row in zip(texts, shares.tolist(), strict=True):
        likeliest = max(range(n_classes), key=row.__getitem__)
        shares_by_name: dict[str, float] = {}
        for name, share in zip(names, row, strict=True):  # two classes may have one name (ImageNet's two cranes)
            before = shares_by_name.get(name, 0.0)
            shares_by_name[name] = max(before, share) if several else before + share
        found.append(Classified(text=text, label=names[likeliest], probabilities=shares_by_name))
    for classified, pair in zip(found, pairs or (), strict=False):
        classified["pair"] = pair
    return found

"""Names of classes beside the weights: ``id2label`` of a Hugging Face config, ``labels`` of the native one."""

from collections.abc import Mapping
from typing import Any

from phylon.model import Model, ModelSpec
from phylon.spec.errors import UserError

Labels = dict[str, tuple[str, ...]]
TABLED = ("class", "token", "distilled")
"""The heads whose classes a Hugging Face config counts by its table of names, the first there is."""


def native_labels(spec: ModelSpec, data: Any) -> Labels:
    """The names by head; they must be as many as the head has classes."""
    if not isinstance(data, dict):
        raise UserError("'labels' must be a table of lists, by head")
    for head, names in data.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"labels.{head} must be a list of names")
        check_labels(spec, head, names)
    return {head: tuple(names) for head, names in data.items()}


def check_labels(spec: ModelSpec, head: str, names: list[str]) -> None:
    """Refuse names that do not fit a head."""
    n = _n_classes(spec, head)
    if n is None:
        raise UserError(f"labels name the head '{head}', which has no classes in this model")
    if len(names) != n:
        raise UserError(f"labels.{head} has {len(names)} names, and the head {n} classes; give one for each")


def hf_labels(spec: ModelSpec, table: Any) -> Labels:
    """The names in ``id2label``; numbers are names too.

    None where it only numbers the classes (LABEL_0, LABEL_1, …), where there is no head, and where it does not name
    each class from 0 on: the reference only counts the table.
    """
    head = _tabled(spec)
    if head is None or not isinstance(table, dict) or not table:
        return {}
    numbers = [str(i) for i in range(len(table))]
    if set(map(str, table)) != set(numbers) or not all(isinstance(name, str | int | float) for name in table.values()):
        return {}
    by_number = {str(number): str(name) for number, name in table.items()}
    names = tuple(by_number[number] for number in numbers)
    plain = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return {} if plain or len(names) != _n_classes(spec, head) else {head: names}


def hf_tables(model: Model) -> dict[str, Any]:
    """``id2label`` and ``label2id`` of a model whose classes have names."""
    names = model.labels.get(_tabled(model.spec) or "")
    if names is None:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def names_the_classes(table: Any, model: Model) -> bool:
    """Whether an ``id2label`` gives the classes the names that they have in the model."""
    head = _tabled(model.spec) or ""
    return hf_labels(model.spec, table).get(head) == model.labels.get(head)


def kept_labels(labels: Mapping[str, tuple[str, ...]], old: ModelSpec, new: ModelSpec) -> Labels:
    """The names of the heads that stay as they are when a model is changed."""
    return {head: names for head, names in labels.items() if new.heads.get(head) == old.heads[head]}


def _tabled(spec: ModelSpec) -> str | None:
    return next((head for head in TABLED if head in spec.heads), None)


def _n_classes(spec: ModelSpec, head: str) -> int | None:
    return getattr(spec.heads.get(head), "n_classes", None)

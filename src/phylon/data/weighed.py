"""What a text counts in a loss: a weight for all of it, or one for each of its parts."""

import math
from collections.abc import Mapping
from typing import Any

from phylon.data.documents import Document
from phylon.data.passed import Empty
from phylon.spec.errors import UserError, did_you_mean


def document_of(fields: Mapping[str, Any], name: str, field: str, weight: str | None = None) -> Document:
    """The document that the field ``field`` of a record holds: a text, or a list of its parts.

    A part is a text, or ``{"text": …, "weight": …}``. The number in the field ``weight``, if one is named, weighs the
    whole document.
    """
    if field not in fields:
        raise UserError(f"{name}: no field '{field}'{did_you_mean(field, fields)}")
    value = fields[field]
    parts = [_part(part, f"{name}: a part of '{field}'") for part in value] if isinstance(value, list) else None
    if parts is None:
        if value is not None and not isinstance(value, str):
            raise UserError(f"{name}: the field '{field}' is not text but {type(value).__name__}")
        parts = [(value or "", 1.0)]
    factor = weight_of(fields, name, weight)
    text = "".join(part for part, _ in parts)
    if not text:
        raise Empty(f"{name}: the field '{field}' is empty")
    weights = tuple((len(part), number * factor) for part, number in parts if part)
    return Document(text, name, () if all(number == 1 for _, number in weights) else weights)


def weight_of(fields: Mapping[str, Any], name: str, field: str | None) -> float:
    """The number in the field that weighs a record; 1 where no field is named."""
    if field is None:
        return 1.0
    if field not in fields:
        raise UserError(f"{name}: no field '{field}'{did_you_mean(field, fields)}")
    return _number(fields[field], f"{name}: the weight in '{field}'")


def _part(part: Any, what: str) -> tuple[str, float]:
    if isinstance(part, str):
        return part, 1.0
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise UserError(f'{what} is neither a text nor {{"text": …, "weight": …}}')
    if unknown := [key for key in part if key not in ("text", "weight")]:
        raise UserError(f"{what} has the unknown key '{unknown[0]}'{did_you_mean(str(unknown[0]), ['text', 'weight'])}")
    given = part.get("weight")
    return part["text"], 1.0 if given is None else _number(given, f"{what} has a weight that")


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"{what} is not a number of at least 0: {value!r}")
    return number

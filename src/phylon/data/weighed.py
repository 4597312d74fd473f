"""What a text counts in a loss: a weight for all of it, or one for each of its parts."""

import math
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np

from phylon.data.documents import Document, Record
from phylon.data.passed import Empty
from phylon.spec.errors import UserError, did_you_mean

MOST = float(np.finfo(np.float32).max)


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
    factor = weight_of(Record(fields, name), weight)
    text = "".join(part for part, _ in parts)
    if not text:
        raise Empty(f"{name}: the field '{field}' is empty")
    weights = tuple((len(part), _number(number * factor, f"{name}: a weight")) for part, number in parts if part)
    return Document(text, name, () if all(number == 1 for _, number in weights) else weights)


def weight_of(record: Record, field: str | None) -> float:
    """The number in the field that weighs a record; 1 where no field is named."""
    if field is None:
        return 1.0
    if field not in record.fields:
        raise UserError(f"{record.name}: no field '{field}'{did_you_mean(field, record.fields)}")
    value, what = record.fields[field], f"{record.name}: the weight in '{field}'"
    if record.cells and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(value)
    return _number(value, what)


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
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not 0 <= value < math.inf:
        raise UserError(f"{what} is not a number of at least 0: {_shown(value)}")
    if value > MOST:
        raise UserError(f"{what} is more than fp32 holds ({MOST:.3g}): {_shown(value)}; only their ratios count")
    return float(value)


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}…"

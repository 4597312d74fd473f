"""What every builder says of an impossible size, before anything is computed with it."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from phylon.model.spec import ModelSpec
from phylon.spec.errors import check_size

P = ParamSpec("P")

MAY_BE_ZERO = frozenset(["n_dense", "n_mtp", "n_extra", "attention_offset", "expert_offset", "pad_id"])
"""Arguments of builders that count from 0; all other whole numbers are sizes."""


def sized(builder: Callable[P, ModelSpec]) -> Callable[P, ModelSpec]:
    """A builder that refuses arguments which should be whole numbers and are not, or are too small."""
    hints = inspect.get_annotations(builder, eval_str=True)
    optional = {name: hint is not int for name, hint in hints.items() if hint in (int, int | None)}

    @wraps(builder)
    def checked(*args: P.args, **kwargs: P.kwargs) -> ModelSpec:
        for name, value in kwargs.items():
            if name in optional and not (value is None and optional[name]):
                check_size(name, value, 0 if name in MAY_BE_ZERO else 1)
        return builder(*args, **kwargs)

    return checked

"""Bytes of a model's state, measured on states that are made on the meta device."""

from typing import NamedTuple

from phylon.model import Model
from phylon.spec.errors import UserError

# Longer than every window, so that only what grows without bound differs between this length and the next.
_FAR = 2**40


class StateBytes(NamedTuple):
    """``per_token`` and ``fixed`` of one row, ``total`` and ``index_total`` of all rows."""

    per_token: int | None
    fixed: int | None
    total: int | None
    index_total: int | None


def state_bytes(model: Model, batch: int, seq_len: int) -> StateBytes | str:
    """The bytes of a state of a model on the meta device, or the reason why it keeps none. Rows are all alike.

    Raises:
        UserError: a ``seq_len`` that no tensor can have.
    """
    try:
        row = model.new_state(1, max_len=seq_len)
    except UserError as error:
        return str(error)
    except (RuntimeError, TypeError) as error:
        if "verflow" not in str(error):
            raise
        raise UserError(f"seq_len {seq_len} is more than a tensor can have; choose fewer") from None
    far, further = (model.new_state(1, max_len=length).n_bytes for length in (_FAR, _FAR + 1))
    per_token = further - far
    return StateBytes(per_token, far - per_token * _FAR, batch * row.n_bytes, batch * row.index_bytes)

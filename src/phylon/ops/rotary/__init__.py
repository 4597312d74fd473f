"""The rotation of rotary positions, behind one dispatch."""

from torch import Tensor

from phylon.ops.dispatch import Dispatch
from phylon.ops.rotary.call import RotaryCall
from phylon.ops.rotary.native import Native
from phylon.ops.rotary.reference import Reference

dispatch: Dispatch[RotaryCall] = Dispatch("rotary", [Native(), Reference()])


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], *, backend: str | None = None) -> Tensor:
    """``x`` (B, T, H, E) with its leading features turned by cosines and sines (B or 1, T, 1, half), half-split.

    RoFormer (arXiv:2104.09864), section 3.2.2. Computed in at least fp32, returned in ``x``'s dtype.
    """
    call = RotaryCall(x, *tables)
    return dispatch.pick(call, backend).run(call)


__all__ = ["RotaryCall", "dispatch", "rotate"]

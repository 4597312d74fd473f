"""Whether what a side made is right."""

from collections.abc import Sequence

from torch import Tensor


def off(names: Sequence[str], found: Sequence[Tensor], exact: Sequence[Tensor], limit: float) -> str | None:
    """The first tensor that is further than ``limit`` of its norm from the ``exact`` one; one with a NaN is, too."""
    for name, ours, theirs in zip(names, found, exact, strict=True):
        if ours.shape != theirs.shape:
            return f"{name} is {tuple(ours.shape)}, it should be {tuple(theirs.shape)}"
        wide = theirs.detach().double()
        error = float((ours.detach().double() - wide).norm() / wide.norm().clamp(min=1e-30))
        if not error <= limit:
            return f"{name} is off by {error:.1e} of its norm, the limit is {limit:.0e}"
    return None

"""What the kernels of this folder must get right before anybody uses them: every one, in every dtype."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from phylon.ops.scan.call import Breaks, SSDCall
from phylon.ops.scan.check import Draw, Found, both_ways, broken, checked
from phylon.ops.scan.reference import SSDReference
from phylon.ops.scan.ssd.native import LIBRARY, SSDNative


def check() -> str | None:
    """``None``, or which kernel is wrong, or not known here."""
    return checked(LIBRARY, CHECKS)


def _scans(draw: Draw) -> Found:
    """Ragged chunks, plain and broken; groups of five heads, more than a thread takes together; steps."""
    for length, breaks in ((70, Breaks()), (70, broken(70))):
        made = partial(SSDCall, breaks=breaks)
        yield from both_ways("Mamba-2's scan", SSDNative(), SSDReference(), made, _inputs(draw, length))
    inputs, found = _inputs(draw, 1), []
    for backend, dtype in ((SSDNative(), None), (SSDReference(), torch.float64)):
        with torch.no_grad():
            tensors = {name: t.to(dtype or t.dtype) for name, t in inputs.items()}
            found.append(backend.run(SSDCall(**tensors, breaks=Breaks())))
    for name, got, wanted in zip(("the output", "the state"), *found, strict=True):
        yield f"{name} of a step of Mamba-2's scan", got, wanted


def _inputs(draw: Draw, length: int) -> dict[str, Tensor]:
    heads, groups, width, size = 10, 2, 19, 37
    inputs = {"x": draw(2, length, heads, width), "D": draw(heads), "A": -torch.exp(draw(heads))}
    inputs |= {name: draw(2, length, groups, size) for name in ("B", "C")}
    inputs |= {"dt": torch.nn.functional.softplus(draw(2, length, heads))}
    return inputs | {"state": draw(2, heads, width, size).float()}


CHECKS: dict[str, Callable[[Draw], Found]] = dict.fromkeys(("ssd_starts", "ssd_forward", "ssd_backward"), _scans)

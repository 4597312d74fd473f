"""Counter-based random numbers: a dropout mask that depends on a seed and an index, never on the tiling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phylon.patterns.mixing import mix


def keep_mask(
    seed: int, shape: Sequence[int], rate: float, device: torch.device, *, origin: Sequence[int] = (0, 0, 0, 0)
) -> Tensor:
    """Boolean mask of ``shape`` (B, H, T, S) that keeps a share ``1 - rate``; a pure function of seed and index.

    ``origin`` is the index of the tile's first element in the whole (B, H, T, S): a backend asks for any tile alone.
    """
    state = torch.full((), seed & 0xFFFFFFFF, dtype=torch.int64, device=device)
    for dim, (size, first) in enumerate(zip(shape, origin, strict=True)):
        index = torch.arange(first, first + size, device=device).view(-1, *[1] * (len(shape) - dim - 1))
        state = mix(state ^ mix(index + (dim + 1) * 0x9E3779B1 & 0xFFFFFFFF))
    return state >= int(rate * 2**32)

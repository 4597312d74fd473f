"""The block formats of GGUF: sizes, and decoding to float32, bit for bit what ``gguf.quants.dequantize`` gives.

A row is cut in blocks of consecutive elements that share a scale ``d`` (and a minimum ``m``); the low nibbles of a
4-bit block are its first half, the high nibbles its second. The old formats are decoded here, in PyTorch; all others
(K-quants, IQ, TQ, …) by the ``gguf`` package, imported when such a tensor occurs.
"""

from collections.abc import Callable

import numpy as np
import torch

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Type id -> (name, elements a block, bytes a block): what can be read."""

_LOW_NIBBLES = 0x0F0F_0F0F_0F0F_0F0F

TYPE_IDS = {name: number for number, (name, _, _) in BLOCKS.items()}


def _halves(blocks: torch.Tensor, count: int = 1) -> tuple[torch.Tensor, ...]:
    """The ``count`` float16 that every block starts with, each as float32 ``(n, 1)``."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float().split(1, dim=1)


def _nibbles(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 16 bytes at ``start`` of every block as 32 values of 0..15, uint8 ``(n, 32)``; eight bytes at a time."""
    packed = blocks[:, start : start + 16].contiguous().view(torch.int64)
    return torch.cat((packed & _LOW_NIBBLES, (packed >> 4) & _LOW_NIBBLES), dim=1).view(torch.uint8)


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 five-bit values 0..31: four bytes of fifth bits at ``start``, element k in bit k, then the nibbles."""
    high = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return _nibbles(blocks, start + 4) | ((high & 1) << 4).view(-1, 32)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    (d,) = _halves(blocks)
    out.copy_(_nibbles(blocks, 2)).sub_(8).mul_(d)


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    d, m = _halves(blocks, 2)
    out.copy_(_nibbles(blocks, 4)).mul_(d).add_(m)


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    (d,) = _halves(blocks)
    out.copy_(_fives(blocks, 2)).sub_(16).mul_(d)


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    d, m = _halves(blocks, 2)
    out.copy_(_fives(blocks, 4)).mul_(d).add_(m)


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    (d,) = _halves(blocks)
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(d)


_DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def decode(dtype: str, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Decode whole rows: ``rows`` uint8 ``(n, bytes a row)`` into float32 ``out`` ``(n, elements a row)``."""
    _, elements, nbytes = BLOCKS[TYPE_IDS[dtype]]
    decoder = _DECODERS.get(dtype)
    if decoder is not None:
        decoder(rows.view(-1, nbytes), out.view(-1, elements))
        return
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):  # a scale that is not finite is the file's matter
        values = quants.dequantize(rows.numpy(), GGMLQuantizationType[dtype])
    out.copy_(torch.from_numpy(values).view(out.shape))


def encode(dtype: str, rows: torch.Tensor) -> torch.Tensor:
    """Quantise float32 rows ``(n, elements a row)`` to uint8 ``(n, bytes a row)`` with the ``gguf`` package."""
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.quantize(rows.contiguous().numpy(), GGMLQuantizationType[dtype]))

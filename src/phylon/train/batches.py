"""Batches of evaluation, seen from outside: a hash of all, a few rows of the first."""

import zlib
from collections.abc import Iterable

import torch

from phylon.train.objectives.base import Batch


def hash_of(batches: Iterable[Batch]) -> str:
    """The CRC-32 of every tensor's name, type, shape and content, 8 hexadecimal digits."""
    found = 0
    for batch in batches:
        for name in sorted(batch):
            tensor = batch[name].cpu().contiguous()
            found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
            found = zlib.crc32(memoryview(tensor.view(-1).view(torch.uint8).numpy()), found)  # pyrefly: ignore[bad-argument-type]
    return f"{found:08x}"


def first_rows(batches: Iterable[Batch], count: int) -> list[Batch]:
    """The first rows of the first batch, as a list of one batch, or of none."""
    for batch in batches:
        return [{name: tensor[:count] for name, tensor in batch.items()}]
    return []

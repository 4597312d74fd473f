"""Writing GGUF version 3: the header first, then tensor by tensor, quantised a block of rows at a time."""

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from phylon.checkpoint.files import finish, quoted, write_tensor, written_beside
from phylon.checkpoint.gguf_blocks import BLOCKS, TYPE_IDS, encode
from phylon.checkpoint.gguf_io import ARRAY, SCALARS, STRING
from phylon.checkpoint.source import DTYPES
from phylon.spec.errors import UserError, did_you_mean

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, UINT64, INT64 = 4, 5, 6, 7, 10, 11

CHUNK = 1 << 19  # elements quantised at a time

Choice = Callable[[str, tuple[int, ...]], str]


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    quant: str | Choice = "F32",
) -> Path:
    """Write a GGUF file, beside and renamed.

    ``quant`` is a stored type for matrices whose rows fit its blocks, with F32 for everything else, or a function of a
    tensor's name and shape. Metadata: integers are written as 32 bits where they fit (lists of them signed), floats as
    float32. ``tensors`` is walked twice: give a mapping or a re-iterable to keep one computed tensor in memory.

    Raises:
        UserError: a type that cannot be written, a value that float16 cannot hold, no space on the disk.
    """
    path = Path(path)
    pairs = list(tensors) if iter(tensors) is tensors else tensors
    choose = quant if callable(quant) else _matrices(_writable(quant))
    plan = {name: (tuple(t.shape), _fitting(name, tuple(t.shape), choose)) for name, t in _items(pairs)}
    header = _header(metadata, plan)
    with written_beside(path) as (temporary,), temporary.open("wb") as file:
        file.write(header)
        for name, tensor in _items(pairs):
            assert plan[name][0] == tuple(tensor.shape), name
            written = _write_rows(file, name, tensor, plan[name][1])
            file.write(bytes(-written % ALIGNMENT))
        finish(file)
    return path


def _items(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _writable(dtype: str) -> str:
    if dtype not in WRITABLE:
        raise UserError(f"GGUF tensors cannot be written as {quoted(dtype)}{did_you_mean(dtype, WRITABLE)}")
    return dtype


def _matrices(dtype: str) -> Choice:
    block = BLOCKS[TYPE_IDS[dtype]][1]
    return lambda name, shape: dtype if len(shape) > 1 and shape[-1] % block == 0 else "F32"


def _fitting(name: str, shape: tuple[int, ...], choose: Choice) -> str:
    dtype = _writable(choose(name, shape))
    block = BLOCKS[TYPE_IDS[dtype]][1]
    if (shape[-1] if shape else 1) % block:
        raise UserError(
            f"tensor {quoted(name)}: rows of {shape[-1] if shape else 1} do not fit {dtype}'s blocks of {block}"
        )
    if len(shape) > 4:
        raise UserError(f"tensor {quoted(name)} has {len(shape)} dimensions, GGUF allows 4")
    return dtype


def _header(metadata: Mapping[str, Any], plan: Mapping[str, tuple[tuple[int, ...], str]]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(plan), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(key, value)
        parts += [_string(key), struct.pack("<I", kind), data]
    offset = 0
    for name, (shape, dtype) in plan.items():
        number = TYPE_IDS[dtype]
        _, elements, nbytes = BLOCKS[number]
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset)]
        size = math.prod(shape) // elements * nbytes
        offset += size + -size % ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _kind(key: str, values: list[Any]) -> int:
    """The value type that holds all ``values``, which are of one Python type."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return STRING
    if kinds == {bool}:
        return BOOL
    if kinds <= {int, float} and float in kinds:
        return FLOAT32
    if kinds == {int} and min(values) >= -(1 << 31) and max(values) < 1 << 31:
        return INT32
    if kinds == {int} and min(values) >= 0 and max(values) < 1 << 64:
        return UINT32 if max(values) < 1 << 32 else UINT64
    if kinds == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 63:
        return INT64
    raise UserError(f"the metadata {quoted(key)} is none of str, int, float, bool and lists of one of these")


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """The value type and the bytes of one metadata value."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    kind = _kind(key, values) if values else INT32
    try:
        data = (
            b"".join(map(_string, values)) if kind == STRING else struct.pack(f"<{len(values)}{SCALARS[kind]}", *values)
        )
    except OverflowError:
        raise UserError(f"the metadata {quoted(key)} has a number that float32 cannot hold") from None
    if isinstance(value, (list, tuple)):
        return ARRAY, struct.pack("<IQ", kind, len(values)) + data
    return (UINT32 if kind == INT32 and value >= 0 else kind), data


def _write_rows(file: BinaryIO, name: str, tensor: torch.Tensor, dtype: str) -> int:
    """Cast or quantise and write; returns the bytes written."""
    if tensor.numel() == 0:
        return 0
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    step, written = max(1, CHUNK // rows.shape[1]), 0
    for k in range(0, rows.shape[0], step):
        part = rows[k : k + step].cpu()
        if dtype in DTYPES:
            stored = part.to(DTYPES[dtype])
            if dtype == "F16" and not torch.equal(stored.isfinite(), part.isfinite()):
                raise UserError(f"tensor {quoted(name)} has values that F16 cannot hold: write it as BF16 or F32")
        else:
            stored = encode(dtype, part.float())
        written += write_tensor(file, stored)
    return written

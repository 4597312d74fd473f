"""GGUF: a header parser that checks every count, length and offset against the file, data through a memory map.

Format (versions 2 and 3, little-endian): magic, version, number of tensors and of metadata pairs; the pairs; one record
a tensor (name, sizes fastest first, type, offset); the data, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phylon.checkpoint.files import MappedFile, quoted
from phylon.checkpoint.gguf_blocks import BLOCKS, decode
from phylon.checkpoint.source import DTYPES, SERIAL, TensorInfo, TensorSource, is_possible_shape
from phylon.spec.errors import UserError

SCALARS = ["B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"]  # struct letter by value type
STRING, ARRAY = 8, 9
MAX_ARRAY = 1 << 22  # elements; ten times the largest vocabulary
MAX_NAME = 65535  # bytes of a key or a tensor name


def open_gguf(path: str | Path) -> TensorSource:
    """Open a ``.gguf`` file; ``.metadata`` maps keys to ``str``, ``int``, ``float``, ``bool`` and lists of these.

    Shapes are row-major (the file's lists reversed), dtypes are GGUF type names. Rows of ``q`` and ``k`` stay as the
    file has them (the llama kind permutes them): undoing that is the mapping's business.

    Raises:
        UserError: no such file, not GGUF, truncated, or a header that does not add up.
    """
    file = MappedFile(Path(path))
    reader = _Reader(file)
    tensor_count, pair_count = reader.start()
    metadata = reader.pairs(pair_count)
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UserError(f"{path} is one of {quoted(str(parts))} parts: merge them with llama-gguf-split --merge first")
    tensors, starts = reader.records(tensor_count, _alignment(file.path, metadata))
    return GgufSource(file, tensors, starts, metadata)


class GgufSource:
    """Tensors of one mapped GGUF file."""

    def __init__(
        self, file: MappedFile, tensors: dict[str, TensorInfo], starts: dict[str, int], metadata: dict[str, Any]
    ):
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.metadata: Mapping[str, Any] = metadata
        self._file, self._starts = file, starts

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        if info.dtype in DTYPES:
            return self._file.tensor(self._starts[name], info.nbytes, DTYPES[info.dtype], info.shape)
        out = torch.empty(info.shape)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        info = self.tensors[name]
        assert out.shape == info.shape, (name, out.shape, info.shape)
        out = out.detach()
        if info.dtype in DTYPES:
            out.copy_(self.read(name))
        elif info.nbytes:
            self._decode_into(info, out if out.dim() > 1 else out.unsqueeze(0))

    def _decode_into(self, info: TensorInfo, out: torch.Tensor) -> None:
        """Decode a block of rows after the other; through a small float32 buffer unless ``out`` is plain float32."""
        width = out.shape[-1]
        count = out.numel() // width
        rows = self._file.tensor(self._starts[info.name], info.nbytes, torch.uint8, (count, info.nbytes // count))
        step = min(count, max(1, SERIAL // width))
        direct = out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()
        if direct:
            flat = out.view(count, width)
            for k in range(0, count, step):
                decode(info.dtype, rows[k : k + step], flat[k : k + step])
            return
        buffer = torch.empty(step, width)
        for index in _slabs(out.shape[:-1], step):
            target = out[index]
            first = _row_of(index, out.shape[:-1])
            part = buffer[: target.numel() // width]
            decode(info.dtype, rows[first : first + len(part)], part)
            target.copy_(part.view(target.shape))


def _slabs(lead: tuple[int, ...], step: int) -> list[tuple[int | slice, ...]]:
    """Indices that cut leading dimensions ``lead`` into runs of at most ``step`` consecutive rows."""
    *outer, last = lead
    step = min(step, last)
    return [(*place, slice(k, min(k + step, last))) for place in np.ndindex(*outer) for k in range(0, last, step)]


def _row_of(index: tuple[int | slice, ...], lead: tuple[int, ...]) -> int:
    row = 0
    for place, size in zip(index, lead, strict=True):
        row = row * size + (place.start if isinstance(place, slice) else place)
    return row


class _Reader:
    """A cursor over the mapped header; every step is checked against the end of the file."""

    def __init__(self, file: MappedFile):
        self.file, self.bytes, self.at = file, file.bytes, 0

    def start(self) -> tuple[int, int]:
        """Magic, version and the two counts."""
        if bytes(self.bytes[:4]) != b"GGUF":
            raise UserError(f"{self.file.path} is not a GGUF file")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version and not version & 0xFFFF else ""
            raise UserError(f"{self.file.path}: GGUF version {version} is not supported, only 2 and 3{hint}")
        tensors, pairs = self.number("Q"), self.number("Q")
        left = self.file.size - self.at
        if tensors * 24 + pairs * 13 > left:  # the smallest record and the smallest pair
            raise UserError(
                f"{self.file.path}: says {tensors} tensors and {pairs} metadata pairs, which {left} bytes cannot hold"
            )
        return tensors, pairs

    def take(self, size: int, what: str) -> int:
        """Step over ``size`` bytes; returns where they start."""
        at = self.at
        if size > self.file.size - at:
            raise UserError(
                f"{self.file.path} is truncated: {what} of {size} bytes at {at}, the file has {self.file.size}"
            )
        self.at = at + size
        return at

    def number(self, letter: str) -> Any:
        form = "<" + letter
        return struct.unpack_from(form, self.bytes, self.take(struct.calcsize(form), "a number"))[0]

    def text(self, what: str) -> str:
        size = self.number("Q")
        at = self.take(size, what)
        try:
            return self.bytes[at : at + size].decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.file.path}: {what} at byte {at} is not UTF-8") from None

    def name(self, what: str) -> str:
        at, name = self.at, self.text(what)
        if len(name) > MAX_NAME:
            raise UserError(f"{self.file.path}: {what} at byte {at} is {len(name)} characters long")
        return name

    def pairs(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.name("a metadata key")
            if key in found:
                raise UserError(f"{self.file.path}: the metadata key {quoted(key)} appears twice")
            found[key] = self.value(self.number("I"), key)
        return found

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text(f"the value of {quoted(key)}")
        if kind == ARRAY and depth < 4:
            return self.array(self.number("I"), self.number("Q"), key, depth)
        if kind >= len(SCALARS) or kind == ARRAY:
            raise UserError(f"{self.file.path}: {quoted(key)} has the unknown value type {kind}")
        return self.number(SCALARS[kind])

    def array(self, kind: int, count: int, key: str, depth: int) -> list[Any]:
        if count > MAX_ARRAY:
            raise UserError(f"{self.file.path}: {quoted(key)} is a list of {count} values, the limit is {MAX_ARRAY}")
        if kind == STRING:
            return self.strings(count, key)
        if kind == ARRAY:
            return [self.value(kind, key, depth + 1) for _ in range(count)]
        if kind >= len(SCALARS):
            raise UserError(f"{self.file.path}: {quoted(key)} is a list of the unknown value type {kind}")
        dtype = np.dtype("<" + SCALARS[kind])
        at = self.take(count * dtype.itemsize, quoted(key))
        return np.frombuffer(self.bytes, dtype, count, at).tolist()

    def strings(self, count: int, key: str) -> list[str]:
        """A list of strings, in one tight loop: vocabularies have some hundred thousand."""
        data, at, end = self.bytes, self.at, self.file.size
        length = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                (size,) = length(data, at)
                stop = at + 8 + size
                if stop > end:
                    raise struct.error
                found.append(data[at + 8 : stop].decode())
                at = stop
        except struct.error:
            raise UserError(
                f"{self.file.path} is truncated: value {len(found)} of the {count} of {quoted(key)} ends after the file"
            ) from None
        except UnicodeDecodeError:
            raise UserError(f"{self.file.path}: value {len(found)} of {quoted(key)} is not UTF-8") from None
        self.at = at
        return found

    def records(self, count: int, alignment: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
        """The tensors, and where the data of each starts in the file."""
        tensors: dict[str, TensorInfo] = {}
        starts: dict[str, int] = {}
        for _ in range(count):
            info, offset = self.record()
            if info.name in tensors:
                raise UserError(f"{self.file.path}: tensor {quoted(info.name)} appears twice")
            if offset % alignment:
                raise UserError(
                    f"{self.file.path} is damaged: {quoted(info.name)} starts at {offset}, off its alignment"
                )
            tensors[info.name], starts[info.name] = info, offset
        base = -(-self.at // alignment) * alignment
        end, previous = 0, ""
        for name, offset in sorted(starts.items(), key=lambda item: (item[1], tensors[item[0]].nbytes)):
            stop = offset + tensors[name].nbytes
            if offset < end:
                raise UserError(f"{self.file.path} is damaged: {quoted(name)} overlaps tensor {quoted(previous)}")
            if base + stop > self.file.size:
                raise UserError(
                    f"{self.file.path} is truncated: tensor {quoted(name)} ends at byte {base + stop}, "
                    f"the file has {self.file.size}"
                )
            end, previous = stop, name
        return tensors, {name: base + offset for name, offset in starts.items()}

    def record(self) -> tuple[TensorInfo, int]:
        name = self.name("a tensor name")
        rank = self.number("I")
        if rank > 4:
            raise UserError(f"{self.file.path}: tensor {quoted(name)} has {rank} dimensions, GGUF allows 4")
        shape = tuple(self.number("Q") for _ in range(rank))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in BLOCKS:
            raise UserError(f"{self.file.path}: tensor {quoted(name)} has the unknown type {kind}")
        dtype, elements, nbytes = BLOCKS[kind]
        if not is_possible_shape(shape):
            raise UserError(f"{self.file.path}: tensor {quoted(name)} has an impossible shape {shape}")
        width = shape[-1] if shape else 1
        if width % elements:
            raise UserError(
                f"{self.file.path}: {quoted(name)} has rows of {width}, no multiple of {dtype}'s {elements}"
            )
        return TensorInfo(name, shape, dtype, math.prod(shape) // elements * nbytes), offset


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= 1 << 16 or value & (value - 1):
        raise UserError(f"{path}: general.alignment is {quoted(str(value))}, it must be a power of two")
    return value

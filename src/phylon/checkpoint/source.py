"""Where stored tensors come from: names, shapes and dtypes first, the data one tensor at a time."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Stored dtype names that are PyTorch dtypes; a GGUF block type ("Q4_1") is a dtype name too, but not one of these."""

SERIAL = 32767
"""Elements at a time in loops of small operations. PyTorch splits larger ones over threads, and on a machine with other
work each of those barriers can wait for a whole time slice: many small serial steps were up to 50 times faster."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorInfo(NamedTuple):
    """What a file's header says about one tensor. ``nbytes`` counts the stored bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class TensorSource(Protocol):
    """A checkpoint whose header has been checked and whose data has not been touched."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor: a view of the mapped file where its stored dtype is PyTorch's, else decoded to float32."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Decode and cast into ``out`` (same shape, any dtype, device and strides), without a whole copy between."""
        ...


class MemorySource:
    """Tensors that are in memory already, seen as a source."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any] | None = None):
        self._data = dict(tensors)
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(t.shape), DTYPE_NAMES[t.dtype], t.numel() * t.element_size())
            for name, t in self._data.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self._data[name]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        assert out.shape == self._data[name].shape, (name, out.shape)
        out.copy_(self._data[name])


def is_possible_shape(shape: tuple[int, ...]) -> bool:
    """Whether PyTorch can hold such a shape at all: few dimensions, none negative, no overflow even beside a 0."""
    product = 1
    for size in shape:
        if size < 0:
            return False
        product *= max(size, 1)
        if product >= 1 << 60:
            return False
    return len(shape) <= 16

"""Files seen safely: mapped for reading, written beside and renamed."""

import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from phylon.spec.errors import UserError, system_reason
from phylon.spec.files import open_file

PIECE = 1 << 20  # bytes read at once where a file is walked through


def quoted(name: str) -> str:
    """A name out of a file, fit for one line: control characters escaped, at most 80 characters."""
    text = repr(name)
    return text if len(text) <= 80 else text[:76] + "…'"


class MappedFile:
    """A whole file mapped copy-on-write: pages come from the file, and a stray write never reaches it.

    Mapped pages are not anonymous memory: the kernel drops them when it needs room. A file must not be cut short by
    others while it is mapped: the operating system ends a process that reads pages which are gone.
    """

    def __init__(self, path: Path):
        self.path = path
        with open_file(path) as file:
            try:
                self.size = os.fstat(file.fileno()).st_size
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""
            except OSError as error:
                raise UserError(f"{path} cannot be read: {system_reason(error)}") from None
        if not self.size:
            raise UserError(f"{path} is empty")

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes at ``offset`` as a tensor: a view of the file, or a copy where the data is misaligned."""
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(self.bytes, dtype=torch.uint8, count=nbytes, offset=offset)
        if offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)


def checksum(path: Path) -> str:
    """The CRC-32 of a file's content, 8 hexadecimal digits. Raises OSError where it cannot be read."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return f"{found:08x}"


@contextmanager
def written_beside(*paths: Path) -> Iterator[list[Path]]:
    """Temporary paths beside ``paths``; renamed onto them, in order, if the body succeeds, else removed.

    Raises:
        UserError: the operating system refused (no space, no permission, no such folder).
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        yield temporary
        for source, target in zip(temporary, paths, strict=True):
            os.replace(source, target)
    except OSError as error:
        raise UserError(f"{paths[0]} cannot be written: {system_reason(error)}") from None
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write a tensor's elements row-major, whatever its dtype and device; returns the bytes written."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    return file.write(memoryview(flat.view(torch.uint8).numpy()))  # pyrefly: ignore[bad-argument-type] numpy arrays are buffers


def finish(file: BinaryIO) -> None:
    """Push everything to the disk, so that a full disk shows here and not after the rename."""
    file.flush()
    os.fsync(file.fileno())

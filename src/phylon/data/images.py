"""Labelled images: folders (a class a folder) and arrays (IDX, npy, npz), as uint8 (C, H, W)."""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phylon.data.documents import digest, file_sums
from phylon.data.labelled import class_number
from phylon.data.passed import Empty, Policies, usable
from phylon.spec.errors import UserError, system_reason
from phylon.spec.registry import register

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")
MOST_CLASSES = 1 << 20  # a larger label is a slip, not the number of a class
_WIDE = ("I", "I;16", "I;16B", "I;16L")  # Pillow's modes of grey images of 16 bits
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Image(NamedTuple):
    """``pixels`` uint8 (C, H, W) and the number of its class."""

    pixels: np.ndarray
    label: int


class Images:
    """Numbered images with their labels ``(N,)`` and the names of the classes; pixels are read when asked for."""

    labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of all."""
        raise NotImplementedError

    def files(self) -> list[tuple[str, Path]]:
        """The files they are read from, by name."""
        return []

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: int) -> np.ndarray:
        """uint8 (C, H, W)."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What to call an image in a message, and what decides whether it is held out."""
        raise NotImplementedError


class ImageFolder(Policies, frozen=True, kw_only=True):
    """A folder with a folder of images for each class, which are numbered by name.

    ``channels`` 1 reads every image as grey, 3 as RGB. With ``unreadable`` = "skip" all are read once at the start, to
    find those that cannot be used; ``empty`` is about files of no bytes. Needs Pillow (``phylon[data]``).
    """

    path: str
    channels: int = 3

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise UserError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels}")

    def open(self) -> Images:
        """List the images; one that cannot be read is found when it is asked for."""
        _pillow()
        root = Path(self.path)
        try:
            classes = sorted(
                entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
            )
        except OSError as error:
            raise UserError(f"cannot read the folder '{root}': {system_reason(error)}") from None
        found = [(path, number) for number, name in enumerate(classes) for path in _files(root / name)]
        files = list(usable(self, found, _with_bytes))
        missing = [name for number, name in enumerate(classes) if number not in {n for _, n in files}]
        if not classes or missing:
            what = f"the folder '{missing[0]}' of it has none" if missing else "it has no folders"
            raise UserError(f"'{root}' must hold a folder of images ({', '.join(SUFFIXES)}) for each class; {what}")
        return _FolderImages((self.empty, self.unreadable), files, tuple(classes), root, self.channels)

    def fingerprint(self) -> str:
        return self.open().fingerprint

    def files(self) -> list[tuple[str, Path]]:
        return self.open().files()


class ImageArrays(Policies, frozen=True, kw_only=True):
    """Two arrays: ``images`` uint8 (N, H, W) or (N, H, W, C), ``labels`` whole numbers (N,) from 0.

    Files are IDX (MNIST's format), ``.npy``, or ``.npz`` with the arrays ``images`` and ``labels`` (one file may hold
    both); each may have ``.gz`` behind. ``classes`` names the classes; left out, there are as many as the largest label
    says, up to a million. ``unreadable`` is about images whose label is none of these.
    """

    images: str
    labels: str
    classes: tuple[str, ...] | None = None

    def open(self) -> Images:
        """Read both arrays and check that they belong together."""
        pixels = read_array(Path(self.images), "images")
        labels = read_array(Path(self.labels), "labels")
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or 0 in pixels.shape:
            shape = f"{pixels.dtype} {pixels.shape}"
            raise UserError(f"'{self.images}' must hold uint8 (N, H, W) or (N, H, W, C) and not nothing, got {shape}")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise UserError(f"'{self.labels}' must hold whole numbers (N,), got {labels.dtype} {labels.shape}")
        if len(labels) != len(pixels):
            raise UserError(f"'{self.images}' holds {len(pixels)} images and '{self.labels}' {len(labels)} labels")
        n_classes = min(int(labels.max()) + 1, MOST_CLASSES) if self.classes is None else len(self.classes)
        kept = np.flatnonzero((labels >= 0) & (labels < n_classes))
        if len(kept) < len(labels):

            def right(index: int) -> int:
                return class_number(int(labels[index]), n_classes, f"'{self.labels}', image {index}")

            labels = np.array(list(usable(self, range(len(labels)), right)))
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        names = self.classes or tuple(map(str, range(n_classes)))
        return _ArrayImages(pixels, kept, labels.astype(np.int64), names, self.fingerprint())

    def fingerprint(self) -> str:
        return digest("arrays", self.classes, self.unreadable, file_sums(self.files()))

    def files(self) -> list[tuple[str, Path]]:
        arrays = {"images": Path(self.images), "labels": Path(self.labels)}
        return [(f"{what}/{path.name}", path) for what, path in arrays.items()]


class _FolderImages(Images):
    def __init__(
        self,
        policies: tuple[str, ...],
        files: Sequence[tuple[Path, int]],
        classes: tuple[str, ...],
        root: Path,
        channels: int,
    ) -> None:
        self._files, self._root, self._mode = [path for path, _ in files], root, "L" if channels == 1 else "RGB"
        self.labels = np.array([number for _, number in files])
        self.classes = classes
        self._channels, self._policies = channels, policies

    @cached_property
    def fingerprint(self) -> str:
        """Of the content of all, which are read whole for it."""
        return digest(
            "folder", self.classes, self._channels, self._policies, file_sums(self.files(), self._policies[1])
        )

    def files(self) -> list[tuple[str, Path]]:
        return [(self.name(index), path) for index, path in enumerate(self._files)]

    def pixels(self, index: int) -> np.ndarray:
        path, pillow = self._files[index], _pillow()
        try:
            with pillow.open(path) as image:
                pixels = _eight_bits(image) if image.mode in _WIDE else np.array(image.convert(self._mode))
            if pixels.ndim == 2 and self._channels == 3:
                pixels = np.repeat(pixels[..., None], 3, axis=2)
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise UserError(f"cannot read the image '{path}': {' '.join(str(error).split())}") from None
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def name(self, index: int) -> str:
        return self._files[index].relative_to(self._root).as_posix()


class _ArrayImages(Images):
    def __init__(
        self, pixels: np.ndarray, kept: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], fingerprint: str
    ) -> None:
        self._pixels, self._kept, self.labels = pixels, kept, labels
        self.classes, self._fingerprint = classes, fingerprint

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def pixels(self, index: int) -> np.ndarray:
        return self._pixels[self._kept[index]]

    def name(self, index: int) -> str:
        return f"image:{self._kept[index]}"


def read_array(path: Path, name: str) -> np.ndarray:
    """The array of a file: IDX, ``.npy``, or the one called ``name`` of an ``.npz``; pickled ones are refused."""
    plain = path.name.removesuffix(".gz")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            if plain.endswith(".npy"):
                return np.load(file, allow_pickle=False)
            if plain.endswith(".npz"):
                with np.load(file, allow_pickle=False) as arrays:
                    if name not in arrays:
                        raise UserError(f"'{path}' holds no array '{name}' (it has {', '.join(arrays) or 'none'})")
                    return arrays[name]
            return _read_idx(file, path)
    except UserError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, ValueError) as error:
        raise UserError(f"'{path}' is damaged, or no array: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"cannot read '{path}': {system_reason(error)}") from None


def _read_idx(file: Any, path: Path) -> np.ndarray:
    """IDX: two zero bytes, the type, the rank, big-endian sizes, then the values. LeCun's MNIST page."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not 1 <= head[3] <= 4:
        raise UserError(f"'{path}' is neither IDX nor .npy nor .npz")
    dtype = np.dtype(_IDX_TYPES[head[2]])
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise UserError(f"'{path}' ends within its header")
    shape = tuple(map(int, np.frombuffer(sizes, ">u4")))
    wanted = math.prod(shape) * dtype.itemsize
    # Read piece by piece: a header that lies about the size allocates no more than the file holds.
    content = bytearray()
    while piece := file.read(min(1 << 22, wanted + 1 - len(content))):
        content += piece
    if len(content) != wanted:
        more = "more" if len(content) > wanted else f"{len(content)}"
        raise UserError(f"'{path}' says {shape} of {dtype.name}, which is {wanted} bytes, and holds {more}")
    return np.frombuffer(bytes(content), dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _eight_bits(image: Any) -> np.ndarray:
    """A grey image of 16 bits a pixel as uint8 (H, W); Pillow's own conversion clips what is above 255."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its values go from {values.min()} to {values.max()}, and grey of 16 bits from 0 to 65535")
    return (values // 257).astype(np.uint8)


def _with_bytes(file: tuple[Path, int]) -> tuple[Path, int]:
    if file[0].is_file() and not file[0].stat().st_size:
        raise Empty(f"the image '{file[0]}' is empty")
    return file


def _files(folder: Path) -> list[Path]:
    return sorted(
        Path(at, name)
        for at, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )


def _pillow() -> Any:
    try:
        from PIL import Image as pillow
    except ImportError:
        raise UserError("folders of images need Pillow: pip install 'phylon[data]'") from None
    return pillow


register(ImageFolder, paper="none", cases=lambda: [ImageFolder(path="images"), ImageFolder(path="images", channels=1)])
register(ImageArrays, paper="none", cases=lambda: [ImageArrays(images="x.npy", labels="y.npy")])

"""What is done to an image before the model sees it: scaled, and in training shifted and mirrored at random.

Random choices are pure functions of (seed, epoch, index of the image).
"""

import numpy as np
import torch
from torch import Tensor

from phylon.data.draws import Draws
from phylon.spec.base import Spec
from phylon.spec.errors import UserError

_STREAM = 1 << 32  # keeps these draws apart from those of texts under the same seed


class Pixels(Spec, frozen=True, kw_only=True):
    """Pixels to what the model reads.

    ``size`` (height, width): images of another size are resized to it (bilinear, antialiased). ``mean`` and ``std``
    (one for each channel, or one for all) of pixel values from 0 to 1 are taken out: ``(x / 255 - mean) / std``.
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise UserError(f"size must be a height and a width of at least 1, got {self.size}")
        if not self.mean or len(self.mean) != len(self.std):
            raise UserError(
                f"mean and std must have one number for each channel, got {len(self.mean)}, {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise UserError(f"std must be above 0, got {self.std}")

    def __call__(self, pixels: np.ndarray) -> Tensor:
        """uint8 (C, H, W) to float32 (C, *size)."""
        if len(self.mean) not in (1, len(pixels)):
            raise UserError(f"mean has {len(self.mean)} channels, the images {len(pixels)}")
        image = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
        if self.size is not None and image.shape[1:] != self.size:
            image = torch.nn.functional.interpolate(image[None], size=self.size, mode="bilinear", antialias=True)[0]
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (image - mean) / std


class Augment(Spec, frozen=True, kw_only=True):
    """Random changes of a training image.

    ``padding``: it is moved by up to so many pixels each way, and what comes in is black (a crop of the padded image,
    as in He et al., arXiv:1512.03385, section 4.2). ``flip``: the probability of its mirror image.
    """

    padding: int = 0
    flip: float = 0.0

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise UserError(f"padding must be at least 0, got {self.padding}")
        if not 0 <= self.flip <= 1:
            raise UserError(f"flip is a probability, 0 to 1; got {self.flip}")

    def __call__(self, pixels: np.ndarray, seed: int, epoch: int, index: int) -> np.ndarray:
        """uint8 (C, H, W) to the same shape."""
        down, right, mirror = Draws(seed, epoch, index, _STREAM).uniform(3)
        if mirror < self.flip:
            pixels = pixels[..., ::-1]
        if not self.padding:
            return pixels
        pad, (_, height, width) = self.padding, pixels.shape
        y, x = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
        whole = np.pad(pixels, ((0, 0), (pad, pad), (pad, pad)))
        return whole[:, y : y + height, x : x + width]

"""Patch embedding: an image as a sequence of patches behind learned tokens, with a grid of learned positions."""

import torch
from torch import Tensor, nn

from phylon.layers.context import Context
from phylon.layers.ffn.mlp import dropped
from phylon.layers.part import InitContext, Linear, Part
from phylon.spec.base import Embed, Mechanism
from phylon.spec.errors import UserError, check_rate
from phylon.spec.registry import register


class PatchEmbed(Mechanism, Embed, frozen=True, kw_only=True):
    """``dropout([extra; patches W^T + b] + positions)``: images (B, C, H, W) to (B, T, D), row by row.

    ViT (arXiv:2010.11929), section 3.1, equation 1. ``n_extra`` learned tokens stand in front: ViT's class token, and
    DeiT's distillation token (arXiv:2012.12877), section 3. T is ``n_extra + (H / P) (W / P)`` for patches of P x P
    pixels. ``grid`` is how many rows and columns the learned positions have; for images of another size they are
    interpolated to its rows and columns (bicubic, in fp32). Cost of a token: ``2 C P^2 D``.
    """

    patch_size: int
    grid: tuple[int, int]
    n_channels: int = 3
    n_extra: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("patch_size", "n_channels"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.grid) < 1:
            raise UserError(f"grid must have at least one row and column, got {self.grid}")
        if self.n_extra < 0:
            raise UserError(f"n_extra must be at least 0, got {self.n_extra}")
        check_rate("dropout", self.dropout)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images that the grid of positions was made for."""
        return self.n_channels, self.grid[0] * self.patch_size, self.grid[1] * self.patch_size


class PatchEmbedModule(Part):
    """Parameters: ``proj`` from the pixels (C, P, P), ``extra`` (n_extra, D), ``positions`` of all tokens (…, D)."""

    def __init__(self, spec: PatchEmbed, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(spec.n_channels * spec.patch_size**2, d_model, bias=True)
        self.extra = nn.Parameter(torch.empty(spec.n_extra, d_model)) if spec.n_extra else None
        self.positions = nn.Parameter(torch.empty(spec.n_extra + spec.grid[0] * spec.grid[1], d_model))

    def init_parameters(self, init: InitContext) -> None:
        for weight in (self.extra, self.positions):
            if weight is not None:
                init.draw(weight, "embed")

    def shape_of(self, images: Tensor) -> torch.Size:
        """(B, T) of the sequence that ``images`` make; a one-line error where they do not fit."""
        spec, p = self.spec, self.spec.patch_size
        if images.ndim != 4 or not images.is_floating_point():
            raise UserError(f"images must be float (B, C, H, W), got {tuple(images.shape)} {images.dtype}")
        batch, channels, height, width = images.shape
        if channels != spec.n_channels:
            raise UserError(f"images have {channels} channels, the model reads {spec.n_channels}")
        if height % p or width % p or 0 in images.shape:
            raise UserError(f"images of {height} x {width} do not cut into patches of {p} x {p}; resize or crop them")
        return torch.Size((batch, spec.n_extra + (height // p) * (width // p)))

    def forward(self, images: Tensor | None, embeds: Tensor | None, ctx: Context) -> Tensor:
        assert images is not None
        p = self.spec.patch_size
        rows, columns = images.shape[2] // p, images.shape[3] // p
        patches = images.unflatten(3, (columns, p)).unflatten(2, (rows, p))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.proj(patches.to(self.proj.weight.dtype))
        if self.extra is not None:
            x = torch.cat([self.extra.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        x = x + self.positions_for(rows, columns).to(x.dtype)
        return dropped(x, self.spec.dropout, self.training)

    def positions_for(self, rows: int, columns: int) -> Tensor:
        """(T, D): the learned positions, or in fp32 what they are for another grid."""
        if (rows, columns) == self.spec.grid:
            return self.positions
        n = self.spec.n_extra
        grid_DHW = self.positions[n:].float().unflatten(0, self.spec.grid).permute(2, 0, 1)
        size = (rows, columns)
        made = nn.functional.interpolate(grid_DHW[None], size=size, mode="bicubic", align_corners=False)[0]
        return torch.cat([self.positions[:n].float(), made.flatten(1).T])


register(
    PatchEmbed,
    module=PatchEmbedModule,
    paper="arXiv:2010.11929 §3.1",
    cases=lambda: [PatchEmbed(patch_size=4, grid=(3, 2)), PatchEmbed(patch_size=3, grid=(2, 2), n_extra=0)],
    flops=lambda spec, width, n_keys: 2 * spec.n_channels * spec.patch_size**2 * width,
)

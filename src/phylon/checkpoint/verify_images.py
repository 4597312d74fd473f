"""The part of the law that images can break, for a model that reads them: there is no state, padding or packing."""

import torch
from torch import Tensor

from phylon.checkpoint.compare import Reference, compare
from phylon.checkpoint.law import (
    DISPATCHES,
    Got,
    Readable,
    Report,
    Subject,
    Values,
    enough_rows,
    kernels,
    must_differ,
    on_backend,
)
from phylon.model import Model


def verify_images(model: Model, reference: Reference | None, seed: int) -> Report:
    """Cells of three random images of the size the model was made for, and of three that are a few patches larger."""
    s = Images(model, seed)
    cells = [s.cell("batching", "batch", _batched), s.cell("after_another_call", "history", _after_another)]
    larger = Images(model, seed, grow=(1, 2))
    cells.append(larger.cell("batching_other_size", "batch", _batched))
    cells.append(s.cell("after_another_size", "history", lambda s: _after_size(s, larger)))
    for dispatch in DISPATCHES:
        for name in dispatch.backends:
            cells.append(s.cell(f"backend_{dispatch.op}_{name}", "backends", on_backend(dispatch, name, _plain)))
    cells += kernels(_Large(s))
    other = s.random()
    hidden = s.alone[0]["hidden"]
    cells.append(
        must_differ(s, "control_image", "hidden", s.run([other])[0]["hidden"], hidden, "another image must show")
    )
    # The last patch of another image: what stands before it sees it only through the mixers.
    patched, p = s.images[0].clone(), s.patch_size
    patched[:, -p:, -p:] = other[:, -p:, -p:]
    before = slice(0, s.lengths[0] - 1)
    what = "a changed patch must show in the other tokens"
    seen = s.run([patched])[0]["hidden"]
    cells.append(must_differ(s, "control_patch", "hidden", seen[before], hidden[before], what))
    if reference is not None:
        cells += compare(s, reference)
        cells += compare(larger, reference, "reference_other_size")
    dtype = str(model.dtype).removeprefix("torch.")
    return Report(dtype=dtype, lengths=s.lengths, cells=cells, inputs="images")


class Images(Subject):
    """The model, its images and what they give alone."""

    def __init__(self, model: Model, seed: int, grow: tuple[int, int] = (0, 0)) -> None:
        super().__init__(model, seed)
        embed = model.spec.last_stack.embed
        self.patch_size: int = embed.patch_size  # type: ignore[attr-defined]
        channels, *sides = embed.image_shape  # type: ignore[attr-defined]
        self.shape = (channels, *(side + n * self.patch_size for side, n in zip(sides, grow, strict=True)))
        self.images = [self.random() for _ in range(3)]
        self.lengths = [model(images=image[None], logits="none").hidden.shape[1] for image in self.images]
        self.run_alone()

    def random(self) -> Tensor:
        return torch.randn(self.shape, generator=self.generator).to(self.model.device)

    def shared_inputs(self) -> dict[str, Tensor]:
        return {"images": self.images[0][None]}

    def run(self, images: list[Tensor], model: Model | None = None) -> list[Values]:
        """Of each image the vectors of its tokens (T, W), and what every head gives for it (1, W), in one call."""
        out = (model or self.model)(images=torch.stack(images))
        wide = torch.promote_types(out.hidden.dtype, torch.float32)
        given = {"hidden": out.hidden} | {f"heads.{name}.logits": scores for name, scores in out.heads.items()}
        return [
            {name: value[i].reshape(-1, value.shape[-1]).to(wide) for name, value in given.items()}
            for i in range(len(images))
        ]

    def each(self, model: Model) -> list[Values]:
        return [self.run([image], model)[0] for image in self.images]


class _Large(Readable, Images):
    """The images, and enough of them in one call for every kernel to act."""

    def __init__(self, of: Images) -> None:
        self.of: Images = of
        super().__init__(of.model, 1)

    def run_alone(self) -> None:
        self.images = self.of.images
        self.together = [self.random() for _ in range(enough_rows(self.model, self.lengths[0]))]
        super().run_alone()

    def each(self, model: Model) -> list[Values]:
        return super().each(model) + self.run(self.together, model)


def _plain(s: Images) -> Got:
    return [(i, slice(None), values) for i, values in enumerate(s.each(s.model))]


def _batched(s: Images) -> Got:
    together = s.run([s.random(), *s.images])
    return [(i, slice(None), values) for i, values in enumerate(together[1:])]


def _after_size(s: Images, other: Images) -> Got:
    """The table of positions is stretched for each size anew, whatever was asked for before."""
    other.run(other.images[:1])
    return _plain(s)


def _after_another(s: Images) -> Got:
    s.run([s.random(), s.random()])
    return _plain(s)

"""Classes of images: folders and arrays, augmentation, any resolution the patches divide."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phylon.account.flops import Pass
from phylon.data import Loader, Source
from phylon.data.augment import Augment, Pixels
from phylon.data.documents import digest
from phylon.data.images import ImageArrays, ImageFolder, Images
from phylon.data.labelled import check_head
from phylon.data.passed import policy, refused, usable
from phylon.data.split import held_out_names
from phylon.layers.embeddings.patches import PatchEmbed
from phylon.layers.heads.classify import Classify
from phylon.model import Model, ModelSpec
from phylon.ops.loss import Loss, Targets
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.measures import accuracy, macro_f1
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, Objective, need_head
from phylon.train.objectives.supervised import spread

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

EVAL_IMAGES = 100


class ImageClasses(Mechanism, Objective, frozen=True, kw_only=True):
    """Cross-entropy of the class of an image. ViT (arXiv:2010.11929), section 3.

    The source is ``image_folder`` or ``image_arrays``. ``pixels`` says how images become numbers, and with ``size`` at
    which resolution: where it is not the model's own, the learned positions are interpolated (section 3.2). ``augment``
    changes training images at random; ``label_smoothing`` is that of Szegedy et al. (arXiv:1512.00567), section 7.
    ``data.held_out`` is a share of the images, chosen by their names. Evaluation reports ``accuracy`` and ``f1`` (the
    mean over the classes that are labels).

    A batch: ``images`` float (B, C, H, W) and ``targets`` (B,).
    """

    pixels: Pixels = Pixels()
    augment: Augment | None = None
    label_smoothing: float = 0.0
    head: str = "class"

    counted = "image"
    reads_text = False

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        embed = spec.encoder.embed if spec.encoder is not None else None
        if not isinstance(embed, PatchEmbed):
            raise UserError('image_classes trains a model that reads images; choose one, such as family = "vit"')
        need_head(spec, self.head, Classify, "image_classes")
        source = recipe.data.source
        if not isinstance(source, ImageFolder | ImageArrays):
            raise UserError('image_classes reads images: data.source = { kind = "image_folder" | "image_arrays", … }')
        if recipe.data.max_bytes is not None:
            raise UserError("image_classes reads all of its images; leave data.max_bytes out")
        n_classes = spec.heads[self.head].n_classes  # type: ignore[attr-defined]
        images = source.open()
        numbers = images.labels.tolist() if isinstance(source, ImageArrays) and source.classes is None else []
        stray = [index for index, number in enumerate(numbers) if number >= n_classes]
        if stray and set(range(n_classes)) <= set(numbers):
            raise UserError(
                f"{images.name(stray[0])} of '{source.labels}': {numbers[stray[0]]} is none of the {n_classes} classes "  # type: ignore[union-attr]
                f"of the head '{self.head}'; name them in data.source.classes, and data.source.unreadable=skip passes "
                "over such images, or set its n_classes"
            )
        labels = ((number, images.name(index)) for index, number in enumerate(numbers))
        check_head(images.classes, self.head, n_classes, labels, "data.source.classes")
        self._check_shape(embed, self._first_shape(source, images))
        if self.augment is not None:
            side = min(next(usable(source, range(len(images)), images.pixels)).shape[1:])
            if self.augment.padding >= side:
                raise UserError(
                    f"objective.augment.padding {self.augment.padding} must be below the {side} pixels of an image"
                )

    def measured(self) -> tuple[str, ...]:
        return "accuracy", "f1"

    def _first_shape(self, source: object, images: Images) -> tuple[int, ...]:
        """(C, H, W) of the first image that can be read: that of all of them."""
        read = usable(source, range(len(images)), lambda index: tuple(self.pixels(images.pixels(index)).shape))
        return next(read)

    def _usable(self, source: object, images: Images) -> np.ndarray:
        """The numbers of the images that can be read and are of one shape; all where the source passes over none."""
        if policy(source, "unreadable") != "skip":
            return np.arange(len(images))
        shape = self._first_shape(source, images)

        def same(index: int) -> int:
            self.check_same(images, index, tuple(self.pixels(images.pixels(index)).shape), shape)
            return index

        return np.array(list(usable(source, range(len(images)), same)), np.int64)

    def check_same(self, images: Images, index: int, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Refuse an image of another shape than the others."""
        if shape != wanted:
            raise UserError(f"image '{images.name(index)}' is {shape} and others {wanted}: set objective.pixels.size")

    def _check_shape(self, embed: PatchEmbed, shape: tuple[int, ...]) -> None:
        channels, height, width = shape
        if channels != embed.n_channels:
            raise UserError(f"the images have {channels} channels and the model reads {embed.n_channels}")
        if height % embed.patch_size or width % embed.patch_size:
            patch = embed.patch_size
            raise UserError(
                f"images of {height} x {width} do not cut into patches of {patch} x {patch}: "
                "set objective.pixels.size to a height and a width that do"
            )

    def split(self, source: Source, share: float) -> tuple[Source, Source | None]:
        """``feed`` holds images out, by name."""
        return source, None

    def feed(self, material: Material) -> Feed:
        run, share = material.recipe.run, material.recipe.data.held_out
        assert isinstance(material.training, ImageFolder | ImageArrays)
        images = material.training.open()
        good = self._usable(material.training, images)
        held = held_out_names([images.name(int(i)) for i in good], share)
        rows = [good[held == which] for which in (False, True)]
        if share and (not len(rows[0]) or not len(rows[1])):
            raise UserError(f"{len(images)} images are too few to hold out a share of {share:g} of them")
        material.say(f"{len(rows[0]):,} training and {len(rows[1]):,} held-out images of {len(images.classes)} classes")
        source = material.training
        loader = Loader(_Chosen(source, images, rows[0], self, run.seed), run.batch_size, run.seed)
        numbers = images.classes == tuple(map(str, range(len(images.classes))))  # folders go by name: 0, 1, 10, 2
        labels = {self.head: () if numbers else images.classes}
        if not share:
            return Feed(loader, labels=labels)
        kept = _Chosen(source, images, np.array(spread(rows[1].tolist(), run.eval_rows)), self, None)
        return Feed(loader, lambda: kept.batches(EVAL_IMAGES), labels=labels)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: len(batch["targets"])}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        targets = Targets(batch["targets"], label_smoothing=self.label_smoothing)
        out = model(images=batch["images"], targets={self.head: targets}, logits="none")
        return {self.head: out.losses[self.head]}

    def passes(self, spec: ModelSpec, batch: Batch) -> list[Pass]:
        assert spec.encoder is not None
        embed = spec.encoder.embed
        assert isinstance(embed, PatchEmbed)
        rows, _, height, width = batch["images"].shape
        length = embed.n_extra + (height // embed.patch_size) * (width // embed.patch_size)
        return [Pass(rows, length, 0, {self.head: rows})]

    def n_tokens(self, batch: Batch) -> int:
        """Images."""
        return len(batch["targets"])

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        said: list[Any] = []
        right: list[Any] = []
        total = 0.0
        for batch in batches:
            out = model(images=batch["images"], targets={self.head: batch["targets"]})
            total += float(out.losses[self.head].sum)
            said += out.heads[self.head].argmax(-1).tolist()
            right += batch["targets"].tolist()
        return {
            "loss": total / len(right),
            "accuracy": accuracy(said, right),
            "f1": macro_f1(said, right, sorted(set(right))),
        }


class _Chosen:
    """Some of the images as examples; changed at random where there is a ``seed``."""

    def __init__(
        self, source: object, images: Images, rows: np.ndarray, objective: ImageClasses, seed: int | None
    ) -> None:
        self.source, self.images, self.rows, self.objective, self.seed = source, images, rows, objective, seed
        self.shape = tuple(objective.pixels(images.pixels(int(rows[0]))).shape)

    @property
    def fingerprint(self) -> str:
        return digest(self.images.fingerprint, self.rows.tolist())

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        try:
            return self._example(int(self.rows[index]), epoch)
        except UserError as problem:
            raise refused(self.source, problem) from None

    def _example(self, number: int, epoch: int) -> dict[str, np.ndarray]:
        augment = self.objective.augment
        pixels = self.images.pixels(number)
        if augment is not None and self.seed is not None:
            pixels = augment(pixels, self.seed, epoch, number)
        image = self.objective.pixels(pixels)
        self.objective.check_same(self.images, number, tuple(image.shape), self.shape)
        return {"images": image.numpy(), "targets": self.images.labels[number]}

    def batches(self, size: int) -> Iterable[Batch]:
        for start in range(0, len(self), size):
            rows = [self.example(i, 0) for i in range(start, min(start + size, len(self)))]
            yield {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


register(
    ImageClasses,
    paper="arXiv:2010.11929 §3",
    cases=lambda: [ImageClasses(), ImageClasses(augment=Augment(padding=2, flip=0.5), label_smoothing=0.1)],
)

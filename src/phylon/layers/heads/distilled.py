"""DeiT's pair of classifiers: one on the class token, one on the distillation token."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.heads.pools import documents
from phylon.layers.part import Linear, Part
from phylon.ops.loss import Loss, cross_entropy
from phylon.spec.base import Head, Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Distilled(Mechanism, Head, frozen=True, kw_only=True):
    """``(proj(first token) + teacher_proj(second token)) / 2``: scores of ``n_classes`` for every document.

    DeiT (arXiv:2012.12877), section 3, hard-label distillation (equation 3); the released code averages the scores.
    hidden (B, T, D) to (documents, C); a document of one token is read twice. Targets (documents, 2) are the label and
    the teacher's label, each half of the loss, -100 ignored. Cost: ``4 D C`` a document.
    """

    n_classes: int

    def __post_init__(self) -> None:
        if self.n_classes < 1:
            raise UserError(f"n_classes must be at least 1, got {self.n_classes}")

    @property
    def per_document(self) -> bool:
        return True


class DistilledModule(Part):
    token_wise = False

    def __init__(self, spec: Distilled, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(d_model, spec.n_classes, bias=True, role="head")
        self.teacher_proj = Linear(d_model, spec.n_classes, bias=True, role="head")

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        return self.both(hidden, ctx).mean(1)

    def both(self, hidden: Tensor, ctx: Context) -> Tensor:
        """(documents, 2, C)."""
        number, count = ctx.memo("documents", lambda: documents(ctx.records, len(hidden)))
        flat, number = hidden.flatten(0, 1), number.flatten()
        index = torch.arange(len(number), device=number.device)
        first = _earliest(number, index, count)
        second = _earliest(torch.where((index[:, None] == first).any(1), -1, number), index, count)
        second = torch.where(second < len(number), second, first)
        return torch.stack([self.proj(flat[first]), self.teacher_proj(flat[second])], dim=1)

    def loss(self, hidden: Tensor, targets: Tensor, ctx: Context) -> Loss:
        scores = self.both(hidden, ctx)
        if targets.shape != scores.shape[:2]:
            raise UserError(
                f"targets are {tuple(targets.shape)}, they must be {tuple(scores.shape[:2])}: label, teacher"
            )
        if targets.device.type == "cpu" and targets.numel() and int(targets.max()) >= self.spec.n_classes:
            raise UserError(f"class {int(targets.max())} is out of range: the head has {self.spec.n_classes}")
        return cross_entropy(scores, targets)


def _earliest(number: Tensor, index: Tensor, count: int) -> Tensor:
    """(count,): the least index of each document, ``len(number)`` where it has none; padding (-1) falls away."""
    start = number.new_full((count + 1,), len(number))
    return start.scatter_reduce(0, number % (count + 1), index, "amin")[:count]


register(
    Distilled,
    module=DistilledModule,
    paper="arXiv:2012.12877 §3",
    cases=lambda: [Distilled(n_classes=3)],
    flops=lambda spec, width, n_keys: 4 * width * spec.n_classes,
)

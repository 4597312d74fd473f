"""What is learned from a batch: an objective turns a model and a batch into a summed loss and its count."""

import math

import torch
from torch import Tensor

from phylon.layers.ffn.routers import GroupedSigmoidRouterModule
from phylon.model import Model, Output
from phylon.ops.loss import IGNORE, Loss
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register

Batch = dict[str, Tensor]


class Objective(Slot):
    """Slot of a training objective."""

    def loss(self, model: Model, batch: Batch) -> Loss:
        """The summed loss of a batch (or of a part of it) and the number of targets it sums over."""
        raise NotImplementedError

    def training_loss(self, model: Model, part: Batch, whole: Batch) -> tuple[Loss, Tensor | None]:
        """The loss of one part of the ``whole`` batch, and what is added to its sum for the gradient alone."""
        return self.loss(model, part), None

    def after_step(self, model: Model) -> None:
        """What the model itself adjusts after an update."""


class NextToken(Mechanism, Objective, frozen=True, kw_only=True):
    """Cross-entropy of the next token of the same document. GPT-2 report, section 2.

    A batch holds ``tokens``, ``segments`` and ``targets``, int64 (B, T), the targets already shifted and -100 at the
    end of each document. ``balance`` and ``z_loss`` weigh the routers' terms (``MoE`` defines them), summed over the
    blocks, the first a mean over the batch's rows, the second over its real tokens: Switch (arXiv:2101.03961), equation
    4, weight 0.01; ST-MoE (arXiv:2202.08906), equation 5, weight 0.001. ``bias_rate`` moves selection-only biases after
    every update: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, 0.001.
    """

    balance: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def loss(self, model: Model, batch: Batch) -> Loss:
        return next(iter(self._run(model, batch).losses.values()))

    def training_loss(self, model: Model, part: Batch, whole: Batch) -> tuple[Loss, Tensor | None]:
        if not (self.balance or self.z_loss):
            return self.loss(model, part), None
        out = self._run(model, part)
        loss, extra = next(iter(out.losses.values())), None
        real = whole["segments"] != 0
        # Sums over the whole batch's own counts, so that the number of parts does not matter; the trainer divides by
        # the number of targets.
        n_targets = int((whole["targets"] != IGNORE).sum())
        for name, weight, count in (("balance", self.balance, real.any(1).sum()), ("z_loss", self.z_loss, real.sum())):
            terms = [term.sum for path, term in out.aux.items() if path.endswith(f".{name}")]
            if weight and terms:
                scaled = torch.stack(terms).sum() * (weight * n_targets / max(1, int(count)))
                extra = scaled if extra is None else extra + scaled
        return loss, extra

    def after_step(self, model: Model) -> None:
        if self.bias_rate:
            for module in model.modules():
                if isinstance(module, GroupedSigmoidRouterModule):
                    module.update_bias(self.bias_rate)

    def _run(self, model: Model, batch: Batch) -> Output:
        return model(batch["tokens"], segments=batch["segments"], targets=batch["targets"], logits="none")


register(NextToken, paper="GPT-2 report §2", cases=lambda: [NextToken(), NextToken(balance=0.01, z_loss=0.001)])

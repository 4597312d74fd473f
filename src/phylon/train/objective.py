"""What is learned from a batch: an objective turns a model and a batch into a summed loss and its count."""

from torch import Tensor

from phylon.model import Model
from phylon.ops.loss import Loss
from phylon.spec.base import Mechanism, Slot
from phylon.spec.registry import register

Batch = dict[str, Tensor]


class Objective(Slot):
    """Slot of a training objective."""

    def loss(self, model: Model, batch: Batch) -> Loss:
        """The summed loss of a batch (or of a part of it) and the number of targets it sums over."""
        raise NotImplementedError


class NextToken(Mechanism, Objective, frozen=True, kw_only=True):
    """Cross-entropy of the next token of the same document. GPT-2 report, section 2.

    A batch holds ``tokens``, ``segments`` and ``targets``, int64 (B, T), the targets already shifted and -100 at the
    end of each document.
    """

    def loss(self, model: Model, batch: Batch) -> Loss:
        out = model(batch["tokens"], segments=batch["segments"], targets=batch["targets"], logits="none")
        return next(iter(out.losses.values()))


register(NextToken, paper="GPT-2 report §2", cases=lambda: [NextToken()])

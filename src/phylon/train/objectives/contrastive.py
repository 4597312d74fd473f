"""Sentence embeddings: the vector of a text is nearer to that of its own pair than to those of the other pairs."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from phylon.account.flops import Pass
from phylon.data.documents import Record
from phylon.data.labelled import GivesRecords
from phylon.data.passed import usable
from phylon.data.table import text_of
from phylon.data.weighed import weight_of
from phylon.model import Model, ModelSpec
from phylon.ops.loss import Loss
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.registry import register
from phylon.train.measures import retrieval_accuracy
from phylon.train.objectives.base import Batch, Feed, Material, Metrics
from phylon.train.objectives.supervised import Arrays, RecordObjective, parts, shuffled_feed, text_arrays

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

POOLS = ("mean", "first", "last")


class Contrastive(RecordObjective, frozen=True, kw_only=True):
    """``-log softmax_j(cos(a_i, b_j) / temperature)`` at ``j = i``, over the pairs of a batch. InfoNCE.

    van den Oord et al. (arXiv:1807.03748), equation 4; in-batch negatives: Henderson et al. (arXiv:1705.00652), section
    4.4; the temperature of SimCSE (arXiv:2104.08821), section 3. ``text`` and ``pair`` name the fields of a record,
    ``weight`` one with what it counts. ``pool`` turns the last hidden states into a vector, as ``phylon.encode`` does:
    mean, first or last. A pair whose second text is also another pair's is no negative of it. Evaluation reports
    ``retrieval``: how often the nearest of all held-out second texts is a text's own, or says the same.

    The negatives are the batch, so the loss of a batch is not that of its parts: ``run.accumulate`` is refused, and so
    is more than one process.
    """

    text: str = "text"
    pair: str = "pair"
    temperature: float = 0.05
    pool: str = "mean"
    weight: str | None = None  # type: ignore[assignment]

    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.001 <= self.temperature <= 100:
            raise UserError(f"temperature must lie between 0.001 and 100, for example 0.05; got {self.temperature}")
        if self.pool not in POOLS:
            raise UserError(f"unknown pool '{self.pool}'{did_you_mean(self.pool, POOLS)}")

    def split_by(self) -> tuple[str, ...]:
        return self.text, self.pair

    def read(self, source: GivesRecords) -> Iterator[tuple[str, str, float]]:
        def pair(record: Record) -> tuple[str, str, float]:
            return text_of(record, self.text), text_of(record, self.pair), weight_of(record, self.weight)

        return usable(source, source.records(), pair)

    def measured(self) -> tuple[str, ...]:
        return ("retrieval",)

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        if len(spec.stacks) > 1 or not hasattr(spec.last_stack.embed, "vocab_size"):
            raise UserError("contrastive trains an encoder or a decoder alone that reads text; choose another family")
        if recipe.run.accumulate > 1:
            raise UserError(
                "contrastive compares all pairs of a batch, which parts of it cannot: set run.accumulate to 1 "
                "(and lower run.batch_size where memory does not suffice; recomputation saves memory too)"
            )
        if recipe.run.batch_size < 2:
            raise UserError("contrastive takes its negatives from the batch: set run.batch_size to at least 2")

    def most_tokens(self, recipe: "Recipe") -> int:
        return 2 * super().most_tokens(recipe)

    def shrunk(self, recipe: "Recipe", rows: int, of: int, processes: int) -> str:
        return f"set run.batch_size={max(2, rows)}, or run.recompute=blocks"

    def feed(self, material: Material) -> Feed:
        made = {which: self._examples(material, source) for which, source in parts(material)}
        return shuffled_feed(material, made["training"], made.get("held-out"))

    def _examples(self, material: Material, source: GivesRecords) -> list[Arrays]:
        most = material.recipe.data.seq_len

        def example(record: Record) -> Arrays:
            found: Arrays = {}
            for field, prefix in ((self.text, ""), (self.pair, "pair_")):
                text = text_of(record, field)
                arrays = text_arrays(material.text, material.spec, text, None, most, record.name)
                found |= {f"{prefix}{name}": array for name, array in arrays.items()}
            hashed = hashlib.blake2b(text_of(record, self.pair).encode(), digest_size=8).digest()
            found["same"] = np.frombuffer(hashed, np.int64)[0]  # pyrefly: ignore[unsupported-operation]
            if self.weight is not None:
                found["weights"] = np.array(weight_of(record, self.weight), np.float32)
            return found

        return list(usable(source, source.records(), example))

    def counts(self, batch: Batch) -> dict[str, float]:
        pairs = float(batch["weights"].double().sum()) if "weights" in batch else len(batch["tokens"])
        return {"contrastive": pairs}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        return {"contrastive": self._loss(*self._vectors(model, batch), batch["same"], batch.get("weights"))}

    def _loss(self, left: Tensor, right: Tensor, same: Tensor, weights: Tensor | None = None) -> Loss:
        with torch.autocast(left.device.type, enabled=False):  # low precision would be magnified by the temperature
            scores = left @ right.T / self.temperature
        own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill((same[:, None] == same) & ~own, -math.inf)
        each = -scores.log_softmax(1).diagonal()
        if weights is not None:
            return Loss((each * weights).sum(), weights.sum())
        return Loss(each.sum(), torch.tensor(len(scores), device=scores.device))

    def _vectors(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Both sides, (B, D) each, of length 1 in fp32."""
        found = []
        for prefix in ("", "pair_"):
            read = {name: batch[prefix + name] for name in ("segments", "types") if prefix + name in batch}
            hidden = model(batch[f"{prefix}tokens"], **read, logits="none").hidden
            found.append(torch.nn.functional.normalize(pooled(hidden, read["segments"], self.pool), dim=-1))
        return found[0], found[1]

    def passes(self, spec: ModelSpec, batch: Batch) -> list[Pass]:
        return [Pass(len(batch[name]), batch[name].shape[1]) for name in ("tokens", "pair_tokens")]

    def training_flops(self, spec: ModelSpec, batch: Batch, trained: float = 1.0) -> float:
        """The passes, and the cosines of all pairs of the batch with two products backward."""
        cosines = 2 * len(batch["tokens"]) ** 2 * spec.last_stack.d_model
        return super().training_flops(spec, batch, trained) + 3 * cosines

    def n_tokens(self, batch: Batch) -> int:
        return sum(int((batch[name] != 0).sum()) for name in ("segments", "pair_segments"))

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        total, count, left, right, said = 0.0, 0.0, [], [], []
        for batch in batches:
            vectors = self._vectors(model, batch)
            loss = self._loss(*vectors, batch["same"], batch.get("weights"))
            total, count = total + float(loss.sum), count + float(loss.count)
            said.append(batch["same"].cpu())
            left.append(vectors[0].cpu())
            right.append(vectors[1].cpu())
        queries, answers = torch.cat(left).numpy(), torch.cat(right).numpy()
        found = retrieval_accuracy(queries, answers, torch.cat(said).numpy())
        return {"loss": total / (count or 1.0), "retrieval": found}


def pooled(hidden: Tensor, segments: Tensor, pool: str) -> Tensor:
    """(B, D) in fp32 of hidden states (B, T, D) padded on the right, one text a row."""
    if pool == "first":
        return hidden[:, 0].float()
    lengths = (segments != 0).sum(1)
    if pool == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    return (hidden.float() * (segments != 0)[..., None]).sum(1) / lengths[:, None]


register(
    Contrastive,
    paper="arXiv:1807.03748 eq. 4",
    cases=lambda: [Contrastive(), Contrastive(temperature=0.1, pool="first")],
)

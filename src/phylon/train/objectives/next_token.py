"""Language modelling from left to right."""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from phylon.data import Loader, PackedRows, Row, evaluation_batches
from phylon.model import Model, ModelSpec, Output
from phylon.ops.loss import IGNORE, Loss, Targets
from phylon.spec.registry import register
from phylon.train.objectives.base import Batch, Feed, Material, check_length, n_targets, need_decoder
from phylon.train.objectives.tokens import TokenObjective, held_out_batches, token_stores

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe


class NextToken(TokenObjective, frozen=True, kw_only=True):
    """Cross-entropy of the next token of the same document. GPT-2 report, section 2.

    A batch holds ``tokens``, ``segments`` and ``targets``, int64 (B, T), the targets already shifted and -100 at the
    end of each document. Documents are laid end to end and cut into rows of ``data.seq_len``; each is a segment of its
    own, so that attention never crosses from one into the next.
    """

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        need_decoder(spec, "next_token")
        check_length(spec, recipe.data.seq_len)

    def feed(self, material: Material) -> Feed:
        run, seq_len = material.recipe.run, material.recipe.data.seq_len
        store, held = token_stores(material, seq_len)
        rows = None if held is None or held.n_tokens < seq_len else PackedRows(held, seq_len)
        loader = Loader(PackedRows(store, seq_len), run.batch_size, run.seed)
        padded = partial(evaluation_batches, fill=Row.padding(seq_len)._asdict())
        return Feed(loader, held_out_batches(rows, material, padded))

    def counts(self, batch: Batch) -> dict[str, float]:
        if "weights" in batch:
            learned = float(batch["weights"][batch["targets"] != IGNORE].sum())
        else:
            learned = n_targets(batch["targets"])
        return {"lm": learned, **self.router_counts(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        return {"lm": next(iter(out.losses.values())), **self.router_terms(model, out)}

    def run(self, model: Model, batch: Batch) -> Output:
        targets: Tensor | Targets = batch["targets"]
        if "weights" in batch:
            targets = Targets(batch["targets"], batch["weights"])
        return model(batch["tokens"], segments=batch["segments"], targets=targets, logits="none")


register(NextToken, paper="GPT-2 report §2", cases=lambda: [NextToken(), NextToken(balance=0.01, z_loss=0.001)])

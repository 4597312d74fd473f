"""Language modelling from left to right."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from phylon.data import Loader, PackedRows, Row, evaluation_batches
from phylon.model import Model, ModelSpec, Output
from phylon.ops.loss import Loss
from phylon.spec.registry import register
from phylon.train.objectives.base import Batch, Feed, Material, check_length, n_learned, need_decoder, weighed
from phylon.train.objectives.tokens import TokenObjective, held_out_batches, token_stores

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe


class NextToken(TokenObjective, frozen=True, kw_only=True):
    """Cross-entropy of the next token of the same document. GPT-2 report, section 2.

    A batch holds ``tokens``, ``segments`` and ``targets``, int64 (B, T), the targets already shifted and -100 at the
    end of each document. Documents are laid end to end and cut into rows of ``data.seq_len``; each is a segment of its
    own, so that attention never crosses from one into the next. Where the source weighs documents or parts of them, a
    batch also holds ``weights``, float (B, T), of the targets: the loss is the sum of weight times cross-entropy over
    the sum of the weights.
    """

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        need_decoder(spec, "next_token")
        check_length(spec, recipe.data.seq_len)

    def measured(self) -> tuple[str, ...]:
        return ()

    def feed(self, material: Material) -> Feed:
        run, seq_len = material.recipe.run, material.recipe.data.seq_len
        store, held = token_stores(material, seq_len, weighs=True)
        rows = None if held is None or held.n_tokens < seq_len else PackedRows(held, seq_len)
        loader = Loader(PackedRows(store, seq_len), run.batch_size, run.seed)
        nothing = Row.padding(seq_len)._asdict()
        if rows is not None and "weights" in rows.example(0, 0):
            nothing["weights"] = np.zeros(seq_len, np.float32)
        padded = partial(evaluation_batches, fill=nothing)
        return Feed(loader, held_out_batches(rows, material, padded))

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"lm": n_learned(batch), **self.router_counts(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        return {"lm": next(iter(out.losses.values())), **self.router_terms(model, out)}

    def run(self, model: Model, batch: Batch) -> Output:
        return model(batch["tokens"], segments=batch["segments"], targets=weighed(batch), logits="none")


register(NextToken, paper="GPT-2 report §2", cases=lambda: [NextToken(), NextToken(balance=0.01, z_loss=0.001)])

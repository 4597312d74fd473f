"""Masked language modelling with or without pairs of sentences: BERT and RoBERTa."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from phylon.data import Draws, Examples, Loader, Source, evaluation_batches, sentences, stack, tokenise
from phylon.data.documents import digest
from phylon.layers.heads.classify import Classify, MaskedLM
from phylon.model import Model, ModelSpec, Output
from phylon.ops.loss import IGNORE, Loss
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.train.objectives.base import (
    Batch,
    Feed,
    Material,
    check_length,
    n_targets,
    need_head,
    need_tokens,
    right,
)
from phylon.train.objectives.masking import Masker, Pieces, Units, WholeWords, ordinary_ids, words_of
from phylon.train.objectives.pairs import FullSentences, Marks, NextSentence, PairedTexts, Pairs
from phylon.train.objectives.tokens import (
    TokenObjective,
    held_out_batches,
    hold_out_end,
    look_at_weights,
    refuse_weights,
)

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

LEAST_ROW = 8
N_SHOWN = 2


class MaskedLanguage(TokenObjective, frozen=True, kw_only=True):
    """Guess the hidden tokens, and with ``pairs`` what two spans of text have to do with each other.

    BERT (arXiv:1810.04805), section 3.1: ``share`` of the tokens that are no marks, rounded, are targets; each becomes
    [MASK] with the chance ``masked``, a random ordinary token with ``random``, and else stays. They are drawn anew in
    every epoch, as RoBERTa does (arXiv:1907.11692, section 4.1). ``unit``: single pieces or whole words. ``pairs``
    gives rows ``[CLS] A [SEP] B [SEP]`` with types and trains the head ``nsp`` as well, the two means added up; without
    it rows are full sentences (RoBERTa, section 4.2). A batch holds ``tokens``, ``segments``, ``mlm`` (B, T), ``types``
    (B, T) and ``nsp`` (B,).
    """

    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    unit: Units = Pieces()
    pairs: Pairs | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise UserError(f"share must lie between 0 and 1, got {self.share}")
        if not (self.masked >= 0 and self.random >= 0 and self.masked + self.random <= 1):
            raise UserError(f"masked and random are shares of the hidden tokens, got {self.masked} and {self.random}")

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        if spec.encoder is None or spec.decoder is not None:
            raise UserError(
                "masked_language trains an encoder alone, and this model has a decoder; choose another family"
            )
        need_head(spec, "mlm", MaskedLM, "masked_language")
        if self.pairs is not None:
            need_head(spec, self.pairs.head, Classify, "objective.pairs")
            classes, n_types = spec.heads[self.pairs.head].n_classes, getattr(spec.encoder.embed, "n_types", None)  # type: ignore[attr-defined]
            if classes != 2:
                raise UserError(f"the head '{self.pairs.head}' has {classes} classes; pairs of sentences have 2")
            if (n_types or 0) < 2:
                raise UserError("objective.pairs needs token types for A and B: set model.n_types to 2")
        if recipe.data.seq_len < LEAST_ROW:
            raise UserError(f"data.seq_len must be at least {LEAST_ROW} for masked_language, got {recipe.data.seq_len}")
        check_length(spec, recipe.data.seq_len)

    def look(self, source: Source) -> None:
        super().look(source)
        look_at_weights(source)
        if self.pairs is not None and len(list(itertools.islice(source.documents(), 2))) < 2:
            raise UserError("next sentences are drawn from other documents, and the data hold one; give more files")

    def measured(self) -> tuple[str, ...]:
        return "mlm", "mlm_accuracy", *(() if self.pairs is None else ("nsp", "nsp_accuracy"))

    def reserved(self) -> tuple[str, ...]:
        return ("[PAD]", "[CLS]", "[SEP]", "[MASK]")

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        need_tokens(tokenizer, "masked_language", "[MASK]", "[CLS]", "[SEP]", "[PAD]")

    def feed(self, material: Material) -> Feed:
        run, share = material.recipe.run, material.recipe.data.held_out
        training, held = self._rows(material, material.training), None
        if material.held_out is not None:
            held = self._rows(material, material.held_out)
        elif share:
            training, held = hold_out_end(training, share)
        loader = Loader(training, run.batch_size, run.seed)
        shown = _Shown(training if held is None else held, material.text, self.mask_of(material.text))
        return Feed(loader, held_out_batches(held, material, evaluation_batches), shown)

    def _rows(self, material: Material, source: Source) -> Examples:
        tokenizer, seq_len = material.text, material.recipe.data.seq_len
        material.say("tokenising the data")
        store = tokenise(source, tokenizer, material.folder, end=(), cut=sentences)
        refuse_weights(store)
        material.say(f"{store.n_tokens:,} tokens in {store.n_documents:,} documents")
        marks = Marks.of(tokenizer)
        if self.pairs is None:
            texts: FullSentences | PairedTexts = FullSentences(store, seq_len, marks)
        else:
            texts = PairedTexts(store, seq_len, marks, self.pairs)
        return MaskedRows(texts, self.mask_of(tokenizer), material.recipe.run.seed)

    def mask_of(self, tokenizer: Tokenizer) -> Masker:
        """What hides the tokens of a text."""
        mask = tokenizer.mask_id
        assert mask is not None, "check_vocabulary has passed"
        ordinary, words = ordinary_ids(tokenizer), words_of(tokenizer)
        return Masker(self.share, self.masked, self.random, self.unit, mask, ordinary, words)

    def counts(self, batch: Batch) -> dict[str, float]:
        pairs = {"nsp": len(batch["nsp"])} if "nsp" in batch else {}
        return {"mlm": n_targets(batch["mlm"]), **pairs, **self.router_counts(batch)}

    def scored(self, spec: ModelSpec, batch: Batch) -> dict[str, int]:
        return {"mlm": n_targets(batch["mlm"])} | ({} if self.pairs is None else {self.pairs.head: len(batch["nsp"])})

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        return self._terms(out) | self.router_terms(model, out)

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        # With the scores of the last token alone, the heads of whole rows are complete and no (B, T, V) exists.
        out = self.run(model, batch, logits="last")
        guesses = self.token_scores(model, out, batch).argmax(-1)
        found = self._terms(out) | {"mlm_accuracy": right(guesses, batch["mlm"][batch["mlm"] != IGNORE])}
        if self.pairs is not None:
            found["nsp_accuracy"] = right(out.heads[self.pairs.head].argmax(-1), batch["nsp"])
        return found

    def scores(self) -> tuple[str, ...]:
        return ("mlm_accuracy", "nsp_accuracy")

    def asked(self, batch: Batch) -> tuple[str | None, Tensor]:
        return "mlm", batch["mlm"]

    def run(self, model: Model, batch: Batch, logits: Literal["last", "none"] = "none") -> Output:
        targets = {"mlm": batch["mlm"]} | ({} if self.pairs is None else {self.pairs.head: batch["nsp"]})
        tokens, segments, types = batch["tokens"], batch["segments"], batch.get("types")
        return model(tokens, segments=segments, types=types, targets=targets, logits=logits)

    def _terms(self, out: Output) -> dict[str, Loss]:
        return {"mlm": out.losses["mlm"]} | ({} if self.pairs is None else {"nsp": out.losses[self.pairs.head]})


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows whose hidden tokens (and pairs) are drawn anew every epoch."""

    texts: FullSentences | PairedTexts
    masker: Masker
    seed: int

    @property
    def fingerprint(self) -> str:
        numbers = (self.masker.share, self.masker.masked, self.masker.random, self.masker.mask_id)
        return digest("masked", self.texts.fingerprint, numbers, repr(self.masker.unit))

    def __len__(self) -> int:
        return len(self.texts)

    def example(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        draws = Draws(self.seed, epoch, index)
        text = self.texts.text(index, draws)
        read, targets = self.masker(text.tokens, text.free, draws)
        found = {"tokens": read, "segments": text.segments, "mlm": targets}
        return found if text.label is None else found | {"types": text.types, "nsp": np.array(text.label)}


@dataclass(frozen=True, slots=True)
class _Shown:
    """The first rows with their hidden tokens, and what the model puts in their place."""

    rows: Examples
    tokenizer: Tokenizer
    masker: Masker

    def __call__(self, model: Model) -> list[str]:
        texts = []
        for index in range(min(N_SHOWN, len(self.rows))):
            batch = stack([self.rows.example(index, 0)])
            asked = (batch["tokens"][0] == self.masker.mask_id).nonzero()[:, 0]
            at = {name: batch[name].to(model.device) for name in ("tokens", "segments", "types") if name in batch}
            out = model(**at, logits="none")
            guesses = model.heads["mlm"](out.hidden[0, asked.to(model.device)], None).argmax(-1).cpu()
            filled = batch["tokens"][0].clone()
            filled[asked] = guesses
            real = batch["segments"][0] != 0
            pair = [self.tokenizer.decode(ids[real].tolist()) for ids in (batch["tokens"][0], filled)]
            texts.append("\n-> ".join(pair))
        return texts


register(
    MaskedLanguage,
    paper="arXiv:1810.04805 §3.1, arXiv:1907.11692 §4",
    cases=lambda: [MaskedLanguage(), MaskedLanguage(pairs=NextSentence()), MaskedLanguage(unit=WholeWords())],
)

"""Denoising: T5's span corruption and the unsupervised objectives it was compared with, for every kind of decoder."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from phylon.data import IGNORE, Draws, Example, Examples, Loader, Source, TokenStore, evaluation_batches, stack
from phylon.data.documents import digest
from phylon.model import GenerationDefaults, Model, ModelSpec, Output
from phylon.ops.loss import Loss
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.text.tokenizer import SENTINEL
from phylon.train.objectives.base import Batch, Feed, Material, check_length, n_targets, need_tokens, right
from phylon.train.objectives.corruption import (
    Corruption,
    Ids,
    IidSpans,
    IidTokens,
    Lengths,
    RandomSpans,
    SplitPrefix,
    WholeText,
    raw_length,
)
from phylon.train.objectives.masking import ordinary_ids
from phylon.train.objectives.tokens import TokenObjective, held_out_batches, look_at_weights, token_stores
from phylon.train.vocabulary import Loaded

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

N_SHOWN = 2
END, PAD = "</s>", "<pad>"
MOST_SENTINELS = 10_000


class Denoising(TokenObjective, frozen=True, kw_only=True):
    """Read a corrupted text and say what was hidden. T5 (arXiv:1910.10683), section 3.1.4 and 3.3.

    ``corruption`` says what is hidden and what must be said; it is drawn anew in every epoch. An encoder-decoder reads
    the source of at most ``data.seq_len`` tokens and says the target; a decoder alone reads both in one row of
    ``data.seq_len``, the source marked (``marks`` 1, which ``Causal() | Prefix()`` lets everybody see) and without a
    loss. As in the paper's code, raw text goes on from one document into the next. ``n_sentinels`` marks of hidden
    spans are reserved in a vocabulary trained for the run. A batch holds ``tokens``, ``segments``, ``targets`` (B, T)
    and ``source``, ``source_segments`` (B, S), or ``marks`` (B, T).
    """

    corruption: Corruption = RandomSpans()
    n_sentinels: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n_sentinels <= MOST_SENTINELS:
            raise UserError(f"n_sentinels must be from 0 to {MOST_SENTINELS:,}, got {self.n_sentinels}")

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        if spec.decoder is None or not spec.heads:
            raise UserError("denoising trains a decoder that says text, and this model has none; take another family")
        check_length(spec, recipe.data.seq_len)
        lengths = self.lengths(recipe.data.seq_len, spec)
        if "from" not in recipe.model and not isinstance(recipe.data.tokenizer, Loaded):
            self._check_sentinels(lengths, self.n_sentinels)  # what is reserved in the vocabulary of the run

    def look(self, source: Source) -> None:
        super().look(source)
        look_at_weights(source)

    def measured(self) -> tuple[str, ...]:
        return "lm", "accuracy"

    def _check_sentinels(self, lengths: Lengths, there: int) -> None:
        """Refuse a vocabulary with too few marks of hidden spans."""
        needed = self.corruption.n_sentinels(lengths.raw)
        if needed > there:
            raise UserError(
                f"{lengths.raw} tokens of text may need {needed} marks of hidden spans, and the vocabulary has "
                f"{there} ({SENTINEL.format(0)}, …): raise objective.n_sentinels, lower data.seq_len, or load a "
                "vocabulary that has them"
            )

    def lengths(self, seq_len: int, spec: ModelSpec) -> Lengths:
        """Tokens of raw text a row, and of its source and target."""
        joined = spec.encoder is None
        return raw_length(self.corruption, seq_len + joined, joined=joined)

    def reserved(self) -> tuple[str, ...]:
        return (PAD, END, *(SENTINEL.format(number) for number in range(self.n_sentinels)))

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        need_tokens(tokenizer, "denoising", END, PAD)

    def generation(self, tokenizer: Tokenizer) -> GenerationDefaults:
        return super().generation(tokenizer).replace(decoder_start_id=tokenizer.pad_id)

    def feed(self, material: Material) -> Feed:
        run, joined = material.recipe.run, material.spec.encoder is None
        lengths = self.lengths(material.recipe.data.seq_len, material.spec)
        tokenizer = material.text
        self._check_sentinels(lengths, len(tokenizer.sentinel_ids))
        pad = tokenizer.pad_id
        assert pad is not None, "check_vocabulary has passed"
        ids = Ids(tokenizer.sentinel_ids, tokenizer.eos_ids[0], ordinary_ids(tokenizer))
        store, held = token_stores(material, lengths.raw, end=())

        def rows(part: TokenStore) -> CorruptedRows:
            return CorruptedRows(part, self.corruption, lengths, ids, pad, run.seed, joined=joined)

        kept = None if held is None or held.n_tokens < lengths.raw else rows(held)
        material.say(f"rows of {lengths.raw} tokens: {lengths.source} to read, {lengths.target} to say")
        training = rows(store)
        shown = _Shown(training if kept is None else kept, tokenizer)
        return Feed(
            Loader(training, run.batch_size, run.seed), held_out_batches(kept, material, evaluation_batches), shown
        )

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"lm": n_targets(batch["targets"]), **self.router_counts(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        return {"lm": next(iter(out.losses.values())), **self.router_terms(model, out)}

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        guesses = self.token_scores(model, out, batch).argmax(-1)
        targets = batch["targets"]
        return {"lm": next(iter(out.losses.values())), "accuracy": right(guesses, targets[targets != IGNORE])}

    def scores(self) -> tuple[str, ...]:
        return ("accuracy",)

    def run(self, model: Model, batch: Batch) -> Output:
        named = ("tokens", "segments", "source", "source_segments", "marks")
        given = {name: batch[name] for name in named if name in batch}
        return model(**given, targets=batch["targets"], logits="none")


@dataclass(frozen=True, slots=True, kw_only=False)
class CorruptedRows:
    """A token stream cut into pieces of ``lengths.raw`` tokens, each corrupted anew in every epoch."""

    store: TokenStore
    corruption: Corruption
    lengths: Lengths
    ids: Ids
    pad: int
    seed: int
    joined: bool

    def __post_init__(self) -> None:
        if self.store.n_tokens < self.lengths.raw:
            raise UserError(
                f"the data has {self.store.n_tokens} tokens and a row takes {self.lengths.raw}; "
                "give more text, or lower data.seq_len"
            )

    @property
    def fingerprint(self) -> str:
        special = [list(self.ids.sentinels), self.ids.eos, self.pad]
        return digest("corrupted", self.store.fingerprint, list(self.lengths), repr(self.corruption), special)

    def __len__(self) -> int:
        return self.store.n_tokens // self.lengths.raw

    def pair(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """What is read and what must be said."""
        start = index * self.lengths.raw
        tokens = self.store.tokens[start : start + self.lengths.raw].astype(np.int64)
        return self.corruption.apply(tokens, self.ids, Draws(self.seed, epoch, index))

    def example(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        source, target = self.pair(index, epoch)
        if self.joined:
            return joined_row(source, target, self.lengths.source + self.lengths.target - 1, self.pad)
        return {
            "source": _filled(source, self.lengths.source, self.pad),
            "source_segments": _filled(np.ones_like(source), self.lengths.source, 0),
            # The decoder starts from padding and reads what it has said.
            "tokens": _filled(np.concatenate([[self.pad], target[:-1]]), self.lengths.target, self.pad),
            "segments": _filled(np.ones_like(target), self.lengths.target, 0),
            "targets": _filled(target, self.lengths.target, IGNORE),
        }


def joined_row(source: np.ndarray, target: np.ndarray, length: int, pad: int) -> dict[str, np.ndarray]:
    """Source and target in one row for a decoder alone: next tokens of the target are learned, the source is marked."""
    text = np.concatenate([source, target])
    targets = np.concatenate([np.full(len(source) - 1, IGNORE), target])
    marks = np.zeros(len(text) - 1, np.int64)
    marks[: len(source)] = 1
    return {
        "tokens": _filled(text[:-1], length, pad),
        "segments": _filled(np.ones(len(text) - 1, np.int64), length, 0),
        "marks": _filled(marks, length, 0),
        "targets": _filled(targets, length, IGNORE),
    }


def _filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    assert len(array) <= length, (len(array), length)
    return np.pad(array.astype(np.int64), (0, length - len(array)), constant_values=value)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The first rows: what is read, what was hidden, and what the model says."""

    rows: Examples
    tokenizer: Tokenizer

    def __call__(self, model: Model) -> list[str]:
        from phylon.generate import generate

        rows = self.rows
        assert isinstance(rows, CorruptedRows)
        pairs = [rows.pair(index, 0) for index in range(min(N_SHOWN, len(rows)))]
        most = rows.lengths.target
        if rows.joined:
            said = [self._guessed(model, rows.example(index, 0)) for index in range(len(pairs))]
        else:
            read = [source.tolist() for source, _ in pairs]
            found = generate(model, read, max_new_tokens=most, temperature=0, eos_ids=(), logprobs=False)
            said = [row["tokens"] for row in found]
        return [
            f"{self._text(source)}\nwanted: {self._text(target)}\nsaid: {self._text(answer)}"
            for (source, target), answer in zip(pairs, said, strict=True)
        ]

    def _guessed(self, model: Model, row: Example) -> list[int]:
        """The likeliest token after each true one: a prefix that everybody sees cannot be continued step by step."""
        batch = {name: tensor.to(model.device) for name, tensor in stack([row]).items()}
        logits = model(batch["tokens"], segments=batch["segments"], marks=batch["marks"]).logits
        assert logits is not None
        return logits.argmax(-1)[batch["targets"] != IGNORE].tolist()

    def _text(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids if int(i) not in (self.tokenizer.pad_id, *self.tokenizer.eos_ids)]
        return self.tokenizer.decode(kept)


register(
    Denoising,
    paper="arXiv:1910.10683 §3.3",
    cases=lambda: [
        Denoising(),
        Denoising(corruption=IidSpans()),
        Denoising(corruption=IidTokens()),
        Denoising(corruption=SplitPrefix()),
        Denoising(corruption=WholeText(), balance=0.01),
    ],
)

"""Translation by an encoder-decoder: pairs, teacher forcing, batches by token count, BLEU on what is held out."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from phylon.data.buckets import BucketLoader
from phylon.data.documents import Record
from phylon.data.labelled import GivesRecords
from phylon.data.passed import usable
from phylon.data.table import text_of
from phylon.data.weighed import weight_of
from phylon.generate import beam_search, generate
from phylon.generate.encode import batches
from phylon.model import GenerationDefaults, Model, ModelSpec
from phylon.ops.loss import IGNORE, Loss, cross_entropy
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.train.measures import bleu, sacrebleu_metric
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, n_learned, weighed
from phylon.train.objectives.supervised import Arrays, RecordObjective, padded_batches, parts, spread
from phylon.train.objectives.tokens import TokenObjective

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

N_SAMPLES = 4
MORE = 50  # tokens that a translation may be longer than its source (section 6.1)


class Translation(RecordObjective, TokenObjective, frozen=True, kw_only=True):
    """Cross-entropy of the target's tokens given the source's. *Attention Is All You Need* (arXiv:1706.03762), §5.

    ``source`` and ``target`` name the fields of a record, ``weight`` one with what it counts; both share one vocabulary
    (section 5.1). A batch holds at most ``max_tokens`` tokens of each, padding included, of pairs of about one length;
    a pair with a side above ``data.seq_len`` tokens is left out. ``label_smoothing``: section 5.4. ``n_beams`` and
    ``length_penalty`` are those of the search whose BLEU is reported (section 6.1; ``None``: no BLEU); a hypothesis is
    at most 50 tokens longer than its source. The loss that is reported is the smoothed one, ``nll`` the one without
    smoothing.

    A batch: ``source`` and ``source_segments`` (B, S), ``tokens``, ``segments`` and ``targets`` (B, T).
    """

    source: str = "source"
    target: str = "target"
    max_tokens: int = 4096
    label_smoothing: float = 0.1
    n_beams: int | None = None
    length_penalty: float = 0.6
    weight: str | None = None  # type: ignore[assignment]

    by_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.n_beams is not None and self.n_beams < 1:
            raise UserError(f"n_beams must be at least 1, got {self.n_beams}; leave it out for no BLEU")

    def split_by(self) -> tuple[str, ...]:
        return (self.source,)

    def text_fields(self) -> tuple[str, ...]:
        return self.source, self.target

    def reserved(self) -> tuple[str, ...]:
        return "</s>", "<pad>"

    def decodes(self) -> bool:
        return self.n_beams is not None

    def read(self, source: GivesRecords) -> Iterator[tuple[str, str, float]]:
        return usable(source, source.records(), self._pair)

    def measured(self) -> tuple[str, ...]:
        return "nll", "accuracy", *(() if self.n_beams is None else ("bleu",))

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        if spec.encoder is None or spec.decoder is None:
            raise UserError('translation trains an encoder-decoder; choose one, such as family = "transformer2017"')
        if self.max_tokens < recipe.data.seq_len:
            raise UserError(
                f"objective.max_tokens {self.max_tokens} is less than data.seq_len {recipe.data.seq_len}; "
                "a batch must have room for one pair"
            )
        if recipe.data.seq_len < 2:
            raise UserError("data.seq_len 1 leaves no room for a text beside its end token; set at least 2")
        if recipe.data.held_out and self.n_beams is not None:
            sacrebleu_metric()

    def most_tokens(self, recipe: "Recipe") -> int:
        return self.max_tokens

    def shrunk(self, recipe: "Recipe", rows: int, of: int, processes: int) -> str:
        parts = -(-recipe.run.accumulate * of // rows)
        fits = max(self.max_tokens * rows // of, recipe.data.seq_len)
        return f"set run.accumulate={parts} for the same batch, or objective.max_tokens={fits}"

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_ids:
            raise UserError("translation needs a token that ends a text, and the tokenizer has none; use another")

    def generation(self, tokenizer: Tokenizer) -> GenerationDefaults:
        start = next(i for i in (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids[0]) if i is not None)
        return super().generation(tokenizer).replace(decoder_start_id=start)

    def feed(self, material: Material) -> Feed:
        run = material.recipe.run
        made = {which: self._examples(material, source, which) for which, source in parts(material)}
        loader = BucketLoader(made["training"], self.max_tokens, run.seed)
        if "held-out" not in made:
            return Feed(loader)
        held = spread(made["held-out"], run.eval_rows)
        # By length, so that little is padded; what is measured does not depend on the order.
        held = sorted(held, key=lambda example: len(example["source"]))
        sources = [example["source"].tolist() for example in spread(held, N_SAMPLES)]
        return Feed(loader, padded_batches(held), lambda model: self._samples(model, sources))

    def _examples(self, material: Material, source: GivesRecords, which: str) -> list[Arrays]:
        """Both sides as ids: the source as ``generate`` reads it, the target behind the start id and with its end."""
        tokenizer, most = material.text, material.recipe.data.seq_len
        pairs = list(self.read(source))
        sources = tokenizer.encode_batch([source for source, _, _ in pairs])
        targets = tokenizer.encode_batch([target for _, target, _ in pairs], special=False)
        start, end = self.generation(tokenizer).decoder_start_id, tokenizer.eos_ids[0]
        found = []
        for read, said, (_, _, weight) in zip(sources, targets, pairs, strict=True):
            if 0 < len(read) <= most and 0 < len(said) < most:
                tokens = np.array([start, *said], np.int64)
                source_ids = np.array(read, np.int64)
                example = {"source": source_ids, "source_segments": np.ones_like(source_ids), "tokens": tokens}
                example |= {"segments": np.ones_like(tokens), "targets": np.array([*said, end], np.int64)}
                found.append(self.with_weight(example, weight))
        left = len(pairs) - len(found)
        material.say(
            f"{len(found):,} {which} pairs" + (f", {left:,} longer than {most} tokens left out" if left else "")
        )
        if not found:
            raise UserError(f"every one of the {len(pairs)} {which} pairs has a side above data.seq_len {most} tokens")
        return found

    def _pair(self, record: Record) -> tuple[str, str, float]:
        source, target = text_of(record, self.source).strip(), text_of(record, self.target).strip()
        return source, target, weight_of(record, self.weight)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"lm": n_learned(batch), **self.router_counts(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        smoothed = weighed(batch, self.label_smoothing)
        out = model(**_inputs(batch), targets=smoothed, logits="none")
        return {"lm": next(iter(out.losses.values())), **self.router_terms(model, out)}

    def scores(self) -> tuple[str, ...]:
        return "nll", "accuracy"

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        logits, targets = model(**_inputs(batch)).logits, batch["targets"]
        assert logits is not None
        valid = targets != IGNORE
        return {
            "lm": cross_entropy(logits, targets, label_smoothing=self.label_smoothing, weights=batch.get("weights")),
            "nll": cross_entropy(logits, targets),
            "accuracy": Loss(((logits.argmax(-1) == targets) & valid).sum(), valid.sum()),
        }

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        kept = list(batches)
        found = super().evaluate(model, kept)
        found.pop("lm", None)
        if self.n_beams is not None:
            pairs = [pair for batch in kept for pair in _pairs(batch)]
            said = self.translate(model, [source for source, _ in pairs])
            right = [model.tokenizer.decode(target, skip_special=True).strip() for _, target in pairs]
            found["bleu"], _ = bleu(said, right)
        return found

    def translate(self, model: Model, sources: list[list[int]]) -> list[str]:
        """The best translation of each source that the search finds."""
        # In fp32 also where the evaluation is autocast: a state keeps what the first call gave it.
        with torch.autocast(model.device.type, enabled=False):
            if self.n_beams == 1:
                return self._greedy(model, sources)
            found = []
            for source in sources:
                best = beam_search(
                    model,
                    [source],
                    n_beams=self.n_beams or 1,
                    max_new_tokens=len(source) + MORE,
                    length_penalty=self.length_penalty,
                )
                found.append((best[0][0]["text"] or "").strip())
            return found

    def _greedy(self, model: Model, sources: list[list[int]]) -> list[str]:
        """In batches of as many tokens, read and written, as a batch of the training may hold."""
        found = [""] * len(sources)
        for chosen in batches([2 * len(source) + MORE for source in sources], self.max_tokens):
            read = [sources[i] for i in chosen]
            most = max(map(len, read)) + MORE
            rows = generate(model, read, max_new_tokens=most, temperature=0, logprobs=False)
            for i, row in zip(chosen, rows, strict=True):
                kept = row["tokens"][: len(sources[i]) + MORE]
                found[i] = model.tokenizer.decode(kept, skip_special=True).strip()
        return found

    def _samples(self, model: Model, sources: list[list[int]]) -> list[str]:
        said = self.translate(model, sources)
        read = [model.tokenizer.decode(source, skip_special=True) for source in sources]
        return [f"{source} -> {target}" for source, target in zip(read, said, strict=True)]


def _inputs(batch: Batch) -> dict:
    return {name: batch[name] for name in ("tokens", "segments", "source", "source_segments")}


def _pairs(batch: Batch) -> Iterable[tuple[list[int], list[int]]]:
    """The source and the target of every row, without padding and end."""
    for row in range(len(batch["source"])):
        source, target = batch["source"][row], batch["targets"][row]
        yield source[batch["source_segments"][row] != 0].tolist(), target[target != IGNORE].tolist()


register(
    Translation,
    paper="arXiv:1706.03762 §5",
    cases=lambda: [Translation(max_tokens=256, n_beams=None), Translation(max_tokens=300, n_beams=2)],
)

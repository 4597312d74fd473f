"""Every task as text in, text out: T5's fine-tuning and its mixtures of tasks."""

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from phylon.data.buckets import PaddedLoader
from phylon.data.documents import Record
from phylon.data.labelled import GivesRecords
from phylon.data.mixture import Mixture
from phylon.data.passed import usable
from phylon.data.table import text_of
from phylon.data.weighed import weight_of
from phylon.model import GenerationDefaults, Model, ModelSpec, Output
from phylon.ops.loss import IGNORE, Loss
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.train.objectives.base import Batch, Feed, Material, n_learned, need_tokens, right, weighed
from phylon.train.objectives.mixing import MixedExamples, mixing_rates
from phylon.train.objectives.supervised import Arrays, RecordObjective, padded_batches, parts, spread
from phylon.train.objectives.tokens import TokenObjective

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

N_SHOWN = 4
ONE_TASK = "all"


class _Row(NamedTuple):
    task: str
    input: str
    target: str
    weight: float


class TextToText(RecordObjective, TokenObjective, frozen=True, kw_only=True):
    """Say the target of every input, whatever the task. T5 (arXiv:1910.10683), sections 2.4 and 3.5.2.

    Records have the fields ``input`` and ``target``, and ``task`` where there are several (the source ``mixture`` makes
    such ones, with a prefix of each task); ``weight`` names one with what a record counts. Tasks are mixed in
    proportion to their numbers of examples, each counted up to ``cap`` (K; a task's own comes first), the shares raised
    to 1/``temperature`` (T). Inputs longer than ``data.seq_len`` tokens and targets longer than ``target_len`` are cut,
    as in the paper's code. ``exact``: the share of held-out targets of which every token is the likeliest one. A batch
    holds ``source``, ``source_segments`` (B, S), ``tokens``, ``segments``, ``targets`` (B, T).
    """

    input: str = "input"
    target: str = "target"
    target_len: int = 64
    cap: int | None = None
    temperature: float = 1.0
    weight: str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_len < 2:
            raise UserError(f"target_len must be at least 2, got {self.target_len}")
        if self.cap is not None and self.cap < 1:
            raise UserError(f"cap must be at least 1, got {self.cap}")
        if not 0.01 <= self.temperature < math.inf:
            raise UserError(f"temperature must be at least 0.01 and finite, got {self.temperature}")

    def split_by(self) -> tuple[str, ...]:
        return (self.input,)

    def text_fields(self) -> tuple[str, ...]:
        return self.input, self.target

    def reserved(self) -> tuple[str, ...]:
        return ("<pad>", "</s>")

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        if recipe.data.seq_len < 2:
            raise UserError("data.seq_len 1 leaves no room for an input beside its end token; set at least 2")
        if spec.encoder is None or spec.decoder is None:
            raise UserError('text_to_text trains an encoder-decoder; choose one, such as family = "t5"')

    def most_tokens(self, recipe: "Recipe") -> int:
        return recipe.run.batch_size * max(recipe.data.seq_len, self.target_len)

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        need_tokens(tokenizer, "text_to_text", "</s>", "<pad>")

    def generation(self, tokenizer: Tokenizer) -> GenerationDefaults:
        return super().generation(tokenizer).replace(decoder_start_id=tokenizer.pad_id)

    def read(self, source: GivesRecords) -> Iterator[_Row]:
        return usable(source, source.records(), self._row)

    def measured(self) -> tuple[str, ...]:
        return "lm", "accuracy", "exact"

    def feed(self, material: Material) -> Feed:
        recipe, run = material.recipe, material.recipe.run
        made = {which: self._tasks(material, source) for which, source in parts(material)}
        training = made["training"]
        sizes = [len(examples) for examples in training.values()]
        own = recipe.data.source.caps() if isinstance(recipe.data.source, Mixture) else {}
        counted = [min(size, own.get(name) or self.cap or size) for name, size in zip(training, sizes, strict=True)]
        mixed = MixedExamples(training, mixing_rates(counted, None, self.temperature), run.seed)
        for name, size, quota in zip(training, sizes, mixed.quota, strict=True):
            material.say(f"task {name}: {size:,} training examples, {100 * quota / len(mixed):.1f} % of the batches")
        loader = PaddedLoader(mixed, run.batch_size, run.seed, one_pass=sum(sizes))
        if "held-out" not in made:
            return Feed(loader)
        held = spread([example for examples in made["held-out"].values() for example in examples], run.eval_rows)
        shown = [(e["source"].tolist(), e["targets"].tolist()) for e in spread(held, N_SHOWN)]
        return Feed(loader, padded_batches(held), lambda model: self._samples(model, shown))

    def _tasks(self, material: Material, source: GivesRecords) -> dict[str, list[Arrays]]:
        """The examples of every task, in the order of their first record."""
        tokenizer, found = material.text, dict[str, list[Arrays]]()
        for rows in _batches(self.read(source)):
            read = tokenizer.encode_batch([row.input for row in rows], special=False)
            said = tokenizer.encode_batch([row.target for row in rows], special=False)
            for row, source_ids, target_ids in zip(rows, read, said, strict=True):
                example = self._example(tokenizer, source_ids, target_ids, material.recipe.data.seq_len)
                found.setdefault(row.task, []).append(self.with_weight(example, row.weight))
        return found

    def _row(self, record: Record) -> _Row:
        task, weight = str(record.fields.get("task", ONE_TASK)), weight_of(record, self.weight)
        return _Row(task, text_of(record, self.input), text_of(record, self.target), weight)

    def _example(self, tokenizer: Tokenizer, source: list[int], target: list[int], most: int) -> Arrays:
        end, start = tokenizer.eos_ids[0], tokenizer.pad_id
        assert start is not None, "check_vocabulary has passed"
        read = np.array([*source[: most - 1], end], np.int64)
        said = np.array([*target[: self.target_len - 1], end], np.int64)
        return {
            "source": read,
            "source_segments": np.ones_like(read),
            "tokens": np.concatenate([[start], said[:-1]]).astype(np.int64),
            "segments": np.ones_like(said),
            "targets": said,
        }

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"lm": n_learned(batch), **self.router_counts(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.run(model, batch)
        return {"lm": next(iter(out.losses.values())), **self.router_terms(model, out)}

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out, targets = self.run(model, batch), batch["targets"]
        asked = targets != IGNORE
        guesses = targets.clone()
        guesses[asked] = self.token_scores(model, out, batch).argmax(-1)
        wrong = ((guesses != targets) & asked).any(1)
        exact = Loss((~wrong & asked.any(1)).sum(), asked.any(1).sum())
        return {"lm": next(iter(out.losses.values())), "accuracy": right(guesses, targets), "exact": exact}

    def scores(self) -> tuple[str, ...]:
        return "accuracy", "exact"

    def run(self, model: Model, batch: Batch) -> Output:
        named = ("tokens", "segments", "source", "source_segments")
        return model(**{name: batch[name] for name in named}, targets=weighed(batch), logits="none")

    def _samples(self, model: Model, shown: list[tuple[list[int], list[int]]]) -> list[str]:
        from phylon.generate import generate

        rows = generate(
            model, [source for source, _ in shown], max_new_tokens=self.target_len, temperature=0, logprobs=False
        )
        decode = model.tokenizer.decode
        return [
            f"{decode(source, skip_special=True)}\nwanted: {decode(target, skip_special=True)}\nsaid: {row['text']}"
            for (source, target), row in zip(shown, rows, strict=True)
        ]


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """A thousand rows at a time."""
    while some := list(itertools.islice(rows, 1000)):
        yield some


register(
    TextToText,
    paper="arXiv:1910.10683 §2.4, §3.5.2",
    cases=lambda: [TextToText(), TextToText(cap=65_536, temperature=2.0, input="source", target="label")],
)

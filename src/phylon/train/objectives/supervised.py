"""What objectives with labels share: records split by what they say, texts as examples, padded batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from phylon.data import Source
from phylon.data.buckets import LengthLoader, PaddedLoader, examples_digest, padded
from phylon.data.documents import Record
from phylon.data.labelled import GivesRecords
from phylon.data.passed import Empty, usable
from phylon.data.split import split_records
from phylon.data.table import value_of
from phylon.generate.encode import has_types
from phylon.model import ModelSpec
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.text import Tokenizer
from phylon.text.tokenizer import Joint
from phylon.train.objectives.base import Batch, Feed, Material, Objective, check_length
from phylon.train.objectives.tokens import EVAL_BATCH_ROWS

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


class Listed:
    """Examples in memory, the same in every epoch."""

    def __init__(self, examples: Sequence[Arrays]) -> None:
        self.examples = examples
        self.fingerprint = examples_digest(examples)
        self.lengths = [length_of(example) for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        return self.examples[index]


class RecordObjective(Mechanism, Objective, frozen=True, kw_only=True):
    """An objective over records. ``split_by``: the fields that decide whether a record is held out.

    Each has a field ``weight``, which names one of the records with what it counts in the loss: each of its targets so
    much, 1 unless one is named.
    """

    weight: ClassVar[str | None] = None

    def split_by(self) -> tuple[str, ...]:
        raise NotImplementedError

    def read(self, source: GivesRecords) -> Iterator[Any]:
        """The records as this objective understands them; what is wrong with one is passed over or refused."""
        raise NotImplementedError

    def look(self, source: Source) -> None:
        super().look(source)
        next(self.read(source), None)  # type: ignore[arg-type]

    def text_fields(self) -> tuple[str, ...]:
        """The fields a vocabulary is trained on."""
        return self.split_by()

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        check_length(spec, recipe.data.seq_len)

    def split(self, source: Source, share: float) -> tuple[Source, Source | None]:
        """By what the records say, so that a text that occurs twice is not in both parts."""
        if not share:
            return source, None
        return split_records(source, share, self.split_by())  # type: ignore[arg-type]

    def texts(self, source: Source) -> Iterator[str]:
        def said(record: Record) -> list[str]:
            values = [value_of(record, field) for field in self.text_fields()]
            return [" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]

        for texts in usable(source, source.records(), said):  # type: ignore[attr-defined]
            yield from texts

    def with_weight(self, example: Arrays, weight: float) -> Arrays:
        """The example with ``weights`` in the shape of its ``targets``, where records are weighed."""
        if self.weight is None:
            return example
        return example | {"weights": np.full(np.shape(example["targets"]), weight, np.float32)}


def parts(material: Material) -> Iterator[tuple[str, GivesRecords]]:
    """The parts of the data by name: "training", and "held-out" where there is one."""
    for which, source in (("training", material.training), ("held-out", material.held_out)):
        if source is not None:
            assert hasattr(source, "records"), type(source)
            yield which, source  # type: ignore[misc]


def length_of(example: Arrays) -> int:
    """How many tokens are read."""
    return len(example["tokens"])


def row_feed(material: Material, training: Sequence[Arrays], held: Sequence[Arrays] | None) -> Feed:
    """Batches of ``run.batch_size`` rows of about one length, padded to the longest; the held-out ones by length."""
    run = material.recipe.run
    material.say(f"{len(training):,} training and {len(held or ()):,} held-out examples")
    loader = LengthLoader(Listed(training), run.batch_size, run.seed)
    if held is None:
        return Feed(loader)
    return Feed(loader, padded_batches(sorted(spread(held, run.eval_rows), key=length_of)))


def shuffled_feed(material: Material, training: Sequence[Arrays], held: Sequence[Arrays] | None) -> Feed:
    """As ``row_feed``, of any lengths together and in order: for losses that compare the rows of a batch."""
    run = material.recipe.run
    material.say(f"{len(training):,} training and {len(held or ()):,} held-out examples")
    loader = PaddedLoader(Listed(training), run.batch_size, run.seed)
    return Feed(loader, None if held is None else padded_batches(spread(held, run.eval_rows)))


def spread(examples: Sequence[T], most: int | None) -> Sequence[T]:
    """At most so many of the examples, at equal distances."""
    if most is None or most >= len(examples):
        return examples
    return [examples[index * len(examples) // most] for index in range(most)]


def padded_batches(
    examples: Sequence[Mapping[str, np.ndarray]], rows: int = EVAL_BATCH_ROWS
) -> Callable[[], Iterable[Batch]]:
    """Every example once, in order, in batches padded to their longest."""
    return lambda: (padded(examples[start : start + rows]) for start in range(0, len(examples), rows))


def shortened(joint: Joint, most: int) -> Joint:
    """``joint.shortened(most)``, in words of the recipe where there is no room."""
    try:
        return joint.shortened(most)
    except UserError:
        raise UserError(f"data.seq_len {most} leaves no room for a text beside what the tokenizer adds") from None


def text_arrays(tokenizer: Tokenizer, spec: ModelSpec, text: str, pair: str | None, most: int, where: str) -> Arrays:
    """``tokens``, ``segments`` (all 1) and, for a model with types, ``types``, each (T,) int64."""
    joint = shortened(tokenizer.encode_joint(text, pair), most)
    return joint_arrays(joint, spec, where)


def joint_arrays(joint: Joint, spec: ModelSpec, where: str) -> Arrays:
    """The arrays of what a model reads; nothing to read is refused."""
    if all(text is None for text in joint.texts):
        raise Empty(f"{where}: the text gives no tokens")
    tokens = np.array(joint.ids, np.int64)
    found = {"tokens": tokens, "segments": np.ones_like(tokens)}
    if has_types(spec):
        found["types"] = np.array(joint.types, np.int64)
    return found


def inputs(batch: Batch) -> dict[str, Any]:
    """What a model is called with."""
    return {name: batch[name] for name in ("tokens", "segments", "types") if name in batch}

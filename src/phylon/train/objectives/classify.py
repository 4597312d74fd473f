"""Fine-tuning on labelled texts: classes and numbers of texts or pairs, classes of words."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phylon.data.labelled import (
    Classes,
    GivesRecords,
    LabelledText,
    LabelledWords,
    check_head,
    class_number,
    read_texts,
    read_words,
    score,
)
from phylon.data.passed import usable
from phylon.generate.finetuned import first_tokens
from phylon.layers.heads.classify import Classify
from phylon.model import Model, ModelSpec, Output
from phylon.ops.loss import IGNORE, Loss, Targets
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.measures import accuracy, f1_of, macro_f1, mean_squared_error, pearson, spearman
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, n_learned, need_head, weighed
from phylon.train.objectives.supervised import (
    Arrays,
    RecordObjective,
    inputs,
    joint_arrays,
    parts,
    row_feed,
    shortened,
    text_arrays,
)

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe


class _Labelled(RecordObjective, frozen=True, kw_only=True):
    """A head named ``head``, taught and measured on padded batches with ``targets``."""

    head: str = "class"
    weight: str | None = None  # type: ignore[assignment]
    classes: tuple[str, ...] | None = None

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        need_head(spec, self.head, Classify, self._kind)
        pooled = spec.heads[self.head].per_document
        if pooled != self._per_text:
            want, have = ("a pool", "none") if self._per_text else ("no pool", "one")
            raise UserError(f"{self._kind} needs a head with {want}, and '{self.head}' has {have}; choose another head")
        if self.classes is not None:
            check_head(Classes(self.classes).names, self.head, self._n_classes(spec))

    def measured(self) -> tuple[str, ...]:
        return "accuracy", "f1"

    def _n_classes(self, spec: ModelSpec) -> int:
        return spec.heads[self.head].n_classes  # type: ignore[attr-defined]

    @property
    def _kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def _per_text(self) -> bool:
        return True

    def scored(self, spec: ModelSpec, batch: Batch) -> dict[str, int]:
        return {self.head: len(batch["tokens"]) if self._per_text else batch["tokens"].numel()}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: n_learned(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = model(**inputs(batch), targets={self.head: weighed(batch)}, logits="none")
        return {self.head: out.losses[self.head]}

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        said: list[Any] = []
        right: list[Any] = []
        total, count = 0.0, 0.0
        for batch in batches:
            out = model(**inputs(batch), targets=self.targets(batch))
            loss = self.loss_of(out, batch)
            total, count = total + float(loss.sum), count + float(loss.count)
            valid = batch["targets"] != IGNORE
            said += self.predicted(out.heads[self.head])[valid].tolist()
            right += batch["targets"][valid].tolist()
        n_classes = self._n_classes(model.spec)
        return {"loss": total / (count or 1.0)} | self.metrics(said, right, n_classes)

    def targets(self, batch: Batch) -> dict[str, Tensor | Targets] | None:
        return {self.head: weighed(batch)}

    def loss_of(self, out: Output, batch: Batch) -> Loss:
        return out.losses[self.head]

    def predicted(self, scores: Tensor) -> Tensor:
        """What the scores (…, C) say, (…)."""
        return scores.argmax(-1)

    def metrics(self, said: list[Any], right: list[Any], n_classes: int) -> Metrics:
        """Accuracy, and F1: of class 1 for a head of two classes, else the mean over the classes that are labels.

        Neither depends on what is predicted, so that evaluations can be compared.
        """
        f1 = f1_of(said, right, 1) if n_classes == 2 else macro_f1(said, right, sorted(set(right)))
        return {"accuracy": accuracy(said, right), "f1": f1}

    def classes_for(self, material: Material, labels: Sequence[tuple[Any, str]]) -> Classes | None:
        """The classes by name; ``None`` where labels are numbers from 0 already. They must fit the head.

        ``labels`` come with where they stand.
        """
        classes = Classes.of(label for label, _ in labels) if self.classes is None else Classes(self.classes)
        n_classes = self._n_classes(material.spec)
        numbers = self.classes is None and classes.are_numbers(n_classes)
        if not numbers:
            check_head(classes.names, self.head, n_classes, labels)
        shown = f"0 to {n_classes - 1}" if numbers else ", ".join(f"{i} {n}" for i, n in enumerate(classes.names))
        material.say(f"classes: {shown}")
        return None if numbers else classes

    def named(self, feed: Feed, classes: Classes | None) -> Feed:
        """The feed with the names of the classes; none where labels are numbers, whatever the model called them."""
        return feed._replace(labels={self.head: () if classes is None else classes.names})

    def number(self, material: Material, classes: Classes | None, label: Any, where: str) -> int:
        """The number of a label."""
        if classes is not None:
            return classes.number(label, where)
        try:
            return class_number(label, self._n_classes(material.spec), where)
        except UserError as problem:
            raise UserError(f"{problem}; objective.classes names others, in order") from None


class TextClasses(_Labelled, frozen=True, kw_only=True):
    """Cross-entropy of the class of a text, or of a pair of texts. BERT (arXiv:1810.04805), section 4.1.

    ``text``, ``pair`` and ``label`` name the fields of a record, ``weight`` one with what it counts; ``classes`` the
    classes in order. Left out, they are the labels there are, by name; labels that are whole numbers are the numbers of
    the classes, from 0, and where all of these are there, another label is a mistake of its record. Texts are cut to
    ``data.seq_len`` tokens, of a pair the longer one first. Evaluation reports ``accuracy`` and ``f1`` (of class 1 of
    two, else the mean over the classes).
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"

    def split_by(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)

    def feed(self, material: Material) -> Feed:
        rows = {which: list(self.read(source)) for which, source in parts(material)}
        classes = self.classes_for(material, [(row.label, row.where) for part in rows.values() for row in part])

        def example(row: LabelledText) -> Arrays:
            return self._example(material, row, np.array(self.number(material, classes, row.label, row.where)))

        made = {which: list(usable(source, rows[which], example)) for which, source in parts(material)}
        return self.named(row_feed(material, made["training"], made.get("held-out")), classes)

    def read(self, source: GivesRecords) -> Iterator[LabelledText]:
        return read_texts(source, self.text, self.pair, self.label, self.weight)

    def _example(self, material: Material, row: LabelledText, target: np.ndarray) -> Arrays:
        most = material.recipe.data.seq_len
        found = text_arrays(material.text, material.spec, row.text, row.pair, most, row.where)
        return self.with_weight(found | {"targets": target}, row.weight)


class TextScores(TextClasses, frozen=True, kw_only=True):
    """Squared error of a number said of a text, or of a pair of texts. STS-B in BERT (arXiv:1810.04805), section 4.1.

    The fields are those of ``text_classes``, labels are numbers; the head has one class, whose score is the number.
    Evaluation reports ``mse``, ``pearson`` and ``spearman``.
    """

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        if self.classes is not None:
            raise UserError("text_scores reads numbers; leave objective.classes out")
        super().check(recipe, spec)
        if self._n_classes(spec) != 1:
            raise UserError(f"text_scores needs a head '{self.head}' with n_classes = 1, one number a text")

    def measured(self) -> tuple[str, ...]:
        return "mse", "pearson", "spearman"

    def read(self, source: GivesRecords) -> Iterator[LabelledText]:
        return usable(source, super().read(source), lambda row: row._replace(label=score(row.label, row.where)))

    def feed(self, material: Material) -> Feed:
        def example(row: LabelledText) -> Arrays:
            return self._example(material, row, np.array(row.label, np.float32))

        made = {which: list(usable(source, self.read(source), example)) for which, source in parts(material)}
        return row_feed(material, made["training"], made.get("held-out"))

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: float(batch["weights"].double().sum()) if "weights" in batch else len(batch["targets"])}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        return {self.head: self.loss_of(model(**inputs(batch)), batch)}

    def targets(self, batch: Batch) -> dict[str, Tensor | Targets] | None:
        return None

    def loss_of(self, out: Output, batch: Batch) -> Loss:
        said, right = out.heads[self.head][:, 0].float(), batch["targets"]
        error = (said - right).square()
        if "weights" in batch:
            return Loss((error * batch["weights"]).sum(), batch["weights"].sum())
        return Loss(error.sum(), torch.tensor(len(right), device=said.device))

    def predicted(self, scores: Tensor) -> Tensor:
        return scores[:, 0]

    def metrics(self, said: list[Any], right: list[Any], n_classes: int) -> Metrics:
        return {
            "mse": mean_squared_error(said, right),
            "pearson": pearson(said, right),
            "spearman": spearman(said, right),
        }


class WordClasses(_Labelled, frozen=True, kw_only=True):
    """Cross-entropy of the class of every word, read at its first token. BERT (arXiv:1810.04805), section 5.3.

    ``words`` and ``labels`` name the fields: lists, or words between spaces. Words are joined by spaces; tokens that
    continue a word have no target, and words that are cut off by ``data.seq_len`` are not asked for. Evaluation reports
    ``accuracy`` and ``f1``, as ``text_classes`` does, over words.
    """

    words: str = "words"
    labels: str = "labels"
    head: str = "token"

    @property
    def _per_text(self) -> bool:
        return False

    def split_by(self) -> tuple[str, ...]:
        return (self.words,)

    def read(self, source: GivesRecords) -> Iterator[LabelledWords]:
        return read_words(source, self.words, self.labels, self.weight)

    def feed(self, material: Material) -> Feed:
        rows = {which: list(self.read(source)) for which, source in parts(material)}
        labels = [(label, row.where) for part in rows.values() for row in part for label in row.labels]
        classes = self.classes_for(material, labels)

        def example(row: LabelledWords) -> Arrays:
            labels = [self.number(material, classes, label, row.where) for label in row.labels]
            return self.with_weight(self._example(material, row.words, labels, row.where), row.weight)

        made = {which: list(usable(source, rows[which], example)) for which, source in parts(material)}
        return self.named(row_feed(material, made["training"], made.get("held-out")), classes)

    def _example(self, material: Material, words: list[str], labels: list[int], where: str) -> Arrays:
        joint = shortened(material.text.encode_joint(" ".join(words)), material.recipe.data.seq_len)
        targets = np.full(len(joint.ids), IGNORE, np.int64)
        for place, label in zip(first_tokens(joint, words), labels, strict=True):
            if place is not None:
                targets[place] = label
        return joint_arrays(joint, material.spec, where) | {"targets": targets}


register(
    TextClasses,
    paper="arXiv:1810.04805 §4.1",
    cases=lambda: [TextClasses(), TextClasses(pair="pair", classes=("no", "yes"))],
)
register(TextScores, paper="arXiv:1810.04805 §4.1", cases=lambda: [TextScores(label="score")])
register(WordClasses, paper="arXiv:1810.04805 §5.3", cases=lambda: [WordClasses(), WordClasses(classes=("O", "X"))])

"""Fine-tuning on labelled texts: classes and numbers of texts or pairs, classes of words."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phylon.data.labelled import Classes, LabelledText, class_number, read_texts, read_words, score
from phylon.layers.heads.classify import Classify
from phylon.model import Model, ModelSpec, Output
from phylon.ops.loss import IGNORE, Loss
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.measures import accuracy, f1_of, macro_f1, mean_squared_error, pearson, spearman
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, n_targets, need_head
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

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        need_head(spec, self.head, Classify, self._kind)
        pooled = spec.heads[self.head].per_document
        if pooled != self._per_text:
            want, have = ("a pool", "none") if self._per_text else ("no pool", "one")
            raise UserError(f"{self._kind} needs a head with {want}, and '{self.head}' has {have}; choose another head")

    @property
    def _kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def _per_text(self) -> bool:
        return True

    def scored(self, spec: ModelSpec, batch: Batch) -> dict[str, int]:
        return {self.head: len(batch["tokens"]) if self._per_text else batch["tokens"].numel()}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: n_targets(batch["targets"])}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = model(**inputs(batch), targets={self.head: batch["targets"]}, logits="none")
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
        return {"loss": total / (count or 1.0)} | self.metrics(said, right)

    def targets(self, batch: Batch) -> dict[str, Tensor] | None:
        return {self.head: batch["targets"]}

    def loss_of(self, out: Output, batch: Batch) -> Loss:
        return out.losses[self.head]

    def predicted(self, scores: Tensor) -> Tensor:
        """What the scores (…, C) say, (…)."""
        return scores.argmax(-1)

    def metrics(self, said: list[Any], right: list[Any]) -> Metrics:
        """Accuracy, and the F1 of class 1 where there are two classes, the mean over all of them where more."""
        two = set(said) | set(right) <= {0, 1}
        return {"accuracy": accuracy(said, right), "f1": f1_of(said, right, 1) if two else macro_f1(said, right)}

    def classes_for(self, material: Material, named: tuple[str, ...] | None, labels: Iterable[Any]) -> Classes | None:
        """The classes by name; ``None`` where labels are numbers from 0 already. They must fit the head."""
        head = material.spec.heads[self.head]
        assert isinstance(head, Classify)
        classes = Classes.of(labels) if named is None else Classes(named)
        numbers = all(name.isdigit() for name in classes.names) and named is None
        if not numbers and len(classes) != head.n_classes:
            shown = ", ".join(classes.names[:8]) + (", …" if len(classes) > 8 else "")
            raise UserError(
                f"the data have {len(classes)} classes ({shown}) and the head '{self.head}' {head.n_classes}: "
                f"set its n_classes to {len(classes)}"
            )
        material.say("classes: " + ", ".join(f"{i} {n}" for i, n in enumerate(classes.names) if not numbers))
        return None if numbers else classes

    def named(self, feed: Feed, classes: Classes | None) -> Feed:
        """The feed with the names of the classes."""
        return feed if classes is None else feed._replace(labels={self.head: classes.names})

    def number(self, material: Material, classes: Classes | None, label: Any, where: str) -> int:
        """The number of a label."""
        if classes is not None:
            return classes.number(label, where)
        return class_number(label, material.spec.heads[self.head].n_classes, where)  # type: ignore[attr-defined]


class TextClasses(_Labelled, frozen=True, kw_only=True):
    """Cross-entropy of the class of a text, or of a pair of texts. BERT (arXiv:1810.04805), section 4.1.

    ``text``, ``pair`` and ``label`` name the fields of a record; ``classes`` the classes in order. Left out, they are
    the labels there are, by name; labels that are whole numbers are the numbers of the classes, from 0. Texts are cut
    to ``data.seq_len`` tokens, of a pair the longer one first. Evaluation reports ``accuracy`` and ``f1`` (of class 1
    of two, else the mean over the classes).
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    classes: tuple[str, ...] | None = None

    def split_by(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)

    def feed(self, material: Material) -> Feed:
        rows = {which: list(read_texts(source, self.text, self.pair, self.label)) for which, source in parts(material)}
        classes = self.classes_for(material, self.classes, (row.label for part in rows.values() for row in part))
        made = {
            which: [
                self._example(material, row, np.array(self.number(material, classes, row.label, row.where)))
                for row in part
            ]
            for which, part in rows.items()
        }
        return self.named(row_feed(material, made["training"], made.get("held-out")), classes)

    def _example(self, material: Material, row: LabelledText, target: np.ndarray) -> Arrays:
        most = material.recipe.data.seq_len
        found = text_arrays(material.text, material.spec, row.text, row.pair, most, row.where)
        return found | {"targets": target}


class TextScores(TextClasses, frozen=True, kw_only=True):
    """Squared error of a number said of a text, or of a pair of texts. STS-B in BERT (arXiv:1810.04805), section 4.1.

    The fields are those of ``text_classes``, labels are numbers; the head has one class, whose score is the number.
    Evaluation reports ``mse``, ``pearson`` and ``spearman``.
    """

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        super().check(recipe, spec)
        if spec.heads[self.head].n_classes != 1:  # type: ignore[attr-defined]
            raise UserError(f"text_scores needs a head '{self.head}' with n_classes = 1, one number a text")
        if self.classes is not None:
            raise UserError("text_scores reads numbers; leave classes out")

    def feed(self, material: Material) -> Feed:
        made = {}
        for which, source in parts(material):
            rows = read_texts(source, self.text, self.pair, self.label)
            made[which] = [
                self._example(material, row, np.array(score(row.label, row.where), np.float32)) for row in rows
            ]
        return row_feed(material, made["training"], made.get("held-out"))

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.head: len(batch["targets"])}

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        return {self.head: self.loss_of(model(**inputs(batch)), batch)}

    def targets(self, batch: Batch) -> dict[str, Tensor] | None:
        return None

    def loss_of(self, out: Output, batch: Batch) -> Loss:
        said, right = out.heads[self.head][:, 0].float(), batch["targets"]
        return Loss((said - right).square().sum(), torch.tensor(len(right), device=said.device))

    def predicted(self, scores: Tensor) -> Tensor:
        return scores[:, 0]

    def metrics(self, said: list[Any], right: list[Any]) -> Metrics:
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
    classes: tuple[str, ...] | None = None
    head: str = "token"

    @property
    def _per_text(self) -> bool:
        return False

    def split_by(self) -> tuple[str, ...]:
        return (self.words,)

    def feed(self, material: Material) -> Feed:
        rows = {which: list(read_words(source, self.words, self.labels)) for which, source in parts(material)}
        labels = (label for part in rows.values() for row in part for label in row.labels)
        classes = self.classes_for(material, self.classes, labels)
        made = {
            which: [
                self._example(
                    material, row.words, [self.number(material, classes, y, row.where) for y in row.labels], row.where
                )
                for row in part
            ]
            for which, part in rows.items()
        }
        return self.named(row_feed(material, made["training"], made.get("held-out")), classes)

    def _example(self, material: Material, words: list[str], labels: list[int], where: str) -> Arrays:
        joint = shortened(material.text.encode_joint(" ".join(words)), material.recipe.data.seq_len)
        targets = np.full(len(joint.ids), IGNORE, np.int64)
        start = token = 0
        for word, label in zip(words, labels, strict=True):
            end = start + len(word)
            # A byte-level token may hold the space before its word, so that its span begins with the word or before it.
            while token < len(joint.ids) and (joint.texts[token] is None or joint.spans[token][1] <= start):
                token += 1
            if token < len(joint.ids) and joint.spans[token][0] < end:
                targets[token] = label
                token += 1
            start = end + 1
        return joint_arrays(joint, material.spec, where) | {"targets": targets}


register(
    TextClasses,
    paper="arXiv:1810.04805 §4.1",
    cases=lambda: [TextClasses(), TextClasses(pair="pair", classes=("no", "yes"))],
)
register(TextScores, paper="arXiv:1810.04805 §4.1", cases=lambda: [TextScores(label="score")])
register(WordClasses, paper="arXiv:1810.04805 §5.3", cases=lambda: [WordClasses(), WordClasses(classes=("O", "X"))])

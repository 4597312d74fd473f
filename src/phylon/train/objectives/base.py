"""The slot of training objectives: which data become examples, what a batch is worth, what evaluation reports."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from phylon.account.flops import Pass, flops_of_pass
from phylon.data import Batches, Source, split_documents
from phylon.model import GenerationDefaults, Model, ModelSpec
from phylon.ops.loss import IGNORE, Loss, Targets
from phylon.spec.base import Slot
from phylon.spec.errors import UserError
from phylon.text import Tokenizer

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

Batch = dict[str, Tensor]
Say = Callable[[str], None]
Metrics = dict[str, float]


class Sampler(Protocol):
    """Texts that show what a model has learned; the model is in evaluation mode."""

    def __call__(self, model: Model, /) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Material:
    """What an objective makes its examples from.

    ``training`` and ``held_out`` are what ``split`` gave; ``folder`` keeps what is computed once (tokens);
    ``tokenizer`` is ``None`` only for an objective that reads no text.
    """

    recipe: "Recipe"
    spec: ModelSpec
    tokenizer: Tokenizer | None
    training: Source
    held_out: Source | None
    folder: Path
    say: Say = lambda message: None

    @property
    def text(self) -> Tokenizer:
        """The tokenizer, for those that read text."""
        assert self.tokenizer is not None, "this objective reads no text"
        return self.tokenizer


class Feed(NamedTuple):
    """The batches of a run: training, held-out (``None`` where nothing is held out), and what samples show.

    ``labels``: the names of the classes that the data have, by head, none where these are numbers; the trained model is
    saved with them.
    """

    loader: Batches
    held_out: Callable[[], Iterable[Batch]] | None = None
    sample: Sampler | None = None
    labels: Mapping[str, tuple[str, ...]] = {}


class Objective(Slot):
    """Slot of a training objective. Its life in a run, in order:

    ``check`` before anything is read or written, ``look`` at the first item of the data; ``split``; ``texts`` and
    ``reserved`` where a vocabulary is trained; ``check_vocabulary``; ``feed``; ``begin`` on the new model; then for
    every batch ``counts`` of the whole and ``losses`` of each part; ``after_step``; ``evaluate`` now and then.

    A batch is a dict of tensors whose first dimension is rows, so that it can be cut into parts (micro-batches,
    processes). ``losses`` gives *sums*, ``counts`` what each is divided by, from the whole batch alone: the gradient is
    that of ``sum over terms of weight * sum / count``, whatever the parts. An objective that cannot be cut refuses
    ``run.accumulate`` in ``check``. Everything random in an example is a pure function of (seed, epoch, index).
    """

    counted: ClassVar[str] = "token"
    """What ``n_tokens`` counts."""

    reads_text: ClassVar[bool] = True
    """Whether the data are turned into token ids, which takes a tokenizer."""

    by_tokens: ClassVar[bool] = False
    """Whether a batch has as many rows as its tokens allow, instead of ``run.batch_size``."""

    whole_batch: ClassVar[bool] = False
    """Whether the loss of a batch is not that of its parts: nothing may share it then (see ``check``)."""

    def decodes(self) -> bool:
        """Whether ``evaluate`` writes texts, which takes the whole model where its weights are in shards."""
        return False

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        """Refuse a recipe or a model that this objective cannot train; sizes of the vocabulary are not known yet."""

    def inputs(self, device: str) -> dict[str, str]:
        """What is read in every step beside the data: a name for messages, and a hash of the content."""
        return {}

    def held_bytes(self) -> float:
        """What every process holds for it beside the model while it trains: the weights of another model."""
        return 0.0

    def look(self, source: Source) -> None:
        """Read the first item of the data and refuse what is wrong with it, before anything is computed."""
        if self.reads_text:
            next(iter(self.texts(source)), None)

    def measured(self) -> tuple[str, ...] | None:
        """What ``evaluate`` reports beside ``loss``; ``None`` where only an evaluation can tell."""
        return None

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        """Refuse a vocabulary that lacks what the objective needs."""

    def reserved(self) -> tuple[str, ...]:
        """Tokens that a vocabulary trained for this run must hold beside its own special ones."""
        return ()

    def split(self, source: Source, share: float) -> tuple[Source, Source | None]:
        """The training and the held-out documents; ``None`` where ``feed`` is to hold out a part of the first."""
        return split_documents(source, share) if share else (source, None)

    def texts(self, source: Source) -> Iterator[str]:
        """What a vocabulary is trained on."""
        return (document.text for document in source.documents())

    def feed(self, material: Material) -> Feed:
        """The batches, from the data."""
        raise NotImplementedError

    def generation(self, tokenizer: Tokenizer) -> GenerationDefaults:
        """The special ids that the trained model is saved with."""
        return GenerationDefaults(bos_id=tokenizer.bos_id, eos_ids=tuple(tokenizer.eos_ids), pad_id=tokenizer.pad_id)

    def begin(self, model: Model) -> None:
        """What is done once to a newly built model (never to a resumed one)."""

    def remember(self, model: Model, recipe: "Recipe") -> None:
        """What the model, new or resumed, is to keep of this objective: how what it says is to be read."""

    def counts(self, batch: Batch) -> dict[str, float]:
        """What each term of ``losses`` is divided by, for a whole batch; the first is the main term."""
        raise NotImplementedError

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        """The summed terms of a batch or a part of it; a model in training mode may give more of them."""
        raise NotImplementedError

    def weights(self) -> dict[str, float]:
        """Weights of the terms; 1 where none is given."""
        return {}

    def auxiliary(self) -> tuple[str, ...]:
        """Terms that are trained on but are no part of the loss that is reported."""
        return ()

    def summed(self, losses: Mapping[str, Loss], counts: Mapping[str, float]) -> Tensor:
        """What is differentiated: ``sum over terms of weight * sum * (main count / own count)``.

        The trainer divides by the main count (``divisor``) after the last part.
        """
        weights, divided = self.weights(), divisor(counts)
        factors = [weights.get(name, 1.0) * (divided / (counts[name] or 1.0)) for name in losses]
        terms = [loss.sum if f == 1 else loss.sum * f for f, loss in zip(factors, losses.values(), strict=True)]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def total(self, means: Mapping[str, float]) -> float:
        """The one number that is reported as the loss: the weighted sum of the terms that are not auxiliary."""
        weights, left_out = self.weights(), self.auxiliary()
        return sum(weights.get(name, 1.0) * mean for name, mean in means.items() if name not in left_out)

    def blank(self, batch: Batch) -> Batch:
        """A row like those of the batch that teaches nothing: for a process that no row is left for."""
        return {
            name: torch.full_like(tensor[:1], IGNORE if name.endswith("targets") else 0)
            for name, tensor in batch.items()
        }

    def most_tokens(self, recipe: "Recipe") -> int:
        """At most so many tokens go through each stack for a batch, padding included."""
        return recipe.run.batch_size * recipe.data.seq_len

    def shrunk(self, recipe: "Recipe", rows: int, of: int, processes: int) -> str:
        """How to make a batch smaller whose parts on a process have ``of`` rows and may have ``rows``."""
        run = recipe.run
        parts = -(-run.accumulate * of // rows)
        return f"set run.accumulate={parts} for the same batch, or run.batch_size={rows * run.accumulate * processes}"

    def n_tokens(self, batch: Batch) -> int:
        """How many tokens (or images) a batch holds: real ones, of source and target."""
        return sum(int((batch[name] != 0).sum()) for name in ("segments", "source_segments") if name in batch)

    def passes(self, spec: ModelSpec, batch: Batch) -> list[Pass]:
        """The forward passes that ``losses`` makes of a batch, and what each head is asked for."""
        if "tokens" not in batch:
            return []  # an objective of the user's that does not say
        rows, length = batch["tokens"].shape
        source = batch["source"].shape[1] if "source" in batch else 0
        return [Pass(rows, length, source, self.scored(spec, batch))]

    def scored(self, spec: ModelSpec, batch: Batch) -> dict[str, int]:
        """How many tokens (or documents) each head is asked for; the first one, every token, unless said otherwise."""
        return {name: batch["tokens"].numel() for name in list(spec.heads)[:1]}

    def training_flops(self, spec: ModelSpec, batch: Batch, trained: float = 1.0) -> float:
        """Matrix-product FLOPs of training on a batch: the forward passes, and one or two products backward for each.

        ``trained``: the share of the matrices that take a gradient, which is the second of them. What recomputation
        does once more is no part of it (the convention of PaLM, arXiv:2204.02311, appendix B).
        """
        return (2.0 + trained) * sum(flops_of_pass(spec, shapes) for shapes in self.passes(spec, batch))

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> Metrics:
        """Metrics over held-out batches; ``loss`` is always among them. The model is in evaluation mode."""
        sums: dict[str, list[float]] = {}
        for batch in batches:
            for name, loss in self.measure(model, batch).items():
                found = sums.setdefault(name, [0.0, 0.0])
                found[0], found[1] = found[0] + float(loss.sum), found[1] + float(loss.count)
        means = {name: total / (count or 1.0) for name, (total, count) in sums.items()}
        scored = self.scores()
        loss = self.total({name: mean for name, mean in means.items() if name not in scored})
        return {"loss": loss} | (means if len(means) > 1 else {})

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        """What ``evaluate`` adds up over the batches: the terms, and ``scores`` such as correct answers."""
        return self.losses(model, batch)

    def scores(self) -> tuple[str, ...]:
        """What ``measure`` gives beside the terms of the loss."""
        return ()

    def after_step(self, model: Model) -> None:
        """What the model itself adjusts after an update."""


def divisor(counts: Mapping[str, float]) -> float:
    """The main count, 1 where there is nothing to learn."""
    return next(iter(counts.values())) or 1.0


def n_targets(targets: Tensor) -> int:
    """How many targets are not ignored."""
    return int((targets != IGNORE).sum())


def weighed(batch: Batch, label_smoothing: float = 0.0) -> Tensor | Targets:
    """The ``targets`` of a batch, with its ``weights`` (of the same shape) where it has some."""
    if "weights" not in batch and not label_smoothing:
        return batch["targets"]
    return Targets(batch["targets"], batch.get("weights"), label_smoothing=label_smoothing)


def n_learned(batch: Batch) -> float:
    """What the loss over the ``targets`` of a batch is divided by: how many there are, or the sum of their weights."""
    if "weights" not in batch:
        return n_targets(batch["targets"])
    return float(batch["weights"].double()[batch["targets"] != IGNORE].sum())


def right(guesses: Tensor, targets: Tensor) -> Loss:
    """How many guesses are right, of how many, for ``Objective.measure``; -100 is not asked."""
    asked = targets != IGNORE
    return Loss(((guesses == targets) & asked).sum(), asked.sum())


def need_tokens(tokenizer: Tokenizer, what: str, *names: str) -> None:
    """Refuse a vocabulary without these special tokens, by BERT's and T5's names of their roles."""
    ids = {"[MASK]": tokenizer.mask_id, "[CLS]": tokenizer.cls_id, "[SEP]": tokenizer.sep_id}
    ids |= {"[PAD]": tokenizer.pad_id, "<pad>": tokenizer.pad_id, "</s>": next(iter(tokenizer.eos_ids), None)}
    if lacking := [name for name in names if ids[name] is None]:
        raise UserError(
            f"{what} needs {', '.join(names)}, and this vocabulary has no {', '.join(lacking)}: load one that has, or "
            'train one on the data with data.tokenizer = { kind = "wordpiece" } (or unigram, bpe)'
        )


def need_decoder(spec: ModelSpec, what: str) -> None:
    """Refuse a model that has no decoder, or reads a source."""
    if spec.decoder is None or spec.encoder is not None:
        have = "has no decoder" if spec.decoder is None else "also has an encoder"
        raise UserError(f"{what} trains a decoder alone, and this model {have}; choose another family or objective")


def need_head(spec: ModelSpec, name: str, kind: type, what: str) -> None:
    """Refuse a model without the head an objective trains."""
    if not isinstance(spec.heads.get(name), kind):
        have = ", ".join(spec.heads) or "none"
        raise UserError(
            f"{what} needs a head '{name}' ({kind.__name__}); this model has {have}: "
            f'set model.heads, for example heads = ["{name}"]'
        )


def check_length(spec: ModelSpec, length: int, name: str = "data.seq_len") -> None:
    """Refuse rows that are longer than the model's texts can be."""
    longest = spec.max_seq_len
    if longest is not None and length > longest:
        raise UserError(f"{name} {length} is more than the model's max_seq_len {longest}; change one of them")

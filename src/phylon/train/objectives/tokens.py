"""What objectives over tokens share: the routers' terms of models with experts, and the tokenised data."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.data import Example, Examples, Source, TokenStore, split_documents, tokenise
from phylon.layers.ffn.routers import GroupedSigmoidRouterModule
from phylon.model import Model, Output
from phylon.ops.loss import IGNORE, Loss
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.train.objectives.base import Batch, Material, Objective

# Below this many documents whole ones make a poor held-out part, and the end of the text is held out instead.
FEW_DOCUMENTS = 50
EVAL_BATCH_ROWS = 16
NO_WEIGHTS = "these data weigh their tokens, which next_token alone learns by; leave the weights out"


class TokenObjective(Mechanism, Objective, frozen=True, kw_only=True):
    """Fields of every objective over tokens: how much the routers of experts count, which other models have not.

    ``balance`` and ``z_loss`` weigh the routers' terms (``MoE`` defines them), summed over the blocks, the first a mean
    over the batch's rows, the second over the real tokens of the stack: Switch (arXiv:2101.03961), equation 4, weight
    0.01; ST-MoE (arXiv:2202.08906), equation 5, weight 0.001. ``bias_rate`` moves selection-only biases after every
    update: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, 0.001.
    """

    balance: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def split(self, source: Source, share: float) -> tuple[Source, Source | None]:
        """By documents; the whole source where they are too few to be split."""
        many = len(list(itertools.islice(source.documents(), FEW_DOCUMENTS))) == FEW_DOCUMENTS if share else False
        return split_documents(source, share) if many else (source, None)

    def weights(self) -> dict[str, float]:
        both = {"balance": self.balance, "z_loss": self.z_loss}
        return {f"{stack}.{name}": weight for name, weight in both.items() for stack in STACKS}

    def auxiliary(self) -> tuple[str, ...]:
        return tuple(f"{stack}.{name}" for name in ("balance", "z_loss") for stack in STACKS)

    def router_counts(self, batch: Batch) -> dict[str, float]:
        """Rows (``balance``) and real tokens (``z_loss``) of what each stack reads."""
        if not (self.balance or self.z_loss):
            return {}
        found: dict[str, float] = {}
        for stack, segments in _read_by(batch).items():
            real = segments != 0
            found |= {f"{stack}.balance": int(real.any(1).sum()), f"{stack}.z_loss": int(real.sum())}
        return found

    def router_terms(self, model: Model, out: Output) -> dict[str, Loss]:
        """The routers' terms of a training pass, summed over the blocks of each stack; none in evaluation."""
        if not (model.training and (self.balance or self.z_loss)):
            return {}
        found: dict[str, Loss] = {}
        for name, weight in self.weights().items():
            stack, kind = name.split(".")
            terms = [v for path, v in out.aux.items() if path.startswith(f"{stack}.") and path.endswith(f".{kind}")]
            if weight and terms:
                found[name] = Loss(torch.stack([term.sum for term in terms]).sum(), terms[0].count)
        return found

    def run(self, model: Model, batch: Batch) -> Output:
        """The forward pass over a batch, with its losses and without scores."""
        raise NotImplementedError

    def asked(self, batch: Batch) -> tuple[str | None, Tensor]:
        """The head (``None``: the first) whose tokens are learned, and its targets (B, T)."""
        return None, batch["targets"]

    def token_scores(self, model: Model, out: Output, batch: Batch) -> Tensor:
        """The scores (N, V) of the N tokens that are asked for, row by row."""
        name, targets = self.asked(batch)
        head = next(iter(model.heads.values())) if name is None else model.heads[name]
        return head(out.hidden[targets != IGNORE], None)

    def after_step(self, model: Model) -> None:
        if self.bias_rate:
            for module in model.modules():
                if isinstance(module, GroupedSigmoidRouterModule):
                    module.update_bias(self.bias_rate)


STACKS = ("decoder", "encoder")


def _read_by(batch: Batch) -> dict[str, Tensor]:
    """The segments of what each stack reads; without a source it is the same, whichever the model has."""
    return {"decoder": batch["segments"], "encoder": batch.get("source_segments", batch["segments"])}


def token_stores(
    material: Material, row: int, end: tuple[int, ...] | None = None, *, weighs: bool = False
) -> tuple[TokenStore, TokenStore | None]:
    """The training and the held-out tokens, kept in ``material.folder``; rows take ``row`` tokens.

    ``weighs``: the objective counts tokens by their weights; for another one documents with weights are refused.
    """
    data = material.recipe.data
    material.say("tokenising the data")
    store = tokenise(material.training, material.text, material.folder, end=end)
    held = material.held_out
    held = None if held is None else tokenise(held, material.text, material.folder, end=end)
    if not weighs:
        for part in (store, held):
            refuse_weights(part)
    if held is None and data.held_out:
        store, held = _cut(store, row, data.held_out)
    material.say(
        f"{store.n_tokens:,} tokens in {store.n_documents:,} documents, vocabulary {material.text.vocab_size:,}"
    )
    return store, held


def look_at_weights(source: Source) -> None:
    """``refuse_weights``, as far as the first document tells."""
    first = next(iter(source.documents()), None)
    if first is not None and first.weights:
        raise UserError(NO_WEIGHTS)


def refuse_weights(store: TokenStore | None) -> None:
    """For an objective that draws its targets itself, and has no weights for them."""
    if store is not None and store.weights is not None:
        raise UserError(NO_WEIGHTS)


def _cut(store: TokenStore, row: int, share: float) -> tuple[TokenStore, TokenStore]:
    """Hold out the end of the tokens: at least one row, and at least one row stays."""
    held = max(row, int(store.n_tokens * share))
    if store.n_tokens - held < row:
        raise UserError(
            f"the data has {store.n_tokens} tokens, too few to hold out {held} and train on rows of {row}; "
            "set data.held_out=0, lower data.seq_len, or give more text"
        )
    return store.slice(0, store.n_tokens - held), store.slice(store.n_tokens - held, store.n_tokens)


def held_out_batches(
    examples: Examples | None, material: Material, batches: Callable[[Examples, int], Iterator[Batch]]
) -> Callable[[], Iterable[Batch]] | None:
    """Held-out examples in batches; at most ``run.eval_rows`` of them, spread evenly."""
    if examples is None:
        return None
    wanted = material.recipe.run.eval_rows
    chosen = examples if wanted is None or wanted >= len(examples) else Spread(examples, wanted)
    return lambda: batches(chosen, min(EVAL_BATCH_ROWS, len(chosen)))


def hold_out_end(examples: Examples, share: float) -> tuple[Examples, Examples]:
    """The last ``share`` of the examples, at least one, held out; at least one stays."""
    held = max(1, int(len(examples) * share))
    if held >= len(examples):
        raise UserError(
            f"the data give {len(examples)} rows, too few to hold out {held} of them and train on the rest; "
            "set data.held_out=0, lower data.seq_len, or give more text"
        )
    left = len(examples) - held
    return Section(examples, 0, left), Section(examples, left, len(examples))


@dataclass(frozen=True, slots=True)
class Section:
    """The examples from ``start`` to ``stop``."""

    examples: Examples
    start: int
    stop: int

    @property
    def fingerprint(self) -> str:
        return f"{self.examples.fingerprint}-{self.start}-{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start

    def example(self, index: int, epoch: int) -> Example:
        return self.examples.example(self.start + index, epoch)


@dataclass(frozen=True, slots=True)
class Spread:
    """``count`` of the examples at equal distances."""

    examples: Examples
    count: int

    @property
    def fingerprint(self) -> str:
        return f"{self.examples.fingerprint}-{self.count}"

    def __len__(self) -> int:
        return self.count

    def example(self, index: int, epoch: int) -> Example:
        return self.examples.example(index * len(self.examples) // self.count, epoch)

"""A small model learns from a large one: the teacher's probabilities beside the labels."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from phylon import hub
from phylon.account.flops import Pass, flops_of_pass
from phylon.data import Source
from phylon.data.documents import digest
from phylon.model import GenerationDefaults, Model, ModelSpec, Output, build_meta
from phylon.ops.loss import IGNORE, Loss
from phylon.spec import to_data
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer
from phylon.train.batches import hash_of
from phylon.train.checkpoint import model_tensors
from phylon.train.objectives.base import Batch, Feed, Material, Objective, n_learned
from phylon.train.objectives.denoising import Denoising
from phylon.train.objectives.next_token import NextToken
from phylon.train.objectives.tokens import TokenObjective

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

SOFT = "soft"


class Distillation(Mechanism, Objective, frozen=True, kw_only=True):
    """``(1 - soft) CE(labels) + soft T^2 KL(teacher || student)`` over the tokens that ``task`` asks for.

    Hinton et al. (arXiv:1503.02531), section 2, with ``temperature`` T on both sides; Switch Transformers
    (arXiv:2101.03961), section 4.2 and table 6: a sparse teacher, a dense student that starts with the teacher's
    weights wherever it has the same parameter (all but the experts'), 0.25 of the teacher's probabilities and 0.75 of
    the labels, T = 1. ``teacher`` is a folder, file or known name with the student's vocabulary. ``start``: with the
    teacher's weights, or drawn from the seed. ``task`` makes the batches; its routers' terms are those of the student.
    """

    teacher: str
    task: Objective = Denoising()
    soft: float = 0.25
    temperature: float = 1.0
    start: Literal["teacher", "seed"] = "teacher"

    def __post_init__(self) -> None:
        if not 0 <= self.soft <= 1:
            raise UserError(f"soft is the teacher's share of the loss, from 0 to 1; got {self.soft}")
        if not 0.01 <= self.temperature <= 1000:
            raise UserError(f"temperature must lie between 0.01 and 1000, got {self.temperature}")
        if not isinstance(self.task, TokenObjective) or type(self.task).run is TokenObjective.run:
            raise UserError("distillation learns tokens: take next_token, masked_language, denoising or text_to_text")

    @property
    def inner(self) -> TokenObjective:
        """The task whose tokens are learned."""
        assert isinstance(self.task, TokenObjective)
        return self.task

    def check(self, recipe: "Recipe", spec: ModelSpec) -> None:
        self.task.check(recipe, spec)
        for cached in (
            teacher_of,
            _teacher_spec,
            _teacher_bytes,
        ):  # by an earlier run of this process: it may be another one since
            cached.cache_clear()
        found = hub.describe(self.teacher).spec
        for name in ("encoder", "decoder"):
            if (getattr(found, name) is None) != (getattr(spec, name) is None):
                raise UserError(f"the teacher '{self.teacher}' and the student do not both have an {name}")

    def check_vocabulary(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self.task.check_vocabulary(spec, tokenizer)
        theirs = hub.load_tokenizer_of(self.teacher)
        if theirs is not None and theirs.backend.get_vocab() != tokenizer.backend.get_vocab():
            raise UserError(
                f'teacher and student must share one vocabulary: set data.tokenizer = {{ kind = "load", '
                f'path = "{Path(self.teacher).as_posix()}" }}'
            )
        head = next(iter(hub.describe(self.teacher).spec.heads.values()), None)
        room, own = getattr(head, "vocab_size", None), getattr(next(iter(spec.heads.values())), "vocab_size", None)
        if room != own:
            raise UserError(f"the teacher scores {room} tokens and the student {own}: set model.vocab_size to {room}")

    def inputs(self, device: str) -> dict[str, str]:
        teacher = teacher_of(self.teacher, device)
        content = f"{digest(to_data(teacher.spec))}-{hash_of([model_tensors(teacher)])}"
        return self.task.inputs(device) | {f"the teacher '{self.teacher}'": content}

    def held_bytes(self) -> float:
        return _teacher_bytes(self.teacher)

    def look(self, source: Source) -> None:
        self.task.look(source)

    def measured(self) -> tuple[str, ...] | None:
        theirs = self.task.measured()
        # With the teacher's term there are two, so that the task's own is named as well.
        return None if theirs is None else tuple(dict.fromkeys((*(theirs or ("lm",)), SOFT)))

    def reserved(self) -> tuple[str, ...]:
        return self.task.reserved()

    def split(self, source: Source, share: float) -> tuple[Source, Source | None]:
        return self.task.split(source, share)

    def texts(self, source: Source) -> Iterator[str]:
        return self.task.texts(source)

    def feed(self, material: Material) -> Feed:
        return self.task.feed(material)

    def generation(self, tokenizer: Tokenizer) -> GenerationDefaults:
        return self.task.generation(tokenizer)

    def begin(self, model: Model) -> None:
        self.task.begin(model)
        if self.start == "teacher":
            start_from(model, teacher_of(self.teacher, str(model.device)))

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = self.task.counts(batch)
        return counts | {SOFT: n_learned(batch) if "weights" in batch else self._asked(batch)}

    def weights(self) -> dict[str, float]:
        return self.task.weights() | {"lm": 1 - self.soft, "mlm": 1 - self.soft, SOFT: self.soft}

    def auxiliary(self) -> tuple[str, ...]:
        return self.task.auxiliary()

    def losses(self, model: Model, batch: Batch) -> dict[str, Loss]:
        out = self.inner.run(model, batch)
        return _named(out) | {SOFT: self._soft(model, out, batch)} | self.inner.router_terms(model, out)

    def measure(self, model: Model, batch: Batch) -> dict[str, Loss]:
        found = self.task.measure(model, batch)
        return found | {SOFT: self._soft(model, self.inner.run(model, batch), batch)}

    def scores(self) -> tuple[str, ...]:
        return self.task.scores()

    def most_tokens(self, recipe: "Recipe") -> int:
        return self.task.most_tokens(recipe)

    def n_tokens(self, batch: Batch) -> int:
        return self.task.n_tokens(batch)

    def passes(self, spec: ModelSpec, batch: Batch) -> list[Pass]:
        """The task's, whose head scores the tokens that are asked for twice: for the labels and for the teacher's."""
        head = next(iter(spec.heads))
        return [
            shapes._replace(scored={**shapes.scored, head: shapes.scored[head] + self._asked(batch)})
            for shapes in self.task.passes(spec, batch)
        ]

    def training_flops(self, spec: ModelSpec, batch: Batch, trained: float = 1.0) -> float:
        teacher = _teacher_spec(self.teacher)
        taught = {next(iter(teacher.heads)): self._asked(batch)}
        theirs = [shapes._replace(scored=taught) for shapes in self.task.passes(spec, batch)]
        return super().training_flops(spec, batch, trained) + sum(flops_of_pass(teacher, shapes) for shapes in theirs)

    def _asked(self, batch: Batch) -> int:
        return int((self.inner.asked(batch)[1] != IGNORE).sum())

    def after_step(self, model: Model) -> None:
        self.task.after_step(model)

    def _soft(self, model: Model, out: Output, batch: Batch) -> Loss:
        """``T^2 KL`` summed over the tokens that are asked for, in fp32."""
        teacher = teacher_of(self.teacher, str(model.device))
        with torch.no_grad():
            wanted = self.inner.token_scores(teacher, self.inner.run(teacher, batch), batch).float()
        said = self.inner.token_scores(model, out, batch).float()
        weights = batch["weights"][self.inner.asked(batch)[1] != IGNORE] if "weights" in batch else None
        return soft_loss(said, wanted, self.temperature, weights)


def soft_loss(student: Tensor, teacher: Tensor, temperature: float, weights: Tensor | None = None) -> Loss:
    """``T^2 sum over rows of KL(softmax(teacher / T) || softmax(student / T))`` of scores (N, V), and N.

    With ``weights`` (N,) each row counts so much, in the sum and in the number.
    Hinton et al. (arXiv:1503.02531), section 2: the factor keeps the size of the gradients when T changes.
    """
    wanted = torch.log_softmax(teacher / temperature, dim=-1)
    said = torch.log_softmax(student / temperature, dim=-1)
    if weights is not None:
        each = torch.nn.functional.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
        return Loss((each * weights).sum() * temperature**2, weights.sum())
    total = torch.nn.functional.kl_div(said, wanted, reduction="sum", log_target=True)
    return Loss(total * temperature**2, torch.tensor(len(student), device=student.device))


@lru_cache(maxsize=1)
def _teacher_spec(name: str) -> ModelSpec:
    return hub.describe(name).spec


@lru_cache(maxsize=1)
def _teacher_bytes(name: str) -> float:
    return 4.0 * sum(p.numel() for p in build_meta(_teacher_spec(name)).parameters())


@lru_cache(maxsize=1)
def teacher_of(name: str, device: str) -> Model:
    """The teacher, loaded once a run, without gradients, in evaluation mode."""
    model = hub.load(name, device=device, dtype="float32")
    model.requires_grad_(False)
    return model.eval()


def start_from(student: Model, teacher: Model) -> list[str]:
    """Copy every parameter that the student has under the same name and in the same shape; the names copied."""
    theirs, copied = model_tensors(teacher), []
    with torch.no_grad():
        for name, tensor in model_tensors(student).items():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
                copied.append(name)
    if not copied:
        raise UserError(
            "the student shares no parameter with its teacher, so it cannot start from it: give it the teacher's "
            'sizes (d_model, n_heads, d_ff), or set objective.start = "seed"'
        )
    return copied


def _named(out: Output) -> dict[str, Loss]:
    """The task's own terms of a pass, by their names."""
    if "mlm" in out.losses:
        return dict(out.losses)
    return {"lm": next(iter(out.losses.values()))}


register(
    Distillation,
    paper="arXiv:1503.02531 §2, arXiv:2101.03961 §4.2",
    cases=lambda: [
        Distillation(teacher="runs/switch/model"),
        Distillation(teacher="gpt2", task=NextToken(), soft=0.5, temperature=2.0, start="seed"),
    ],
)

"""Task heads on a family's language model, and the bare model: described once for all families.

The architecture that a configuration names says which head a checkpoint has. A family's own format says its language
model (T5: its bare stacks); a `Task` says what another architecture puts in the head's place, and what its files call
that. Classes of a whole text are read at its last real token, found by position.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from phylon.checkpoint import Layout, Rename
from phylon.families.base import Config, HFFormat
from phylon.families.decoder import embed_of
from phylon.families.encoder import labels, n_classes_of
from phylon.layers.heads.classify import Classify, Span
from phylon.layers.heads.lm import LMHead
from phylon.layers.heads.pools import Last
from phylon.model.spec import ModelSpec
from phylon.spec.base import Head
from phylon.spec.errors import UserError, did_you_mean

_DROPOUT = "classifier_dropout"


def no_head(n_classes: int, dropout: float) -> dict[str, Head]:
    """The bare model."""
    return {}


def of_texts(n_classes: int, dropout: float) -> dict[str, Head]:
    """Classes of a whole text."""
    return {"class": Classify(n_classes=n_classes, pool=Last(), bias=False)}


def of_tokens(n_classes: int, dropout: float) -> dict[str, Head]:
    """Classes of every token."""
    return {"token": Classify(n_classes=n_classes, dropout=dropout)}


def of_spans(n_classes: int, dropout: float) -> dict[str, Head]:
    """Start and end of an answer."""
    return {"span": Span()}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One architecture: ``heads`` of a number of classes and a dropout; ``maps`` are their names of its parameters.

    ``architecture`` is what the family's own format calls the model without this head. Its names there begin with the
    first of ``prefix``, in the files of this architecture with the second. ``dropout``: the default of the head's own,
    ``None`` where it has none.
    """

    architecture: str
    prefix: tuple[str, str]
    heads: Callable[[int, float], dict[str, Head]]
    maps: Mapping[str, str] = field(default_factory=dict)
    dropout: float | None = None

    def says(self, spec: ModelSpec) -> bool:
        """Whether the heads of ``spec`` are these."""
        n_classes, dropout = _numbers(spec)
        return dict(spec.heads) == self.heads(n_classes, dropout)

    def read(self, config: Config, fmt: HFFormat) -> ModelSpec:
        n_classes, dropout = 2, 0.0
        if any(isinstance(head, Classify) for head in self.heads(n_classes, dropout).values()):
            n_classes = n_classes_of(config, self.heads(n_classes, dropout))
            # The reference falls back on the dropout of the blocks, where it is called so.
            rates = [config.take(_DROPOUT, None, (int, float))]
            rates += [config.take("hidden_dropout", None, (int, float))] if self.dropout else []
            dropout = float(next((rate for rate in rates if rate is not None), self.dropout or 0.0))
        heads = self.heads(n_classes, dropout)
        spec = fmt.read(config.but({"architectures": [self.architecture]}, without=(_DROPOUT,)))
        return spec.replace(heads=heads, ties=tuple(tie for tie in spec.ties if not tie.name.startswith("heads.")))

    def write(self, name: str, spec: ModelSpec, written: dict[str, Any]) -> dict[str, Any]:
        dropout = {} if self.dropout is None else {_DROPOUT: _numbers(spec)[1]}
        # Without a head there is nothing to tie: the file is silent, which the reference takes for its default.
        said = {
            key: value
            for key, value in written.items()
            if spec.encoder or (key, value) != ("tie_word_embeddings", False)
        }
        return {**said, "architectures": [name], **labels(spec), **dropout}

    def layout(self, inner: Layout) -> Layout:
        there, here = self.prefix
        own = [Rename(theirs, ours) for ours, theirs in self.maps.items()]
        return inner.without_heads(lambda name: here + name.removeprefix(there), own)


def _numbers(spec: ModelSpec) -> tuple[int, float]:
    found = [head for head in spec.heads.values() if isinstance(head, Classify)]
    return (found[0].n_classes, found[0].dropout) if found else (2, 0.0)


def with_tasks(
    fmt: HFFormat,
    tasks: Mapping[str, Task],
    inner: Callable[[ModelSpec], ModelSpec],
    fits: Callable[[Task, ModelSpec], bool] = lambda task, spec: True,
    known: tuple[str, ...] = (),
) -> HFFormat:
    """The format ``fmt`` with more architectures.

    ``inner``: what ``fmt`` can say in the place of a spec with the heads of a task. ``fits``: what must hold beside the
    heads. ``known``: the architectures of ``fmt`` itself, where it does not look at them.
    """

    def of(spec: ModelSpec) -> tuple[str, Task] | None:
        return next(((name, task) for name, task in tasks.items() if task.says(spec) and fits(task, spec)), None)

    def read(config: Config) -> ModelSpec:
        named = config.take("architectures", None, list) or [""]
        name = str(named[0])
        if name in tasks:
            return tasks[name].read(config, fmt)
        # Descendants under names of their own (YiForCausalLM, and LLaMA's model_type) are the language model too.
        if name and known and not name.endswith(("ForCausalLM", "LMHeadModel")):
            every = (*known, *tasks)
            raise UserError(f"{config.where}: the architecture '{name}' is not supported{did_you_mean(name, every)}")
        return fmt.read(config)

    def write(spec: ModelSpec) -> dict[str, Any]:
        found = of(spec)
        return fmt.write(spec) if found is None else found[1].write(found[0], spec, fmt.write(inner(spec)))

    def layout(spec: ModelSpec) -> Layout:
        found = of(spec)
        return fmt.layout(spec) if found is None else found[1].layout(fmt.layout(inner(spec)))

    def departs(spec: ModelSpec) -> str | None:
        return fmt.departs(spec if of(spec) is None else inner(spec))

    return replace(fmt, read=read, write=write, layout=layout, departs=departs)


def bare_format(
    fmt: HFFormat, name: str, language_model: str, *, base: str, inner: Callable[[ModelSpec], ModelSpec]
) -> HFFormat:
    """The format of ``language_model``, and ``name``: the same without its head, whose tensors lack ``base``."""
    return with_tasks(fmt, {name: Task(architecture=language_model, prefix=(base, ""), heads=no_head)}, inner)


def decoder_format(
    fmt: HFFormat,
    stem: str,
    *,
    base: str = "model.",
    language_model: str = "ForCausalLM",
    token: str | None = "score",
    span: str | None = "",
    text: bool = True,
) -> HFFormat:
    """The format of a decoder's language model, and the architectures that the reference has beside it.

    ``stem`` begins their names (LlamaModel), ``base`` those of the bare model's tensors. ``token``: what the map to the
    classes of a token is called, ``None`` where there is no such class; ``span``: the prefix of the bare model under
    the head of answers if it is not ``base``, ``None`` where there is none; ``text``: whether texts have classes.
    """
    make = partial(Task, architecture=stem + language_model)
    tasks = {f"{stem}Model": make(prefix=(base, ""), heads=no_head)}
    if text:
        tasks[f"{stem}ForSequenceClassification"] = make(
            prefix=(base, base), heads=of_texts, maps={"heads.class.proj.{p}": "score.{p}"}
        )
    if token is not None:
        maps = {"heads.token.proj.{p}": token + ".{p}"}
        tasks[f"{stem}ForTokenClassification"] = make(prefix=(base, base), heads=of_tokens, maps=maps, dropout=0.1)
    if span is not None:
        maps = {"heads.span.proj.{p}": "qa_outputs.{p}"}
        tasks[f"{stem}ForQuestionAnswering"] = make(prefix=(base, span or base), heads=of_spans, maps=maps)
    return with_tasks(fmt, tasks, _with_lm, known=(stem + language_model,))


def _with_lm(spec: ModelSpec) -> ModelSpec:
    if spec.decoder is None or spec.encoder is not None:
        raise UserError("this format holds decoder-only models")
    return spec.replace(heads={"lm": LMHead(vocab_size=embed_of(spec.decoder).vocab_size)}, ties=())

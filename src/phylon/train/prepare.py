"""From a recipe to what the loop needs: tokenizer, batches, model."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from phylon.data import DataSource, Document, PythonCorpus, Record, Source
from phylon.model import Model, ModelSpec, build, build_meta, resolve_device
from phylon.spec.errors import UserError
from phylon.text import Tokenizer, load_tokenizer
from phylon.train.final import check_kept
from phylon.train.machine import check_threads, resolve_precision
from phylon.train.objectives.base import Feed, Material, Say
from phylon.train.parallel import check_parallel
from phylon.train.pretrained import apply_tune, check_tune, load_start, start_tokenizer
from phylon.train.recipe import DataRecipe, Recipe, model_family, model_spec
from phylon.train.vocabulary import Loaded
from phylon.train.world import launched

PROVISIONAL_VOCAB = 256  # stands for the tokenizer's size until there is one


class Prepared(NamedTuple):
    """Everything a trainer is made from; ``tokenizer`` is ``None`` where no text is read."""

    tokenizer: Tokenizer | None
    feed: Feed
    model: Model


def check(recipe: Recipe, source: Source | None, device: str) -> Source:
    """Find what is wrong with a recipe before anything is written or computed; the source of its data.

    Where the vocabulary is still to be made from the data, sizes that depend on it are checked again later.
    """
    resolve_precision(recipe.run.precision, resolve_device(device))
    check_threads(recipe.run.threads)
    check_parallel(recipe, launched().size)
    check_kept(recipe)
    model_spec(recipe, PROVISIONAL_VOCAB if recipe.objective.reads_text else None)  # before a file of it is read
    tokenizer = _known_tokenizer(recipe)
    spec = model_spec(recipe, _expected_vocabulary(recipe, tokenizer))
    check_tune(build_meta(spec), recipe.tune)
    shape = build_meta(spec)
    apply_tune(shape, recipe.tune)
    recipe.optim.check(shape.named_parameters())
    recipe.objective.check(recipe, spec)
    if tokenizer is not None:
        check_vocabulary(spec, tokenizer.vocab_size)
        recipe.objective.check_vocabulary(spec, tokenizer)
    elif recipe.objective.reads_text:
        check_vocabulary(spec, getattr(recipe.data.tokenizer, "vocab_size", 0))
    source = recipe_source(recipe.data) if source is None else source
    recipe.objective.look(source)
    return source


def _known_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer, where it is there before the data are read."""
    wanted = recipe.data.tokenizer
    if not recipe.objective.reads_text:
        return None
    if isinstance(wanted, Loaded):
        return wanted.make(lambda: iter(()))
    return start_tokenizer(recipe.model) if "from" in recipe.model else None


def _expected_vocabulary(recipe: Recipe, tokenizer: Tokenizer | None) -> int | None:
    if not recipe.objective.reads_text:
        return None
    if tokenizer is not None:
        return tokenizer.vocab_size
    return getattr(recipe.data.tokenizer, "vocab_size", PROVISIONAL_VOCAB)


def prepare(
    recipe: Recipe,
    out: Path,
    source: Source,
    device: str,
    say: Say,
    made: Callable[[Tokenizer], None],
    *,
    resume: bool,
    kept: bool,
) -> Prepared:
    """Make the tokenizer (kept in ``out/tokenizer``), the batches (kept in ``out/data``), build the model.

    ``made`` sees the tokenizer before the data are tokenised. ``kept``: the run's folder has it already. A resumed
    model is not begun again.
    """
    ready = prepare_feed(recipe, out, source, say, made, kept=kept)
    model = _model(recipe, ready.spec, ready.tokenizer, device, say, resume=resume)
    model.labels = {head: names for head, names in {**model.labels, **ready.feed.labels}.items() if names}
    return Prepared(ready.tokenizer, ready.feed, model)


class Ready(NamedTuple):
    """What is there before the model is made; its ``spec`` fits the tokenizer."""

    tokenizer: Tokenizer | None
    spec: ModelSpec
    feed: Feed


def prepare_feed(
    recipe: Recipe, out: Path, source: Source, say: Say, made: Callable[[Tokenizer], None], *, kept: bool
) -> Ready:
    """The tokenizer and the batches of ``prepare``."""
    objective = recipe.objective
    training, held = objective.split(source, recipe.data.held_out)
    tokenizer = None
    if objective.reads_text:
        folder = out / "tokenizer"
        tokenizer = _own_tokenizer(folder) if kept else _tokenizer(recipe, training, folder, say)
        made(tokenizer)
    spec = model_spec(recipe, None if tokenizer is None else tokenizer.vocab_size)
    if tokenizer is not None:
        check_vocabulary(spec, tokenizer.vocab_size)
        objective.check_vocabulary(spec, tokenizer)
    material = Material(
        recipe=recipe,
        spec=spec,
        tokenizer=tokenizer,
        training=training,
        held_out=held,
        folder=out / "data",
        say=say,
    )
    return Ready(tokenizer, spec, objective.feed(material))


def recipe_source(data: DataRecipe) -> Source:
    """The source a recipe names."""
    if isinstance(data.source, PythonCorpus) and data.source.max_bytes is None:
        return data.source.replace(max_bytes=data.max_bytes)
    return data.source if data.max_bytes is None else Limited(data.source, data.max_bytes)


def check_vocabulary(spec: ModelSpec, size: int) -> None:
    """Refuse a vocabulary of ``size`` entries that the model has no room for."""
    for stack in spec.stacks.values():
        room = getattr(stack.embed, "vocab_size", None)
        if room is not None and size > room:
            raise UserError(
                f"the tokenizer has {size} entries and the model {room}: set model.vocab_size to at least {size}, or "
                f"data.tokenizer to a smaller one (data.tokenizer.vocab_size={room})"
            )


class Limited:
    """The documents (or records) of a source before the first that would pass ``max_bytes``."""

    def __init__(self, source: DataSource, max_bytes: int) -> None:
        self.source, self.max_bytes = source, max_bytes

    def documents(self) -> Iterator[Document]:
        return self._within(self.source.documents(), lambda document: len(document.text.encode()))

    def records(self) -> Iterator[Record]:
        return self._within(self.source.records(), lambda record: sum(map(_size, record.fields.values())))

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{self.max_bytes}"

    def files(self) -> list[tuple[str, Path]]:
        return self.source.files()

    def _within(self, items: Iterator, size: Callable[..., int]) -> Iterator:
        left = self.max_bytes
        for index, item in enumerate(items):
            left -= size(item)
            if left < 0:
                if index == 0:
                    raise UserError(f"data.max_bytes {self.max_bytes} is below the size of the first document")
                return
            yield item


class Sample(Limited):
    """A small part of a source to look at: of a first document beyond ``max_bytes`` its beginning."""

    def documents(self) -> Iterator[Document]:
        first = next(iter(self.source.documents()))
        if len(first.text.encode()) <= self.max_bytes:
            yield from super().documents()
            return
        left = self.max_bytes // 4  # characters: none is longer than four bytes
        ends = accumulate(length for length, _ in first.weights)
        weights = [(min(length, left - end + length), w) for (length, w), end in zip(first.weights, ends, strict=True)]
        yield Document(first.text[:left], first.name, tuple(part for part in weights if part[0] > 0))

    def records(self) -> Iterator[Record]:
        first = next(iter(self.source.records()))
        large = sum(map(_size, first.fields.values())) > self.max_bytes
        yield from [first] if large else super().records()


def _size(value: object) -> int:
    return len(value.encode()) if isinstance(value, str) else 8


def _model(
    recipe: Recipe, spec: ModelSpec, tokenizer: Tokenizer | None, device: str, say: Say, *, resume: bool
) -> Model:
    """A new model, or the one to go on from, with what the recipe's ``[tune]`` says about it."""
    if "from" in recipe.model:
        say(f"loading '{recipe.model['from']}'")
        model = load_start(recipe.model, spec, recipe.run.seed, device)
    else:
        model = build(spec, seed=recipe.run.seed, device=device)
        model.family = model_family(recipe)
        if tokenizer is not None:
            model.generation = recipe.objective.generation(tokenizer)
    if tokenizer is not None:
        model.tokenizer = tokenizer
    if not resume:
        recipe.objective.begin(model)
    recipe.objective.remember(model, recipe)
    apply_tune(model, recipe.tune)
    return model


def _own_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that the run has been trained with."""
    try:
        return load_tokenizer(folder)
    except UserError as error:
        raise UserError(f"{error}; put this run's own '{folder}' back, or --fresh begins again") from None


def _tokenizer(recipe: Recipe, source: Source, folder: Path, say: Say) -> Tokenizer:
    wanted, objective = recipe.data.tokenizer, recipe.objective
    if "from" in recipe.model and not isinstance(wanted, Loaded):
        tokenizer = start_tokenizer(recipe.model)
    else:
        say("making the tokenizer")
        tokenizer = wanted.make(lambda: objective.texts(source), objective.reserved())
    tokenizer.save(folder)
    return tokenizer

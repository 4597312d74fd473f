"""From a recipe to what the loop needs: tokenizer, training rows, held-out rows, model."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from phylon.data import (
    Loader,
    PackedRows,
    PythonCorpus,
    Source,
    Texts,
    TokenStore,
    evaluation_batches,
    open_source,
    split_documents,
    tokenise,
)
from phylon.model import GenerationDefaults, Model, ModelSpec, build, build_meta, resolve_device
from phylon.spec.errors import UserError
from phylon.text import Tokenizer, load_tokenizer
from phylon.train.machine import check_threads
from phylon.train.objective import Batch
from phylon.train.pretrained import apply_tune, check_tune, load_start, start_tokenizer
from phylon.train.recipe import DataRecipe, InlineTexts, Recipe, model_spec
from phylon.train.vocabulary import Loaded

# Below this many documents whole ones make a poor held-out part, and the end of the text is held out instead.
FEW_DOCUMENTS = 50
EVAL_BATCH_ROWS = 16
PROVISIONAL_VOCAB = 256  # stands for the tokenizer's size until there is one

Say = Callable[[str], None]


class Prepared(NamedTuple):
    """Everything a trainer is made from. ``held_out`` is ``None`` where nothing is held out."""

    tokenizer: Tokenizer
    loader: Loader
    held_out: Callable[[], Iterable[Batch]] | None
    model: Model


def check(recipe: Recipe, source: Source | None, device: str) -> Source:
    """Find what is wrong with a recipe before anything is written or computed; the source of its texts.

    The vocabulary is not known yet, so sizes that depend on it are checked again later.
    """
    resolve_device(device)
    check_threads(recipe.run.threads)
    spec = model_spec(recipe, PROVISIONAL_VOCAB)
    check_tune(build_meta(spec), recipe.tune)
    check_length(spec, recipe)
    source = recipe_source(recipe.data) if source is None else source
    next(iter(source.documents()), None)
    return source


def prepare(
    recipe: Recipe, out: Path, source: Source, device: str, say: Say, made: Callable[[Tokenizer], None], *, resume: bool
) -> Prepared:
    """Make the tokenizer (kept in ``out/tokenizer``), tokenise (kept in ``out/data``), build the model.

    ``made`` sees the tokenizer before the data are tokenised. ``resume`` takes the one that the run already has.
    """
    data = recipe.data
    training, held = _split(source, data.held_out)
    tokenizer = load_tokenizer(out / "tokenizer") if resume else _tokenizer(recipe, training, out / "tokenizer", say)
    made(tokenizer)
    spec = model_spec(recipe, tokenizer.vocab_size)
    check_vocabulary(spec, tokenizer)
    say("tokenising the data")
    store = tokenise(training, tokenizer, out / "data")
    held_store = None if held is None else tokenise(held, tokenizer, out / "data")
    if held is None and data.held_out:
        store, held_store = _cut(store, data)
    say(f"{store.n_tokens:,} tokens in {store.n_documents:,} documents, vocabulary {tokenizer.vocab_size:,}")
    loader = Loader(PackedRows(store, data.seq_len), recipe.run.batch_size, recipe.run.seed)
    model = _model(recipe, spec, device, say)
    model.tokenizer = tokenizer
    if "from" not in recipe.model:
        model.generation = GenerationDefaults(
            bos_id=tokenizer.bos_id, eos_ids=tuple(tokenizer.eos_ids), pad_id=tokenizer.pad_id
        )
    held_out = None if held_store is None else _batches(held_store, recipe)
    return Prepared(tokenizer, loader, held_out, model)


def recipe_source(data: DataRecipe) -> Source:
    """The source a recipe names."""
    if isinstance(data.source, InlineTexts):
        source: Source = Texts(tuple(text * data.source.repeat for text in data.source.texts))
    elif data.source == "python":
        return PythonCorpus(max_bytes=data.max_bytes)
    else:
        source = open_source(data.source)
    return source if data.max_bytes is None else _Limited(source, data.max_bytes)


def check_vocabulary(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuse a vocabulary that the model has no room for."""
    room = getattr(spec.last_stack.embed, "vocab_size", None)
    if room is not None and tokenizer.vocab_size > room:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model {room}: "
            f"set model.vocab_size to at least {tokenizer.vocab_size}, or data.tokenizer to a smaller one"
        )


def check_length(spec: ModelSpec, recipe: Recipe) -> None:
    """Refuse rows that are longer than the model's texts can be."""
    longest = spec.max_seq_len
    if longest is not None and recipe.data.seq_len > longest:
        raise UserError(
            f"data.seq_len {recipe.data.seq_len} is more than the model's max_seq_len {longest}; change one of them"
        )


class _Limited:
    """The documents of a source before the first that would pass ``max_bytes``."""

    def __init__(self, source: Source, max_bytes: int) -> None:
        self.source, self.max_bytes = source, max_bytes

    def documents(self) -> Iterator:
        left = self.max_bytes
        for index, document in enumerate(self.source.documents()):
            left -= len(document.text.encode())
            if left < 0:
                if index == 0:
                    raise UserError(f"data.max_bytes {self.max_bytes} is below the size of the first document")
                return
            yield document

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}-{self.max_bytes}"


def _split(source: Source, share: float) -> tuple[Source, Source | None]:
    """The training and the held-out documents; the whole source twice where they are too few to be split."""
    many = len(list(itertools.islice(source.documents(), FEW_DOCUMENTS))) == FEW_DOCUMENTS if share else False
    return split_documents(source, share) if many else (source, None)


def _cut(store: TokenStore, data: DataRecipe) -> tuple[TokenStore, TokenStore]:
    """Hold out the end of the tokens: at least one row, and at least one row stays."""
    held = max(data.seq_len, int(store.n_tokens * data.held_out))
    if store.n_tokens - held < data.seq_len:
        raise UserError(
            f"the data has {store.n_tokens} tokens, too few to hold out {held} and train on rows of {data.seq_len}; "
            "set data.held_out=0, lower data.seq_len, or give more text"
        )
    return store.slice(0, store.n_tokens - held), store.slice(store.n_tokens - held, store.n_tokens)


def _model(recipe: Recipe, spec: ModelSpec, device: str, say: Say) -> Model:
    """A new model, or the one to go on from, with what the recipe's ``[tune]`` says about it."""
    seed, tune = recipe.run.seed, recipe.tune
    if "from" in recipe.model:
        say(f"loading '{recipe.model['from']}'")
        model = load_start(recipe.model, spec, seed, device)
    else:
        model = build(spec, seed=seed, device=device)
    apply_tune(model, tune)
    return model


def _tokenizer(recipe: Recipe, source: Source, folder: Path, say: Say) -> Tokenizer:
    wanted = recipe.data.tokenizer
    if "from" in recipe.model and not isinstance(wanted, Loaded):
        tokenizer = start_tokenizer(recipe.model)
    else:
        say("making the tokenizer")
        tokenizer = wanted.make(lambda: (document.text for document in source.documents()))
    tokenizer.save(folder)
    return tokenizer


def _batches(store: TokenStore, recipe: Recipe) -> Callable[[], Iterable[Batch]] | None:
    """The held-out rows in batches; at most ``eval_rows`` of them, spread evenly."""
    if store.n_tokens < recipe.data.seq_len:
        return None
    rows = PackedRows(store, recipe.data.seq_len)
    wanted = recipe.run.eval_rows
    chosen = rows if wanted is None or wanted >= len(rows) else _Spread(rows, wanted)
    return lambda: evaluation_batches(chosen, min(EVAL_BATCH_ROWS, len(chosen)))


class _Spread:
    """``count`` of the rows at equal distances."""

    def __init__(self, rows: PackedRows, count: int) -> None:
        self.rows, self.count = rows, count
        self.seq_len, self.fingerprint = rows.seq_len, f"{rows.fingerprint}-{count}"

    def __len__(self) -> int:
        return self.count

    def row(self, index: int):
        return self.rows.row(index * len(self.rows) // self.count)

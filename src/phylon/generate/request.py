"""What each row is asked to do: prompts, limits and stops from the user's arguments, checked before anything runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

from phylon.generate.kinds import refused, writes_text
from phylon.generate.sampling import Sampling
from phylon.model import Model
from phylon.spec import UserError
from phylon.spec.errors import check_size

Prompt = str | Sequence[int]
T = TypeVar("T")
_KINDS: dict[type, str] = {str: "texts", int: "whole numbers"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One row. ``stream`` numbers independent draws under one seed; ``logprobs`` says whether they are wanted.

    ``source`` is what an encoder-decoder reads; its ``prompt`` is then the id that starts every text.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    stream: int = 0
    logprobs: bool = True
    source: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``generate``, ``stream`` and ``ChatSession`` take; ``None`` is the model's own default."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None = None
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    eos_ids: Sequence[int] | None = None
    seed: int | Sequence[int] = 0
    logprobs: bool = True

    def __post_init__(self) -> None:
        check_size("max_new_tokens", self.max_new_tokens)
        if not isinstance(self.logprobs, bool):
            raise UserError(f"logprobs must be true or false, got {self.logprobs!r}")
        if self.eos_ids is not None:
            _all_of("eos_ids", self.eos_ids, int)
        if not isinstance(self.seed, int):
            _all_of("seed", self.seed, int)

    def sampling(self, model: Model, seed: int) -> Sampling:
        """These options over the model's defaults."""
        chosen = {}
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            mine, default = getattr(self, name), getattr(model.generation, name)
            if mine is not None or default is not None:
                chosen[name] = default if mine is None else mine
        return Sampling(**chosen, seed=seed)


def make_requests(model: Model, prompts: str | Sequence[Prompt], options: Options) -> list[Request]:
    """A request for every prompt, in order.

    With one seed for all, equal prompts draw from different streams; distinct prompts draw what they would draw alone.
    """
    check_generates(model)
    sources, rows = _texts(model, listed(prompts))
    stops = _per_row("stop", options.stop, str, len(rows))
    if any(stops) and model.tokenizer is None:
        raise UserError("stop strings need a tokenizer, and this model has none; use stop_ids")
    if any(not text for row in stops for text in row):
        raise UserError("a stop string is empty; every text would stop at once")
    stop_ids = _per_row("stop_ids", options.stop_ids, int, len(rows))
    eos_ids = frozenset(default_eos_ids(model) if options.eos_ids is None else options.eos_ids)
    seeds = options.seed
    if not isinstance(seeds, int) and len(seeds) != len(rows):
        raise UserError(f"there are {len(seeds)} seeds for {len(rows)} prompts; give one for all, or one each")
    requests, repeats = [], Counter[tuple[int, ...]]()
    for i, (source, ids) in enumerate(zip(sources, rows, strict=True)):
        key = source or ids
        requests.append(
            Request(
                prompt=ids,
                max_new_tokens=room_for(model, len(ids), options.max_new_tokens),
                sampling=options.sampling(model, seeds if isinstance(seeds, int) else seeds[i]),
                stop=stops[i],
                stop_ids=frozenset(stop_ids[i]),
                eos_ids=eos_ids,
                stream=repeats[key] if isinstance(seeds, int) else 0,
                logprobs=options.logprobs,
                source=source,
            )
        )
        repeats[key] += 1
    return requests


def check_generates(model: Model) -> None:
    """Refuse models that do not write text token by token."""
    if not writes_text(model):
        raise refused(model, "generate")
    if model.encoder is not None and model.generation.decoder_start_id is None:
        raise UserError("the model says no id that starts a text; set decoder_start_id in model.generation")


def check_continues(model: Model, what: str) -> None:
    """Refuse models that cannot go on with a text of their own, which is needed to do ``what``."""
    if not writes_text(model) or model.encoder is not None:
        raise refused(model, what)


def _texts(model: Model, prompts: list[Prompt]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """For every prompt what the encoder reads (nothing where there is none) and what the decoder starts from."""
    if model.encoder is None:
        return [()] * len(prompts), [prompt_ids(model, prompt) for prompt in prompts]
    start = model.generation.decoder_start_id
    assert start is not None
    return [source_ids(model, prompt) for prompt in prompts], [(start,)] * len(prompts)


def source_ids(model: Model, prompt: Prompt) -> tuple[int, ...]:
    """The ids an encoder reads, with all that the tokenizer adds."""
    ids = needed_tokenizer(model).encode(prompt) if isinstance(prompt, str) else listed_ids(prompt)
    if not ids:
        raise UserError("the source is empty; give at least one token")
    check_ids(model, ids)
    return tuple(ids)


def listed(prompts: str | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a text, or a flat list of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts must be texts or lists of token ids, got {prompts!r}")
    prompts = list(prompts)
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise UserError("there are no prompts; give at least one")
    return prompts


def listed_ids(prompt: Sequence[int]) -> list[int]:
    """The ids of a prompt that is no text."""
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise UserError(f"a prompt must be a text or a list of token ids, got {_shown(prompt)}") from None


def prompt_ids(model: Model, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt; an empty one becomes the model's BOS."""
    if isinstance(prompt, str):
        ids = encoded(model, prompt)
    else:
        ids = listed_ids(prompt)
    if not ids:
        bos = first_id(model)
        if bos is None:
            raise UserError("the prompt is empty and the model has no BOS token to start from; give at least one token")
        ids = [bos]
    check_ids(model, ids)
    return tuple(ids)


def encoded(model: Model, text: str) -> list[int]:
    """The ids of ``text`` with the special tokens that go before it, without those that end it."""
    tokenizer = needed_tokenizer(model)
    ids = list(tokenizer.encode(text))
    return ids[:-1] if ids and getattr(tokenizer, "add_eos", False) else ids


def needed_tokenizer(model: Model) -> Any:
    """The model's tokenizer."""
    if model.tokenizer is None:
        raise UserError("this model has no tokenizer: give token ids (--prompt-ids), or set model.tokenizer")
    return model.tokenizer


def first_id(model: Model) -> int | None:
    """The model's BOS, ``None`` where it has none."""
    bos = model.generation.bos_id
    return getattr(model.tokenizer, "bos_id", None) if bos is None else bos


def default_eos_ids(model: Model) -> tuple[int, ...]:
    """The ids that end a text: the model's, else its tokenizer's."""
    return tuple(model.generation.eos_ids or getattr(model.tokenizer, "eos_ids", ()))


def check_ids(model: Model, ids: Sequence[int]) -> None:
    """Refuse ids outside of the vocabulary."""
    size = getattr(model.spec.last_stack.embed, "vocab_size", None)
    if size is None:
        return
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise UserError(f"token id {wrong} is out of range: the vocabulary has {size} entries")


def room_for(model: Model, n_prompt: int, max_new_tokens: int) -> int:
    """How many tokens can follow: no more than the model's ``max_seq_len`` leaves."""
    limit = model.spec.max_seq_len
    if limit is None:
        return max_new_tokens
    if n_prompt > limit:
        raise UserError(f"the prompt has {n_prompt} tokens and the model takes {limit}; shorten it")
    return min(max_new_tokens, limit - n_prompt)


def _per_row(name: str, given: Any, kind: type[T], n_rows: int) -> list[tuple[T, ...]]:
    """One value, a sequence for all rows, or a sequence of sequences with one for each row."""
    if given is None:
        return [()] * n_rows
    if isinstance(given, kind):
        return [(given,)] * n_rows
    given = _listed(name, given, kind)
    if all(isinstance(item, kind) for item in given):
        return [tuple(given)] * n_rows
    if any(isinstance(item, kind) for item in given):
        raise UserError(f"{name} mixes single values and lists; give a list for all rows, or a list of lists")
    if len(given) != n_rows:
        raise UserError(f"{name} has lists for {len(given)} rows and there are {n_rows} prompts")
    return [() if item is None else _all_of(name, item, kind) for item in given]


def _all_of(name: str, given: Any, kind: type[T]) -> tuple[T, ...]:
    """The values of a list, each of one kind."""
    values = tuple(_listed(name, given, kind))
    wrong = [value for value in values if not isinstance(value, kind)]
    if wrong:
        raise UserError(f"{name} takes {_KINDS[kind]}, got {_shown(wrong[0])}")
    return values


def _listed(name: str, given: Any, kind: type) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"{name} takes {_KINDS[kind]}, got {_shown(given)}")
    return list(given)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 and text.isprintable() else type(value).__name__

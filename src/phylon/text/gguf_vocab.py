"""Vocabularies in GGUF metadata, both ways (the keys of llama.cpp's ``tokenizer.ggml.*``)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import pre_tokenizers as pre

from phylon.spec.errors import UserError, did_you_mean
from phylon.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SpmModel, build_spm
from phylon.text.stream import ByteDecoder
from phylon.text.tokenizer import Tokenizer, set_affixes

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*before: pre.PreTokenizer, use_regex: bool) -> pre.PreTokenizer:
    last = pre.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre.Sequence([*before, last]) if before else last


def _split(*patterns: str) -> pre.PreTokenizer:
    return _byte_level(*(pre.Split(Regex(pattern), "isolated") for pattern in patterns), use_regex=False)


_DIGITS = lambda: _byte_level(pre.Digits(individual_digits=True), use_regex=True)

# How llama.cpp cuts text before byte-level BPE, by the value of tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, Callable[[], pre.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
    "default": lambda: _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}

_PREFIX = "tokenizer.ggml."
_LISTS: dict[str, tuple[type, ...]] = {
    "tokens": (str,),
    "merges": (str,),
    "scores": (float, int),
    "token_type": (int,),
    "precompiled_charsmap": (int,),
}
_SWITCHES = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
_NAMES = {str: "texts", float: "numbers", int: "whole numbers"}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF header; ``metadata`` maps its keys to plain Python values.

    ``tokenizer.ggml.model`` is ``"gpt2"`` (byte-level BPE), ``"llama"`` (SentencePiece BPE) or ``"t5"`` (SentencePiece
    unigram). Raises ``UserError`` for another one, for an unknown ``tokenizer.ggml.pre``, and for lists that disagree.
    """
    data = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    kind = data.get("model")
    if kind is None or "tokens" not in data:
        raise UserError("this GGUF file has no vocabulary (no tokenizer.ggml.model or tokens): give a tokenizer folder")
    builders = {"gpt2": _from_gpt2, "llama": _from_spm, "t5": _from_spm}
    if kind not in builders:
        raise UserError(f"GGUF vocabulary kind '{kind}' is not supported{did_you_mean(str(kind), builders)}")
    _check_kinds(data, metadata.get("tokenizer.chat_template"))
    tokens = list(data["tokens"])
    for name in ("scores", "token_type"):
        if name in data and len(data[name]) != len(tokens):
            raise UserError(f"GGUF vocabulary: {len(tokens)} tokens but {len(data[name])} of tokenizer.ggml.{name}")
    if len(set(tokens)) < len(tokens):
        raise UserError("GGUF vocabulary: a token stands there twice")
    backend = builders[kind](tokens, data)
    ids = {name: _id(data, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    front_default = kind == "llama" or (kind == "gpt2" and data.get("pre") == "llama-bpe")
    front = tokens[ids["bos"]] if ids["bos"] is not None and data.get("add_bos_token", front_default) else None
    back = tokens[ids["eos"]] if ids["eos"] is not None and data.get("add_eos_token", kind == "t5") else None
    set_affixes(backend, front, back)
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_ids=[i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None],
        pad_id=ids["padding"],
        unk_id=ids["unknown"],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _check_kinds(data: Mapping[str, Any], template: Any) -> None:
    """Refuse a value of another kind than llama.cpp reads under its key."""
    for key, kinds in _LISTS.items():
        value = data.get(key, [])
        if not isinstance(value, list) or not {type(item) for item in value} <= set(kinds):
            raise UserError(f"GGUF vocabulary: {_PREFIX}{key} must be a list of {_NAMES[kinds[0]]}")
    wrong = [key for key in _SWITCHES if not isinstance(data.get(key, False), bool)]
    if wrong:
        raise UserError(f"GGUF vocabulary: {_PREFIX}{wrong[0]} must be true or false, got {data[wrong[0]]!r:.80}")
    if template is not None and not isinstance(template, str):
        raise UserError(f"GGUF vocabulary: tokenizer.chat_template must be a text, got {template!r:.80}")


def _id(data: dict[str, Any], name: str, size: int) -> int | None:
    key, value = f"{_PREFIX}{name}_token_id", data.get(f"{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"GGUF vocabulary: {key} must be a whole number, got {value!r:.80}")
    if value == 0xFFFFFFFF:
        return None
    if not 0 <= value < size:
        raise UserError(f"GGUF vocabulary: {key} is {value}, but there are {size} tokens")
    return value


def _from_gpt2(tokens: list[str], data: dict[str, Any]) -> tokenizers.Tokenizer:
    name = data.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(
            f"tokenizer.ggml.pre '{name}' is not known{did_you_mean(str(name), PRE_TOKENIZERS)}; {known} are"
        )
    merges = [tuple(merge.split(" ")) for merge in data.get("merges", ())]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise UserError(f"GGUF vocabulary: a merge is two tokens with a space in between, got {' '.join(wrong)!r:.80}")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(vocab, cast(list[tuple[str, str]], merges), ignore_merges=name == "llama-bpe")
        )
    except Exception as error:
        raise UserError(f"GGUF vocabulary: the merges do not fit the tokens: {' '.join(str(error).split())}") from None
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, data.get("token_type", ()), strict=False):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind != USER_DEFINED)])
    return backend


def _from_spm(tokens: list[str], data: dict[str, Any]) -> tokenizers.Tokenizer:
    for name in ("scores", "token_type"):
        if name not in data:
            raise UserError(f"GGUF vocabulary of kind '{data['model']}' needs tokenizer.ggml.{name}")
    triples = zip(tokens, data["scores"], data["token_type"], strict=True)
    model = SpmModel(
        pieces=list(triples),
        kind="bpe" if data["model"] == "llama" else "unigram",
        add_dummy_prefix=data.get("add_space_prefix", True),
        remove_extra_whitespaces=data.get("remove_extra_whitespaces", False),
        charsmap=bytes(data.get("precompiled_charsmap", b"")),
    )
    return build_spm(model)


def gguf_from_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The GGUF metadata that ``tokenizer_from_gguf`` turns into the same ids again.

    Byte-level BPE becomes ``"gpt2"``, SentencePiece BPE ``"llama"`` (scores are minus the rank of a token's first
    merge, which orders merges as the original scores did), SentencePiece unigram ``"t5"``.
    """
    backend = tokenizer.backend
    spelled = backend.get_vocab(with_added_tokens=True)
    by_id = {id: token for token, id in spelled.items()}
    added = {id: token.special for id, token in backend.get_added_tokens_decoder().items()}
    size = tokenizer.vocab_size
    tokens = [by_id.get(id, f"[PAD{id}]") for id in range(size)]
    types = [(CONTROL if added[i] else USER_DEFINED) if i in added else NORMAL for i in range(size)]
    types = [5 if i not in by_id else kind for i, kind in enumerate(types)]
    out: dict[str, Any] = {_PREFIX + "tokens": tokens, _PREFIX + "token_type": types}
    content = json.loads(backend.to_str())
    decoder = ByteDecoder.of(backend)
    if content["model"]["type"] == "BPE" and decoder is not None and decoder.byte_level:
        out |= _as_gpt2(content)
    elif content["model"]["type"] in ("BPE", "Unigram") and decoder is not None:
        out |= _as_spm(content, tokens, types, tokenizer.unk_id, decoder.strip > 0)
    else:
        raise UserError(f"GGUF has no place here for a {content['model']['type']} vocabulary; BPE and Unigram it has")
    ids = {"bos": tokenizer.bos_id, "eos": next(iter(tokenizer.eos_ids), None)}
    ids |= {"eot": next(iter(tokenizer.eos_ids[1:]), None), "eom": next(iter(tokenizer.eos_ids[2:]), None)}
    ids |= {"unknown": tokenizer.unk_id, "padding": tokenizer.pad_id}
    out |= {f"{_PREFIX}{name}_token_id": id for name, id in ids.items() if id is not None}
    out[_PREFIX + "add_bos_token"] = tokenizer.add_bos
    out[_PREFIX + "add_eos_token"] = tokenizer.add_eos
    if tokenizer.chat_template is not None:
        out["tokenizer.chat_template"] = tokenizer.chat_template
    return out


def _as_gpt2(content: dict[str, Any]) -> dict[str, Any]:
    if content["normalizer"] is not None:
        raise UserError("GGUF cannot hold this vocabulary: byte-level BPE there has no normalizer")
    wanted = _canonical(content["pre_tokenizer"])
    same = (name for name, make in PRE_TOKENIZERS.items() if _canonical(json.loads(make().__getstate__())) == wanted)
    name = next(same, None)
    if name is None:
        raise UserError(f"GGUF cannot hold this vocabulary: its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}")
    if bool(content["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise UserError(f"GGUF cannot hold this vocabulary: ignore_merges does not go with the pre-tokenizer '{name}'")
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    return {_PREFIX + "model": "gpt2", _PREFIX + "pre": name, _PREFIX + "merges": merges}


def _canonical(value: Any) -> Any:
    """A pre-tokenizer's JSON without what does not change ids."""
    if isinstance(value, dict):
        if "pretokenizers" in value and len(value["pretokenizers"]) == 1:
            return _canonical(value["pretokenizers"][0])
        return {key: _canonical(inner) for key, inner in value.items() if key != "trim_offsets"}
    return [_canonical(inner) for inner in value] if isinstance(value, list) else value


def _as_spm(
    content: dict[str, Any], tokens: list[str], types: list[int], unk_id: int | None, strip: bool
) -> dict[str, Any]:
    model = content["model"]
    steps = content["normalizer"] or {}
    steps = steps.get("normalizers", [steps] if steps else [])
    kinds = [step["type"] for step in steps]
    charsmap = next((step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"), "")
    prefix = "Prepend" in kinds or "Metaspace" in json.dumps(content["pre_tokenizer"])
    squeeze = any(step["type"] == "Replace" and step["pattern"].get("Regex") == " {2,}" for step in steps)
    if unk_id is not None:
        types[unk_id] = UNKNOWN
    if model.get("byte_fallback"):
        for byte in range(256):
            types[tokens.index(f"<0x{byte:02X}>")] = 6
    scores = [0.0] * len(tokens)
    if model["type"] == "Unigram":
        for i, (_, score) in enumerate(model["vocab"]):
            scores[i] = score
    else:
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(model["merges"]):
            ranks.setdefault(left + right, rank)
        worst = -float(len(ranks) + 1)
        order = {token: -float(i) for i, token in enumerate(sorted(ranks, key=ranks.__getitem__))}
        scores = [order.get(token, worst) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)]
    out = {"model": "llama" if model["type"] == "BPE" else "t5", "scores": scores}
    out |= {"add_space_prefix": prefix, "remove_extra_whitespaces": squeeze}
    if charsmap:
        out["precompiled_charsmap"] = list(base64.b64decode(charsmap))
    assert strip == (prefix or squeeze), (strip, prefix, squeeze)
    return {_PREFIX + key: value for key, value in out.items()}

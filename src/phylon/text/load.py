"""Tokenizers from files: ``tokenizer.json``, GPT-2's two files, BERT's ``vocab.txt``, SentencePiece models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from phylon.spec.errors import UserError
from phylon.spec.files import read_file, there
from phylon.text.sentencepiece import build_spm, read_spm
from phylon.text.tokenizer import Tokenizer, set_affixes

KNOWN_FILES = "tokenizer.json, vocab.json + merges.txt, encoder.json + vocab.bpe, vocab.txt, or a SentencePiece *.model"

# What tokenizers of these classes add by themselves when their configuration does not say: (BOS, EOS).
_CLASS_AFFIXES = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a folder, or in one of its files.

    A folder is read as Hugging Face writes it: the vocabulary from ``tokenizer.json`` or, without one, from the older
    files; special tokens from ``tokenizer_config.json`` and ``special_tokens_map.json``; end ids also from
    ``generation_config.json``; the chat template from ``chat_template.jinja`` or the configuration. A bare
    SentencePiece model adds neither BOS nor EOS, as SentencePiece does not; with a configuration, what its class adds.

    Raises ``UserError`` for a missing, foreign or damaged file, and for a special token that the vocabulary lacks.
    """
    path = Path(path)
    if not there(path):
        raise UserError(f"no tokenizer at {path}: give a folder or file with {KNOWN_FILES}")
    folder = path if path.is_dir() else path.parent
    config = _config(folder)
    backend = _backend(path, config)
    _add_tokens(backend, folder, config)
    special = _Special(backend, config, folder)
    if "add_bos_token" in config or "add_eos_token" in config:
        set_affixes(
            backend,
            special.token("bos") if config.get("add_bos_token") else None,
            special.token("eos") if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        bos_id=special.id("bos"),
        eos_ids=special.eos_ids(),
        pad_id=special.id("pad"),
        unk_id=special.id("unk"),
        chat_template=_chat_template(folder, config),
    )


def _backend(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    if not path.is_dir():
        return _from_file(path, config)
    for name in ("tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "tokenizer.model", "spiece.model"):
        if there(path / name):
            return _from_file(path / name, config)
    others = sorted(path.glob("*.model"))
    if len(others) == 1:
        return _from_file(others[0], config)
    problem = "no tokenizer" if not others else f"{len(others)} SentencePiece models, name one of them,"
    raise UserError(f"{problem} in {path}: it needs {KNOWN_FILES}")


def _from_file(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    if path.suffix == ".model":
        model = read_spm(path)
        front, back = _CLASS_AFFIXES.get(str(config.get("tokenizer_class", "")).removesuffix("Fast"), (False, False))
        config.setdefault("add_bos_token", front)
        config.setdefault("add_eos_token", back)
        for name, token in model.names.items():
            if model.id(token) is not None:
                config.setdefault(f"{name}_token", token)
        if model.unk is not None:
            config.setdefault("unk_token", model.unk)
        return build_spm(model, prefix="always" if config.get("legacy", True) in (True, None) else "first")
    if path.suffix == ".txt" and path.name != "merges.txt":
        return _wordpiece(path, config)
    pairs = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
    pairs |= {merges: vocab for vocab, merges in pairs.items()}
    if path.name in pairs:
        other = path.with_name(pairs[path.name])
        vocab, merges = (path, other) if path.suffix == ".json" else (other, path)
        return _gpt2(vocab, merges, config)
    if path.suffix != ".json":
        raise UserError(f"{path} is no tokenizer file: it needs {KNOWN_FILES}")
    return _tokenizer_json(path)


def _tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    content = _json(path, text)
    if not isinstance(content.get("model"), dict):
        raise UserError(f"{path} is not a tokenizer.json: it has no model")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise UserError(f"{path} is not a tokenizer.json this library reads: {_line(error)}") from None


def _gpt2(vocab_path: Path, merges_path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    vocab = read_json(vocab_path)
    lines = _read_text(merges_path).split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if bad := next((pair for pair in pairs if len(pair) != 2), None):
        raise UserError(f"{merges_path}: a merge is two tokens with a space between, not {' '.join(bad)!r}")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab, cast(list[tuple[str, str]], pairs)))
    except Exception as error:
        raise UserError(f"{merges_path} does not fit {vocab_path.name}: {_line(error)}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    if "<|endoftext|>" in vocab:
        for name in ("bos_token", "eos_token", "unk_token"):
            config.setdefault(name, "<|endoftext|>")
    cls, sep = _content(config.get("cls_token")), _content(config.get("sep_token"))
    if cls in vocab and sep in vocab:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} {sep} $B {sep}",
            special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
        )
    return backend


def _wordpiece(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = _read_text(path).rstrip("\n").split("\n")
    vocab = {token.rstrip("\r"): i for i, token in enumerate(tokens)}
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    for name, token in names.items():
        config.setdefault(f"{name}_token", token)
    unk, cls, sep = (_content(config[f"{name}_token"]) or "" for name in ("unk", "cls", "sep"))
    if missing := [token for token in (unk, cls, sep) if token not in vocab]:
        raise UserError(f"{path} is not BERT's vocabulary: it has no {', '.join(missing)}")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    bert_template(backend, cls, sep)
    return backend


def bert_template(backend: tokenizers.Tokenizer, cls: str, sep: str) -> None:
    """[CLS] a [SEP], and for pairs [CLS] a [SEP] b [SEP] with types 0 and 1."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if there(folder / name):
            said = {key: value for key, value in read_json(folder / name).items() if value is not None}
            _check_kinds(folder / name, said)
            config |= said
    return config


_SWITCHES = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "do_lower_case",
    "legacy",
    "strip_accents",
    "tokenize_chinese_chars",
)
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


def _check_kinds(path: Path, said: dict[str, Any]) -> None:
    """Refuse a value of the wrong kind of every key that is read here: it would count as silence, or as "yes"."""
    template = said.get("chat_template", "")
    entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    wrong = {key: "true or false" for key in _SWITCHES if not isinstance(said.get(key, False), bool)}
    wrong |= {key: "a token" for key in _ROLES if key in said and not _is_token(said[key])}
    if not all(isinstance(e, dict) and _is_text(e.get("name")) and _is_text(e.get("template")) for e in entries):
        wrong["chat_template"] = "a template, or a list of them with name and template"
    if not isinstance(said.get("added_tokens_decoder", {}), dict):
        wrong["added_tokens_decoder"] = "a table of tokens by id"
    if not _is_text(said.get("tokenizer_class", "")):
        wrong["tokenizer_class"] = "a name"
    for key, wanted in wrong.items():
        raise UserError(f"{path}: '{key}' must be {wanted}, got {_short(said[key])}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return _is_text(value.get("content") if isinstance(value, dict) else value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Special and added tokens that the vocabulary's own file does not mark as such, at the ids the files state."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens: dict[int, AddedToken] = {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        for key, entry in config.get("added_tokens_decoder", {}).items():
            wrong = [flag for flag in flags if not isinstance(entry.get(flag, False), bool)]
            if wrong:
                where = f"{folder / 'tokenizer_config.json'}: '{wrong[0]}' of the added token {_short(key)}"
                raise UserError(f"{where} must be true or false, got {_short(entry[wrong[0]])}")
            tokens[_id(key)] = AddedToken(entry["content"], **{flag: entry.get(flag, False) for flag in flags})
        if there(folder / "added_tokens.json"):
            for content, id in read_json(folder / "added_tokens.json").items():
                tokens.setdefault(_id(id), AddedToken(content, normalized=False, special=False))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: the added tokens are not written as Hugging Face writes them ({error!r})") from None
    stated = {token.content for token in tokens.values()}
    roles = [_content(value) for key, value in config.items() if key.endswith("_token")]
    for content in sorted({role for role in roles if role} - known - stated):
        id = backend.token_to_id(content)
        if id is not None:
            tokens.setdefault(id, AddedToken(content, normalized=False, special=True))
    for id, token in sorted(tokens.items()):
        if token.content in known:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id:
            raise UserError(
                f"{folder}: the files say that {token.content!r} has id {id}, "
                f"but the vocabulary makes it {backend.token_to_id(token.content)}"
            )


def _id(value: Any) -> int:
    found = int(value) if isinstance(value, str) else value
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(f"{_short(value)} is no id")
    return found


class _Special:
    """The special tokens that a configuration names, as tokens and as ids."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
        self._backend, self._config, self._folder = backend, config, folder

    def token(self, name: str) -> str | None:
        content = _content(self._config.get(f"{name}_token"))
        if content is not None and self._backend.token_to_id(content) is None:
            raise UserError(
                f"{self._folder}: the {name} token {content!r} is not in the vocabulary; correct tokenizer_config.json"
            )
        return content

    def id(self, name: str) -> int | None:
        token = self.token(name)
        return None if token is None else self._backend.token_to_id(token)

    def eos_ids(self) -> Iterable[int]:
        first = self.id("eos")
        ids = [] if first is None else [first]
        ids += _ids(self._folder / "tokenizer_config.json", "eos_token_ids", self._config)
        generation = self._folder / "generation_config.json"
        if there(generation):
            ids += _ids(generation, "eos_token_id", read_json(generation))
        return ids


def _ids(path: Path, key: str, said: dict[str, Any]) -> list[int]:
    """The ids of one key, negative ones left out: they say that there is none."""
    value = said.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [v for v in values if not isinstance(v, int) or isinstance(v, bool)]
    if wrong:
        raise UserError(f"{path}: '{key}' must be a token id or a list of them, got {_short(wrong[0])}")
    return [v for v in values if v >= 0]


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if there(folder / "chat_template.jinja"):
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    if not there(path):
        raise UserError(f"{path.name} is missing in {path.parent}")
    try:
        return read_file(path).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is a ``UserError`` that says where."""
    return _json(path, _read_text(path))


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        # A whole number of more digits than Python reads, or too many brackets.
        raise UserError(f"{path} is not JSON: {_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content


def _line(error: Exception) -> str:
    return " ".join(str(error).split())

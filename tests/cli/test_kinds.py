"""Every command that reads text on every kind of model: an answer, or one line with its kind and what runs it."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phylon.families import family
from phylon.families.bert import bert_spec
from phylon.hub import save
from phylon.layers.heads.classify import Classify, Span
from phylon.layers.heads.pools import First, Last
from phylon.model import GenerationDefaults, Model, ModelSpec, build
from phylon.text import char_tokenizer
from phylon.text.wordpiece import train_wordpiece

TEXT = "the cat sat on the mat"
VECTORS = "phylon encode gives the vectors of texts"
IMAGES = "no command reads them, call it in Python with images="
COMMANDS = ("generate", "chat", "score", "encode")


def encoder(**heads: object) -> ModelSpec:
    size = train_wordpiece([TEXT] * 3, 40).vocab_size
    spec = bert_spec(d_model=16, n_layers=1, n_heads=2, d_ff=24, max_seq_len=32, vocab_size=size, heads=("mlm", "nsp"))
    return spec.replace(heads=heads, ties=()) if heads else spec


def small(name: str, **heads: object) -> ModelSpec:
    spec = family(name).cases()[0]
    return spec.replace(heads=heads, ties=()) if heads else spec


def not_done(name: str, shown_by: str, **done: str) -> list[str]:
    """The refusals of a kind, but for the commands that it obeys."""
    verbs = {"generate": "generate", "chat": "chat", "score": "tell how probable a text is", "encode": "read texts"}
    lines = {command: f"this is {name}, which does not {verb}: {shown_by}" for command, verb in verbs.items()}
    return [(lines | done)[command] for command in COMMANDS]


# By kind: its spec, and for each of COMMANDS the beginning of standard output, or (this is …) the line of the refusal.
KINDS: dict[str, tuple[Callable[[], ModelSpec], list[str]]] = {
    "decoder": (
        lambda: small("llama"),
        ["abc", "no chat template", " tokens", "  1 "],
    ),
    "mamba": (lambda: small("mamba"), ["abc", "no chat template", " tokens", "  1 "]),
    "masked language model": (encoder, not_done("a masked language model", VECTORS, encode="  1 ")),
    # A sentence encoder (contrastive) is a bare encoder too.
    "bare encoder": (
        lambda: encoder().replace(heads={}, ties=()),
        not_done("an encoder without a task's head", VECTORS, encode="  1 "),
    ),
    "bare decoder": (
        lambda: small("llama").replace(heads={}, ties=()),
        not_done("a decoder without a language-model head", VECTORS, encode="  1 "),
    ),
    "classes": (
        lambda: encoder(**{"class": Classify(n_classes=3, pool=First())}),
        not_done("a classifier of texts", "phylon score says the class of a text", score="class ", encode="  1 "),
    ),
    "classes of a decoder": (
        lambda: small("llama", **{"class": Classify(n_classes=3, pool=Last())}),
        not_done("a classifier of texts", "phylon score says the class of a text", score="class ", encode="  1 "),
    ),
    "number": (
        lambda: encoder(**{"class": Classify(n_classes=1, pool=First())}),
        not_done(
            "a model that gives a text a number",
            "phylon score says the number of a text",
            score="    score",
            encode="  1 ",
        ),
    ),
    "words": (
        lambda: encoder(token=Classify(n_classes=2)),
        not_done("a classifier of words", "phylon score says the class of every word", score="abc/", encode="  1 "),
    ),
    "answers": (
        lambda: encoder(span=Span()),
        not_done(
            "a model that answers questions",
            "phylon score finds the answer in a context",
            score="this model answers questions: give --text QUESTION --text CONTEXT, in turns",
            encode="  1 ",
        ),
    ),
    "images": (
        lambda: small("vit"),
        not_done(
            "a model of images",
            IMAGES,
            score=f"this is a model of images, which does not read texts: {IMAGES}",
        ),
    ),
    "encoder-decoder": (
        lambda: small("t5"),
        not_done(
            "an encoder-decoder",
            "phylon generate writes what it makes of a text",
            generate="",
            encode="this is an encoder-decoder, which does not give vectors of texts: "
            "phylon generate writes what it makes of a text",
        ),
    ),
    "bare encoder-decoder": (
        lambda: small("t5").replace(heads={}, ties=()),
        not_done(
            "an encoder-decoder without a language-model head",
            "phylon show says what it has",
            encode="this is an encoder-decoder without a language-model head, which does not give vectors of texts: "
            "phylon show says what it has",
        ),
    ),
}  # fmt: skip


def made(spec: ModelSpec) -> Model:
    model = build(spec, device="cpu")
    first = spec.encoder or spec.decoder
    assert first is not None
    if hasattr(first.embed, "vocab_size"):
        wide = spec.decoder is None
        model.tokenizer = train_wordpiece([TEXT] * 3, 40) if wide else char_tokenizer("abcdefgh")
    if spec.encoder is not None and spec.decoder is not None:
        model.generation = GenerationDefaults(decoder_start_id=0, pad_id=0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_does_it_or_says_what_does(
    kind: str, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = KINDS[kind]
    folder = save(made(make()), tmp_path / "model")
    given = {
        "generate": ["--prompt", "abc", "--max-new-tokens", 2],
        "chat": [],
        "score": ["--text", "abc"],
        "encode": ["--text", "abc"],
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    for command, wanted in zip(COMMANDS, expected, strict=True):
        found = run(command, folder, *given[command])
        if wanted.startswith("this "):
            assert (found.code, found.out, found.err) == (2, "", f"phylon: {wanted}\n"), command
        elif command == "chat":
            assert wanted in found.err, found
            assert found.err.count("\n") == 1
        else:
            assert (found.code, found.err) == (0, ""), command
            assert found.out.lstrip().startswith(wanted.lstrip()), (command, found.out)
    for command in ("show", "account"):
        assert run(command, folder).code == 0, command
    for form in ("native", "gguf"):
        target = tmp_path / f"again{'.gguf' * (form == 'gguf')}"
        found = run("convert", folder, target, "--to", form)
        assert found.code == 0 or re.fullmatch(
            r"phylon: (no family's gguf format|GGUF has no place) .*\n", found.err
        ), found

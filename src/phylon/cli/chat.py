"""``phylon chat``: a conversation in the terminal."""

import contextlib
import importlib
import sys
from typing import Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, ModelName, note, note_what_is_not_applied
from phylon.cli.sampling import ChatTemperature, MaxNewTokens, MinP, RepetitionPenalty, Seed, TopK, TopP

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: ModelName,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message.", show_default="the template's own")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: ChatTemperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Talk with a model. Reads lines from a pipe as well."""
    from phylon.generate import ChatSession
    from phylon.hub import load

    loaded = load(model, dtype=dtype, device=device)
    note_what_is_not_applied(loaded)
    if temperature is None and loaded.generation.temperature is None:
        temperature = 0.0
    session = ChatSession(
        loaded,
        system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logprobs=False,
    )
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
        note(f"{model}: {HELP}")
    talk(session)


def talk(session: Any) -> None:
    """Turn by turn, until the input ends."""
    from phylon.spec.errors import UserError

    at_terminal = sys.stdin.isatty()
    while (line := _ask("> " if at_terminal else "")) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            session.reset()
            note("(forgotten)")
        elif line.startswith("/") and " " not in line:
            note(f"(unknown command {line}; {HELP})")
        elif line:
            try:
                _answer(session, line)
            except UserError as error:
                note(f"({error})")
    if at_terminal:
        print()


def _ask(prompt: str) -> str | None:
    """The next line, ``None`` at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _answer(session: Any, text: str) -> None:
    forgotten = session.n_forgotten
    pieces = session.send(text)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
        sys.stdout.write(" …")
    print(flush=True)
    if session.n_forgotten > forgotten:
        note("(the conversation is longer than the model reads; its oldest turns are left out from now on)")

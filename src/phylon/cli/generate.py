"""``phylon generate``: what follows a prompt."""

import sys
from typing import Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, begun, note_what_is_not_applied, print_json
from phylon.cli.sampling import MaxNewTokens, MinP, RepetitionPenalty, Seed, Stop, Temperature, TopK, TopP


def generate(
    model: ModelName,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to go on from; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="Token ids in place of a text, as in '1 5 7'; repeatable.")
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Write what follows each prompt. An encoder-decoder writes its target alone. One prompt streams."""
    from phylon.hub import load
    from phylon.spec.errors import UserError

    prompts: list[str | list[int]] = [*(prompt or []), *map(_ids, prompt_ids or [])]
    if not prompts:
        raise UserError("there is no prompt; give one with --prompt TEXT, or ids with --prompt-ids")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": seed,
    }
    loaded = load(model, dtype=dtype, device=device)
    note_what_is_not_applied(loaded)
    if as_json:
        _json(loaded, model, prompts, options)
    elif len(prompts) == 1 and loaded.tokenizer is not None:
        _stream(loaded, prompts[0], options)
    else:
        _texts(loaded, prompts, options)


def _json(loaded: Any, name: str, prompts: list[str | list[int]], options: dict[str, Any]) -> None:
    from phylon.generate import generate as run

    results = run(loaded, prompts, **options)
    print_json({"model": name, "results": [{"prompt": p, **r} for p, r in zip(prompts, results, strict=True)]})


def _stream(loaded: Any, prompt: str | list[int], options: dict[str, Any]) -> None:
    from phylon.generate import stream

    pieces = stream(loaded, prompt, **options)
    sys.stdout.write(begun(loaded, prompt))
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def _texts(loaded: Any, prompts: list[str | list[int]], options: dict[str, Any]) -> None:
    from phylon.generate import generate as run

    for i, (prompt, result) in enumerate(zip(prompts, run(loaded, prompts, **options), strict=True)):
        if i:
            print("\n---\n")
        if result["text"] is None:
            print(*result["tokens"])
        else:
            print(begun(loaded, prompt) + result["text"])


def _ids(text: str) -> list[int]:
    from phylon.spec.errors import UserError

    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--prompt-ids takes whole numbers, as in '1 5 7'; got '{text}'") from None

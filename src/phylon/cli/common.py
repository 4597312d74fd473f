"""Options and output that several commands share."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phylon.model import ModelSpec

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder, a .gguf file, or a known name such as smollm2.")
]
PresetOrModel = Annotated[
    str, typer.Argument(metavar="PRESET|MODEL", help="A preset (see 'phylon list presets'), or a model's path or name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="float32, bfloat16, float16 or float64.", show_default="as stored, float32 if quantised"
    ),
]


def print_json(value: Any) -> None:
    """One JSON object on one line; numbers that JSON cannot say become null."""
    print(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note(message: str) -> None:
    """A remark that is no part of the output."""
    print(message, file=sys.stderr)


def note_what_is_not_applied(model: Any) -> None:
    """A checkpoint may ask its generation for more than is done here."""
    asked = model.generation.not_applied
    if asked:
        are = "are" if asked[1:] else "is"
        note(f"note: {', '.join(asked)} of the model's own generation settings {are} not applied")


def begun(model: Any, prompt: str | list[int]) -> str:
    """What the written text begins with: its prompt; nothing where an encoder reads the prompt and the text is new."""
    if model.encoder is not None:
        return ""
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)


def count(number: int) -> str:
    """Digits in groups of three."""
    return f"{number:,}"


def labels_of(name: str) -> "dict[str, tuple[str, ...]]":
    """The names of the classes of a model at a path, by head; a preset has none."""
    from phylon.hub import KNOWN, describe

    return describe(name).labels if name in KNOWN or Path(name).expanduser().exists() else {}


def spec_of(name: str) -> "ModelSpec":
    """The spec of a preset, or of a model at a path, whose weights are not read."""
    from phylon.families import preset, presets
    from phylon.hub import KNOWN, describe
    from phylon.spec.errors import UserError, did_you_mean

    if name in KNOWN or Path(name).expanduser().exists():
        return describe(name).spec
    try:
        return preset(name)
    except UserError:
        if "/" in name or Path(name).suffix in (".gguf", ".safetensors", ".json"):
            raise UserError(f"there is no file or folder '{name}'") from None
        known = [*presets(), *KNOWN]
        raise UserError(f"there is no preset or model '{name}'{did_you_mean(name, known)}") from None

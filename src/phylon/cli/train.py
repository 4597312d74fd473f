"""``phylon train``: a recipe, and where to put what comes of it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from phylon.cli.common import Device, note

# What a run writes into its folder, and --fresh removes.
RUN_FILES = ("recipe.toml", "metrics.jsonl", "report.html", "checkpoints", "data", "tokenizer", "model")


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file, or demo or tinygpt.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the log, checkpoints, model and report.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in optim.lr=1e-3; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the run in DIR first.")] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What the samples go on from; repeatable.", show_default="'def ', else the first token"
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a model as a recipe says, or go on training. Ctrl-C saves and leaves."""
    from phylon.spec.errors import UserError
    from phylon.spec.override import parse_assignment
    from phylon.train import ProgressLine, load_recipe
    from phylon.train import train as run

    if resume and fresh:
        raise UserError("--resume goes on with a run and --fresh removes it; choose one")
    chosen = load_recipe(recipe, dict(map(parse_assignment, assignments or [])))
    if fresh:
        clear(out)
    result = run(
        chosen, out=out, resume=resume, sample=sampler(prompt or []), callbacks=[ProgressLine()], device=device
    )
    note(f"model: {out / 'model'}, report: {out / 'report.html'}")
    note(f"try: phylon generate {out / 'model'} --prompt {_quoted(result.tokenizer, prompt or [])}")


def clear(out: Path) -> None:
    """Remove the files of the run in ``out``, even of one that never began, and nothing else."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if "recipe.toml" not in names and not names <= set(RUN_FILES):
        return
    for name in RUN_FILES:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sampler(prompts: list[str]) -> Callable[[Any], list[str]]:
    """What the trainer calls now and then: the text that follows each prompt, the prompt included."""

    def sample(model: Any) -> list[str]:
        from phylon.generate import generate

        given = prompts or [first_prompt(model.tokenizer)]
        found = generate(model, given, max_new_tokens=96, temperature=0.8, top_p=0.95, seed=0, logprobs=False)
        return [_text(model, p) + (r["text"] or "") for p, r in zip(given, found, strict=True)]

    return sample


def first_prompt(tokenizer: Any) -> str | list[int]:
    """Something that the tokenizer can say: the beginning of a Python function, else its first token."""
    try:
        ids = tokenizer.encode("def ")
    except ValueError:
        return [0]
    return "def " if tokenizer.decode(ids) == "def " else [0]


def _text(model: Any, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)


def _quoted(tokenizer: Any, prompts: list[str]) -> str:
    import shlex

    first = prompts[0] if prompts else first_prompt(tokenizer)
    return shlex.quote(first if isinstance(first, str) else tokenizer.decode(first))

"""``phylon train``: a recipe, and where to put what comes of it."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from phylon.cli.common import Device, begun, note
from phylon.cli.interrupts import check


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file, or one of 'phylon list recipes'.",
            show_default="finetune with --from",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Go on from trained weights: a folder, a .gguf file, a name."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the log, checkpoints, model and report.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in optim.lr=1e-3; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume: go on although the recipe is not the run's.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace the run in DIR.")] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What the samples go on from; repeatable.", show_default="'def ', else the first token"
        ),
    ] = None,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what the run needs in memory and time, and do not begin it.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write DIR/tensorboard too (pip install 'phylon[tensorboard]').")
    ] = False,
    device: Device = "auto",
) -> None:
    """Train a model as a recipe says, or go on training. Ctrl-C saves and leaves."""
    from phylon.spec.errors import UserError
    from phylon.spec.override import parse_assignment
    from phylon.train import Interrupted, ProgressLine, TensorBoard, estimate, load_recipe
    from phylon.train import train as run
    from phylon.train.world import launched

    if recipe is None and start is None:
        raise UserError("name a recipe ('phylon list recipes', or a TOML file), or a model to go on from with --from")
    overrides = ({} if start is None else {"model.from": start}) | dict(map(parse_assignment, assignments or []))
    check()
    if out is None and not only_estimate:
        raise UserError("give --out DIR, the folder for the log, checkpoints, model and report")
    loaded = load_recipe(recipe or "finetune", overrides)
    if only_estimate:
        world = launched()
        if world.first:
            print(estimate(loaded, device=device, world=world).page())
        return
    assert out is not None
    samples = _sampler(prompt or [])
    board = [TensorBoard(out / "tensorboard")] if tensorboard else []
    try:
        result = run(
            recipe or "finetune",
            out=out,
            overrides=overrides,
            resume=resume,
            fresh=fresh,
            allow_changes=allow_changes,
            sample=samples.take,
            callbacks=[ProgressLine(unit=loaded.objective.counted), samples, *board],
            device=device,
        )
    except Interrupted as stopped:
        again = shlex.join(["phylon", "train", str(out / "recipe.toml"), "--out", str(out), "--resume"])
        raise Interrupted(f"{stopped}; go on with: {again}", stopped.exit_code - 128) from None
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several processes speaks
    note(f"model: {out / 'model'}, report: {out / 'report.html'}")
    note(f"try: {_next_command(result.model, out / 'model', prompt or [], pairs=_reads_pairs(loaded.objective))}")


def _sampler(prompts: list[str]) -> Any:
    """A watcher that refuses prompts the tokenizer cannot say, gives the text that follows each, and minds Ctrl-C."""
    from phylon.generate import generate
    from phylon.generate.kinds import writes_text
    from phylon.spec.errors import UserError
    from phylon.train import Callback

    class Samples(Callback):
        def said(self, message: str) -> None:
            check()

        def started(self, run: Any) -> None:
            check()

        def vocabulary(self, tokenizer: Any) -> None:
            for prompt in prompts:
                if not tokenizer.encode(prompt):
                    raise UserError(f"--prompt {prompt!r} holds no tokens; give some text")

        def take(self, model: Any) -> list[str]:
            if model.tokenizer is None or not writes_text(model):
                return []
            given = prompts or [first_prompt(model.tokenizer)]
            found = generate(model, given, max_new_tokens=96, temperature=0.8, top_p=0.95, seed=0, logprobs=False)
            return [_shown(model, p, r["text"] or "") for p, r in zip(given, found, strict=True)]

    return Samples()


def first_prompt(tokenizer: Any) -> str | list[int]:
    """Something that the tokenizer can say: the beginning of a Python function, else its first token."""
    try:
        ids = tokenizer.encode("def ")
    except ValueError:
        return [0]
    return "def " if tokenizer.decode(ids) == "def " else [0]


def _shown(model: Any, prompt: str | list[int], text: str) -> str:
    """A sample: the prompt and how it goes on, or what an encoder has read and what is made of it."""
    if model.encoder is None:
        return begun(model, prompt) + text
    return f"{prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)} -> {text}"


def _reads_pairs(objective: Any) -> bool:
    """Whether the model has been taught pairs of texts."""
    return getattr(objective, "pair", None) is not None


def _next_command(model: Any, folder: Path, prompts: list[str], *, pairs: bool) -> str:
    """A command that shows what the trained model does, by its kind."""
    from phylon.generate import classifier, taught
    from phylon.generate.kinds import writes_text

    where = shlex.quote(str(folder))
    said = shlex.quote(prompts[0] if prompts else "some text")
    if model.tokenizer is None:
        return f"phylon show {where}"  # no command reads images
    if writes_text(model):
        if model.encoder is not None:
            return f"phylon generate {where} --prompt {said}"
        first = prompts[0] if prompts else first_prompt(model.tokenizer)
        shown = shlex.quote(first if isinstance(first, str) else model.tokenizer.decode(first))
        return f"phylon generate {where} --prompt {shown}"
    second = " --pair 'another text'" if pairs else ""
    if classifier(model) is not None:
        return f"phylon score {where} --text {said}{second}"
    if (task := taught(model)) is not None:
        asked = f"{said} --text 'what it is asked of'" if task == "answers" else said + second
        return f"phylon score {where} --text {asked}"
    if model.encoder is None or model.decoder is None:
        return f"phylon encode {where} --text {said}"
    return f"phylon show {where}"

"""``phylon score``: how probable a text is, or the classes that a model gives it."""

from typing import Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json


def score(
    model: ModelName,
    text: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to score; repeatable.")],
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Tell how probable each text is under the model; of a classifier, how probable each class is."""
    from phylon.generate import classifier, classify
    from phylon.generate import score as run
    from phylon.hub import load

    loaded = load(model, dtype=dtype, device=device)
    if loaded.decoder is None and classifier(loaded) is not None:
        classified = classify(loaded, text)
        print_json({"model": model, "classes": classified}) if as_json else print(_classes(classified))
        return
    results = run(loaded, text)
    if as_json:
        print_json({"model": model, "scores": results})
        return
    print(f"{'tokens':>7} {'log-prob':>11} {'nats/token':>11} {'perplexity':>11}  text")
    for result in results:
        figures = f"{result['total']:>11.3f} {result['mean_nll']:>11.4f} {result['perplexity']:>11.3f}"
        print(f"{result['n_scored']:>7} {figures}  {_shown(result['text'] or '')}")


def _classes(classified: list[Any]) -> str:
    """A line a text: its likeliest class and how probable that is."""
    width = max(5, *(len(found["label"]) for found in classified))
    lines = [f"{'class':<{width}} {'probability':>11}  text"]
    for found in classified:
        share = found["probabilities"][found["label"]]
        lines.append(f"{found['label']:<{width}} {share:>11.4f}  {_shown(found['text'])}")
    return "\n".join(lines)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 36 else text[:35] + "…"

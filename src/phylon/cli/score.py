"""``phylon score``: how probable a text is."""

from typing import Annotated

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json


def score(
    model: ModelName,
    text: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to score; repeatable.")],
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Tell how probable each text is under the model."""
    from phylon.generate import score as run
    from phylon.hub import load

    results = run(load(model, dtype=dtype, device=device), text)
    if as_json:
        print_json({"model": model, "scores": results})
        return
    print(f"{'tokens':>7} {'log-prob':>11} {'nats/token':>11} {'perplexity':>11}  text")
    for result in results:
        shown = " ".join((result["text"] or "").split())
        shown = shown if len(shown) <= 36 else shown[:35] + "…"
        figures = f"{result['total']:>11.3f} {result['mean_nll']:>11.4f} {result['perplexity']:>11.3f}"
        print(f"{result['n_scored']:>7} {figures}  {shown}")

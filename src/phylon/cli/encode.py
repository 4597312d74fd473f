"""``phylon encode``: vectors of texts, and how near they are to each other."""

from typing import Annotated

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json


def encode(
    model: ModelName,
    text: Annotated[list[str], typer.Option(metavar="TEXT", help="Text to encode; repeatable.")],
    pool: Annotated[str, typer.Option(metavar="NAME", help="mean over all tokens, or the first or last one.")] = "mean",
    max_tokens: Annotated[int | None, typer.Option(help="Cut longer texts to this many tokens.")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Turn each text into a vector of length 1, and compare them by cosine."""
    from phylon.generate import encode as run
    from phylon.hub import load

    vectors = run(load(model, dtype=dtype, device=device), text, pool=pool, max_tokens=max_tokens)  # type: ignore[arg-type]
    cosines = (vectors @ vectors.T).tolist()
    if as_json:
        print_json({"model": model, "dim": vectors.shape[1], "embeddings": vectors.tolist(), "cosines": cosines})
        return
    width = max(len(str(len(text))), 3)
    for i, (shown, row, vector) in enumerate(zip(text, cosines, vectors.tolist(), strict=True), start=1):
        shown = " ".join(shown.split())
        shown = shown if len(shown) <= 48 else shown[:47] + "…"
        figures = " ".join(f"{x:>7.4f}" for x in (row if len(text) > 1 else vector[:6]))
        print(f"{i:>{width}} {figures}{'' if len(text) > 1 else ' …'}  {shown}")

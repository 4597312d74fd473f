"""The sampling options of ``generate`` and ``chat``."""

from typing import Annotated

import typer

MaxNewTokens = Annotated[int, typer.Option(help="At most so many new tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the model's own, else 1")]
TopK = Annotated[
    int | None, typer.Option(help="Only the k most probable tokens.", show_default="the model's own, else all")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Only the fewest whose probabilities reach p.", show_default="the model's own, else 1"),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Only those with this share of the best one's probability.", show_default="the model's own, else 0"
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens seen before are less likely.", show_default="the model's own, else 1"),
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]

"""The sampling options of ``generate`` and ``chat``."""

from typing import Annotated, Any

import typer


def _option(metavar: str, text: str, otherwise: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=f"the model's own, else {otherwise}")


MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="At most so many new tokens.")]
Temperature = Annotated[float | None, _option("X", "0 is greedy.", "1")]
ChatTemperature = Annotated[float | None, _option("X", "0 is greedy.", "0")]
TopK = Annotated[int | None, _option("N", "Only the k most probable tokens.", "all")]
TopP = Annotated[float | None, _option("P", "Only the fewest whose probabilities reach p.", "1")]
MinP = Annotated[float | None, _option("P", "Only those with this share of the best one's probability.", "0")]
RepetitionPenalty = Annotated[float | None, _option("X", "Above 1: tokens seen before are less likely.", "1")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Same seed, same text.")]

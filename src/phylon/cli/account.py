"""``phylon account``: parameters, FLOPs and bytes."""

from typing import Annotated

import typer

from phylon.cli.common import Json, PresetOrModel, count, print_json, spec_of


def account(
    name: PresetOrModel,
    batch: Annotated[int, typer.Option(metavar="B", help="Rows.")] = 1,
    seq_len: Annotated[
        int | None, typer.Option(metavar="T", help="Tokens a row.", show_default="the longest the model takes")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of weights and state.")] = "float16",
    as_json: Json = False,
) -> None:
    """Count parameters, FLOPs and memory, without loading anything."""
    import msgspec

    from phylon.account import account as measure

    figures = measure(spec_of(name), batch=batch, seq_len=seq_len, dtype=dtype)
    data = {"model": name} | msgspec.to_builtins(figures)
    print_json(data) if as_json else print(page(data))


def page(data: dict) -> str:
    """The account as aligned text."""
    lines = [f"{data['model']}: batch {data['batch']}, seq_len {data['seq_len']}, {data['dtype']}", ""]
    for key in (
        "params_total", "params_active", "params_by_part", "",
        "flops_forward_per_token", "flops_forward_per_document", "flops_training_per_token", "",
        "weights_bytes", "training_bytes_fp32_adamw",
        "state_bytes_per_token", "state_bytes_fixed", "state_bytes_total", "state_index_bytes_total",
    ):  # fmt: skip
        if key == "params_by_part":
            lines += [_row(f"  {part}", number) for part, number in data[key].items()]
        elif key and (key != "flops_forward_per_document" or data[key]):
            lines.append(_row(key, data[key]))
        elif not key:
            lines.append("")
    if data["state_refused"]:
        lines += ["", f"no state: {data['state_refused']}"]
    return "\n".join(lines)


def _row(name: str, value: int | None) -> str:
    if value is None:
        return f"{name:<27}{'none':>24}"
    is_bytes, is_flops = "bytes" in name, "flops" in name
    short = (
        _scaled(value, 1024, "BKMGTPE", "iB") if is_bytes else _scaled(value, 1000, " KMGTPE", "") if is_flops else ""
    )
    return f"{name:<27}{count(value):>24}  {short}".rstrip()


def _scaled(value: float, base: int, letters: str, unit: str) -> str:
    """``2.0 GiB``, ``14.3 G``."""
    power = 0
    while value >= base and power < len(letters) - 1:
        value, power = value / base, power + 1
    return "" if power == 0 else f"{value:.1f} {letters[power]}{unit}"

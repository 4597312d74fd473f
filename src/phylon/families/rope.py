"""Rotary parameters in Hugging Face configurations, both ways."""

import math
from typing import Any

from phylon.families.base import Config, shown
from phylon.layers.positions.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    YarnScaling,
)
from phylon.spec.base import RopeScaling
from phylon.spec.errors import UserError


def read_rotary(
    config: Config,
    head_dim: int,
    max_seq_len: int,
    *,
    theta_key: str = "rope_theta",
    share_key: str = "partial_rotary_factor",
    default_theta: float = 10_000.0,
    default_share: float = 1.0,
) -> Rotary:
    """From ``rope_theta`` and ``rope_scaling``, or from the newer ``rope_parameters``.

    ``theta_key`` and ``share_key``: what this file calls those two outside of the tables.
    """
    theta = config.number(theta_key, default_theta)
    share = config.number(share_key, default_share)
    table = _one_table(config, theta)
    for key, inner in ((theta_key, "rope_theta"), (share_key, "partial_rotary_factor")):
        said = table.where.rpartition(" ")[2]
        config.agree({key: config.take(key, None), f"{said}.{inner}": table.take(inner, None)})
    theta, share = table.number("rope_theta", theta), table.number("partial_rotary_factor", share)
    width = int(head_dim * share)
    if share != 1 and (width < 2 or width % 2):
        raise UserError(
            f"{config.where}: 'partial_rotary_factor' {share:g} of a head of {head_dim} turns {width} features; "
            "it must be an even number of them"
        )
    parsed = _read_scaling(table, theta, max_seq_len)
    table.finish(beside="rope_type")
    return Rotary(theta=theta, dim=None if width == head_dim else width, scaling=parsed)


def _one_table(config: Config, theta: float) -> Config:
    """The newer table or the older one; both must say the same, ``theta`` standing where one leaves it out."""
    newer, older = (plain_table(config, key) for key in ("rope_parameters", "rope_scaling"))
    if newer and older:
        whole = {"rope_type": "default", "rope_theta": theta}
        for key in {**newer, **older}:
            both = {name: (whole | table).get(key) for name, table in (("parameters", newer), ("scaling", older))}
            config.agree({f"rope_{name}.{key}": value for name, value in both.items()})
            if None in both.values():
                name = next(f"rope_{name}" for name, value in both.items() if value is None)
                raise UserError(f"{config.where} has both rope_parameters and rope_scaling, and '{name}' lacks '{key}'")
    name = "rope_scaling" if newer is None else "rope_parameters"
    return Config(newer or older or {}, f"{config.where} {name}")


def plain_table(config: Config, key: str, table: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """A table (that of ``key`` unless given) without its nulls, an older ``type`` under its newer name."""
    table = config.take(key, None, dict) if table is None else table
    if table is None:
        return None
    config.agree({f"{key}.{name}": table.get(name) for name in ("rope_type", "type")})
    kind = {"rope_type": table["type"]} if table.get("type") is not None else {}
    return kind | {name: value for name, value in table.items() if value is not None and name != "type"}


def _read_scaling(table: Config, theta: float, max_seq_len: int) -> RopeScaling | None:
    kind = table.take("rope_type", "default", str)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=table.number("factor", above=0))
    original = table.size("original_max_position_embeddings", max_seq_len)
    if kind == "dynamic":
        # Static at the length the model was made for: an override of ``seq_len`` stretches it further.
        factor = table.number("factor", above=0)
        return DynamicNTKScaling(factor=factor, original_max_seq_len=max_seq_len, seq_len=max_seq_len)
    if kind == "llama3":
        return Llama3Scaling(
            factor=table.number("factor", above=0),
            low_freq_factor=table.number("low_freq_factor", above=0),
            high_freq_factor=table.number("high_freq_factor", above=0),
            original_max_seq_len=original,
        )
    if kind == "yarn":
        factor = table.number("factor", max_seq_len / original, above=0)
        attention, mscale, mscale_all = (
            table.number(key) if table.take(key, None) is not None else None
            for key in ("attention_factor", "mscale", "mscale_all_dim")
        )
        table.ignore("finetuned", "attn_factor")  # of the first code for YaRN; the reference reads neither
        if attention is None and mscale and mscale_all:
            attention = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        return YarnScaling(
            factor=factor,
            original_max_seq_len=original,
            beta_fast=table.number("beta_fast", 32.0, above=0),
            beta_slow=table.number("beta_slow", 1.0, above=0),
            attention_factor=attention,
            round_ramp=table.take("truncate", True, bool),
        )
    known = "default, linear, dynamic, yarn, llama3"
    raise UserError(f"{table.where}: 'rope_type' is {shown(kind)}, which is not supported (known: {known})")


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def yarn_scale(width: int, factor: float, mscale: float) -> float | None:
    """The scale of scores for ``mscale_all_dim`` in heads of ``width``, or ``None`` where it is the default.

    YaRN multiplies queries and keys by a temperature; DeepSeek's reference puts the part for all dimensions, squared,
    into the scale (arXiv:2412.19437, the released code).
    """
    temperature = _mscale(factor, mscale)
    return None if temperature == 1 else width**-0.5 * temperature * temperature


def read_attention_scale(config: Config, rotary: Rotary, width: int) -> float | None:
    """The scale that ``mscale_all_dim`` of a YaRN table asks for."""
    table = config.take("rope_parameters", None, dict) or config.take("rope_scaling", None, dict) or {}
    every = table.get("mscale_all_dim")
    if not isinstance(rotary.scaling, YarnScaling) or not every:
        return None
    return yarn_scale(width, rotary.scaling.factor, float(every))


def write_scaled(written: dict[str, Any], rotary: Rotary, width: int, scale: float | None) -> dict[str, Any]:
    """What ``write_rotary`` has written, with the scale of scores said as ``mscale_all_dim``."""
    if scale is None:
        return written
    if not isinstance(rotary.scaling, YarnScaling) or rotary.scaling.factor <= 1:
        raise UserError(f"an attention scale of {scale} cannot be said without YaRN; leave it out")
    factor = rotary.scaling.factor
    temperature = math.sqrt(scale * width**0.5)
    every = round((temperature - 1) / (0.1 * math.log(factor)), 12)
    if yarn_scale(width, factor, every) != scale:
        raise UserError(f"an attention scale of {scale} is no YaRN temperature of this format")
    table = written["rope_scaling"] | {"mscale_all_dim": every}
    if rotary.scaling.attention_factor is not None:
        # What readers of before ``attention_factor`` go by.
        table["mscale"] = round((rotary.scaling.attention_factor * temperature - 1) / (0.1 * math.log(factor)), 12)
    return written | {"rope_scaling": table}


def _share(dim: int, head_dim: int) -> float:
    """The share that every reader, which rounds ``share x head_dim`` down, turns into ``dim`` again."""
    share = dim / head_dim
    return share if int(share * head_dim) == dim else math.nextafter(share, 1.0)


def write_rotary(rotary: Rotary, head_dim: int, max_seq_len: int) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, which older and newer readers both understand."""
    config: dict[str, Any] = {"rope_theta": rotary.theta}
    if rotary.dim is not None:
        config["partial_rotary_factor"] = _share(rotary.dim, head_dim)
    scaling = rotary.scaling
    if scaling is None:
        return config
    if isinstance(scaling, LinearScaling):
        table: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicNTKScaling):
        if scaling.seq_len != max_seq_len or scaling.original_max_seq_len != max_seq_len:
            raise UserError("dynamic NTK resolved to another length than max_seq_len cannot be said in this format")
        table = {"rope_type": "dynamic", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        table = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    elif isinstance(scaling, YarnScaling):
        table = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
        if scaling.attention_factor is not None:
            table["attention_factor"] = scaling.attention_factor
        if not scaling.round_ramp:
            table["truncate"] = False
    else:
        raise UserError(f"{type(scaling).__name__} cannot be said in this format; fold it into theta")
    return {**config, "rope_scaling": table}

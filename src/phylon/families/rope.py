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
    config: Config, head_dim: int, max_seq_len: int, *, default_theta: float = 10_000.0, default_share: float = 1.0
) -> Rotary:
    """From ``rope_theta`` and ``rope_scaling``, or from the newer ``rope_parameters``."""
    theta = config.number("rope_theta", default_theta)
    share = config.number("partial_rotary_factor", default_share)
    scaling = config.take("rope_scaling", None, dict)
    newer = config.take("rope_parameters", None, dict)
    if newer is not None:
        if scaling is not None and scaling != newer:
            raise UserError(f"{config.where} has both rope_parameters and rope_scaling, and they differ: remove one")
        table = _table(newer, f"{config.where} rope_parameters")
        theta, share = table.number("rope_theta", theta), table.number("partial_rotary_factor", share)
    else:
        table = _table(scaling or {}, f"{config.where} rope_scaling")
    width = int(head_dim * share)
    if share != 1 and (width < 2 or width % 2):
        raise UserError(
            f"{config.where}: 'partial_rotary_factor' {share:g} of a head of {head_dim} turns {width} features; "
            "it must be an even number of them"
        )
    parsed = _read_scaling(table, theta, max_seq_len)
    table.finish(beside="rope_type")
    return Rotary(theta=theta, dim=None if width == head_dim else width, scaling=parsed)


def _table(data: dict[str, Any], where: str) -> Config:
    """One table, nulls left out; an older ``type`` counts where there is no ``rope_type``."""
    said = {key: value for key, value in data.items() if value is not None}
    kind = {"rope_type": said["type"]} if "type" in said else {}
    return Config({**kind, **{key: value for key, value in said.items() if key != "type"}}, where)


def _read_scaling(table: Config, theta: float, max_seq_len: int) -> RopeScaling | None:
    kind = table.take("rope_type", "default", str)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=table.number("factor", above=0))
    original = int(table.number("original_max_position_embeddings", max_seq_len, above=0.5))
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

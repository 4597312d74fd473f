"""Mamba-2: Mamba's block with a scalar decay a head, a wide state and a norm before the output map.

Dao and Gu (arXiv:2405.21060), sections 7.1 and 9.2. The released models pad GPT-NeoX's vocabulary to 50,288.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Concat, Layout, Rename
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import decoder_of, op_of
from phylon.families.mamba import mixer_rules, mixer_stack, read_shared, stack_rules, write_shared
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.mixers.mamba2 import Mamba2
from phylon.layers.norms import RMSNorm
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError


@sized
def mamba2_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int | None = None,
    head_dim: int = 64,
    n_groups: int = 1,
    d_state: int = 128,
    d_conv: int = 4,
    expand: int = 2,
    vocab_size: int = 4096,
    eps: float = 1e-5,
    bias: bool = False,
    conv_bias: bool = True,
    activation: str = "silu",
    dt_low: float = 0.0,
    dt_high: float | None = None,
    dt_min: float = 1e-3,
    dt_max: float = 1e-1,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A Mamba-2 decoder; ``n_heads`` defaults to ``expand x d_model / head_dim``."""
    if n_heads is None and expand * d_model % head_dim:
        raise UserError(f"expand x d_model {expand * d_model} is no multiple of head_dim {head_dim}; give n_heads")
    mixer = Mamba2(
        n_heads=n_heads or expand * d_model // head_dim,
        head_dim=head_dim,
        n_groups=n_groups,
        d_state=d_state,
        d_conv=d_conv,
        bias=bias,
        conv_bias=conv_bias,
        activation=activation,
        eps=eps,
        dt_low=dt_low,
        dt_high=dt_high,
        dt_min=dt_min,
        dt_max=dt_max,
    )
    return mixer_stack(mixer, d_model, n_layers, vocab_size, eps, tied, init)


def read_config(config: Config) -> ModelSpec:
    shared = read_shared(config)
    n_heads, head_dim = config.size("num_heads"), config.size("head_dim")
    expand = n_heads * head_dim / shared["d_model"]
    config.expect("expand", expand, why="num_heads x head_dim must be expand x hidden_size")
    low, high = _limits(config)
    config.expect("intermediate_size", n_heads * head_dim, why="the inner width is num_heads x head_dim")
    # How the scan is cut up; and leftovers without effect: the norm always comes after the gate, whatever is written.
    config.ignore("chunk_size", "time_step_rank", "norm_before_gate")
    spec = mamba2_spec(
        **shared,
        n_heads=n_heads,
        head_dim=head_dim,
        n_groups=config.size("n_groups", 8),
        dt_low=low,
        dt_high=high,
        tied=config.take("tie_word_embeddings", False, bool),
    )
    config.finish()
    return spec


def _limits(config: Config) -> tuple[float, float | None]:
    """The bounds of the step sizes; infinity is written as a number, or as ``{"__float__": "Infinity"}``."""
    value = config.take("time_step_limit", [0.0, None], list)
    bounds = [b.get("__float__") if isinstance(b, dict) else b for b in value]
    numbers = [float("inf") if b in (None, "Infinity") else b for b in bounds]
    if len(numbers) != 2 or not all(isinstance(b, int | float) and not isinstance(b, bool) for b in numbers):
        raise UserError(f"{config.where}: 'time_step_limit' must be two numbers, got {value!r}")
    low, high = map(float, numbers)
    return low, None if high == float("inf") else high


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    mixer = op_of(stack, "mixer", Mamba2)
    if mixer.inner % stack.d_model:
        raise UserError(f"this format needs n_heads x head_dim, {mixer.inner}, to be a multiple of {stack.d_model}")
    if not isinstance(stack.norm_final, RMSNorm) or stack.norm_final.eps != mixer.eps:
        raise UserError("this format has one eps for all norms")
    bounds = [mixer.dt_low, {"__float__": "Infinity"} if mixer.dt_high is None else mixer.dt_high]
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **write_shared(spec, mixer),
        "num_heads": mixer.n_heads,
        "head_dim": mixer.head_dim,
        "n_groups": mixer.n_groups,
        "expand": mixer.inner // stack.d_model,
        **({} if mixer.dt_low == 0 and mixer.dt_high is None else {"time_step_limit": bounds}),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "backbone.layers.{i}.mixer.", "decoder.blocks.{i}.mixer."
    mixer = op_of(decoder_of(spec), "mixer", Mamba2)
    parts = tuple(f"{ours}{name}.{{p}}" for name in ("gate_proj", "in_proj", "dt_proj"))
    return Layout(
        [
            *stack_rules(spec),
            *mixer_rules(theirs, ours),
            Concat(theirs + "in_proj.{p}", parts, (mixer.inner, sum(mixer.widths), mixer.n_heads)),
            Rename(theirs + "dt_bias", ours + "dt_bias"),
            Rename(theirs + "norm.weight", ours + "norm.weight"),
        ]
    )


def _cases() -> list[ModelSpec]:
    tiny = partial(mamba2_spec, d_model=24, n_layers=2, vocab_size=37, dt_min=0.02, dt_max=0.2)
    return [
        tiny(head_dim=16, d_state=5),
        tiny(n_heads=12, head_dim=6, n_groups=4, d_state=4, d_conv=3, bias=True, conv_bias=False, tied=False),
        tiny(head_dim=8, n_groups=2, d_state=8, dt_low=0.01, dt_high=0.5),
    ]


_mamba2 = partial(mamba2_spec, vocab_size=50_288)

register_family(
    Family(
        name="mamba2",
        title="Mamba-2",
        paper="arXiv:2405.21060",
        builder=mamba2_spec,
        presets={
            "mamba2-130m": partial(_mamba2, d_model=768, n_layers=24),
            "mamba2-370m": partial(_mamba2, d_model=1024, n_layers=48),
            "mamba2-780m": partial(_mamba2, d_model=1536, n_layers=48),
            "mamba2-1.3b": partial(_mamba2, d_model=2048, n_layers=48),
            "mamba2-2.7b": partial(_mamba2, d_model=2560, n_layers=64),
            "mamba-codestral-7b": partial(
                mamba2_spec, d_model=4096, n_layers=64, n_groups=8, vocab_size=32_768, tied=False
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("mamba2",), read=read_config, write=write_config, layout=hf_layout),
            "Mamba2",
            base="backbone.",
            text=False,
            token=None,
            span=None,
        ),
        golden={
            "mamba2-130m": 128_989_632,
            "mamba2-370m": 368_346_624,
            "mamba2-780m": 780_161_280,
            "mamba2-1.3b": 1_343_757_312,
            "mamba2-2.7b": 2_702_599_680,
            "mamba-codestral-7b": 7_285_403_648,
        },
    )
)

"""Mamba: a stack of selective state-space blocks, without attention.

Gu and Dao (arXiv:2312.00752), section 3.4 and table 12. The released models pad the vocabulary of GPT-NeoX to 50,280
and tie the head to the embedding.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Concat, Layout, Rename, Reshaped, Rule, Tied
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import TIED_HEAD, activation_name, decoder_of, hf_activation, is_tied, op_of, part
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import DepthScaledInit
from phylon.layers.mixers.mamba import Mamba
from phylon.layers.norms import RMSNorm
from phylon.model.spec import Block, ModelSpec, Stack, pre_norm
from phylon.spec.base import Init, Mixer


@sized
def mamba_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    d_state: int = 16,
    d_conv: int = 4,
    expand: int = 2,
    dt_rank: int | None = None,
    vocab_size: int = 4096,
    eps: float = 1e-5,
    bias: bool = False,
    conv_bias: bool = True,
    activation: str = "silu",
    dt_min: float = 1e-3,
    dt_max: float = 1e-1,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A Mamba decoder; ``dt_rank`` defaults to ``d_model / 16``, rounded up."""
    mixer = Mamba(
        d_state=d_state,
        d_conv=d_conv,
        expand=expand,
        dt_rank=dt_rank or -(-d_model // 16),
        bias=bias,
        conv_bias=conv_bias,
        activation=activation,
        dt_min=dt_min,
        dt_max=dt_max,
    )
    return mixer_stack(mixer, d_model, n_layers, vocab_size, eps, tied, init)


def mixer_stack(
    mixer: Mixer, d_model: int, n_layers: int, vocab_size: int, eps: float, tied: bool, init: Init | None
) -> ModelSpec:
    """Blocks of one pre-norm mixer each, RMSNorm, language-model head: what Mamba and Mamba-2 share."""
    norm = RMSNorm(eps=eps)
    block = Block(sublayers=(pre_norm(mixer, norm),))
    return ModelSpec(
        decoder=Stack(
            d_model=d_model, embed=TokenEmbed(vocab_size=vocab_size), blocks=(block,) * n_layers, norm_final=norm
        ),
        heads={"lm": LMHead(vocab_size=vocab_size)},
        ties=(TIED_HEAD,) if tied else (),
        init=init or DepthScaledInit(std=0.02),
    )


def read_shared(config: Config) -> dict[str, Any]:
    """The keys that Mamba and Mamba-2 configurations have in common, as arguments of both builders."""
    # How a new model is drawn, and in which precision the residual stream is kept: no part of the maths.
    config.ignore("time_step_floor", "time_step_scale", "time_step_init_scheme")
    config.ignore("rescale_prenorm_residual", "residual_in_fp32")
    config.expect("rms_norm", True, why="the norms are RMSNorms")
    return {
        "d_model": config.size("hidden_size"),
        "n_layers": config.depth("num_hidden_layers"),
        "d_state": config.size("state_size"),
        "d_conv": config.size("conv_kernel", 4),
        "vocab_size": config.size("vocab_size"),
        "eps": config.number("layer_norm_epsilon", 1e-5),
        "bias": config.take("use_bias", False, bool),
        "conv_bias": config.take("use_conv_bias", True, bool),
        "activation": activation_name(config, "hidden_act", "silu"),
        "dt_min": config.number("time_step_min", 1e-3),
        "dt_max": config.number("time_step_max", 1e-1),
    }


def write_shared(spec: ModelSpec, mixer: Any) -> dict[str, Any]:
    """The reverse of ``read_shared``."""
    stack = decoder_of(spec)
    return {
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "state_size": mixer.d_state,
        "conv_kernel": mixer.d_conv,
        "vocab_size": part(stack.embed, TokenEmbed, "the embedding").vocab_size,
        "layer_norm_epsilon": part(stack.norm_final, RMSNorm, "the final norm").eps,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "hidden_act": hf_activation(mixer.activation),
        "time_step_min": mixer.dt_min,
        "time_step_max": mixer.dt_max,
        "tie_word_embeddings": is_tied(spec),
    }


def read_config(config: Config) -> ModelSpec:
    shared = read_shared(config)
    expand = config.size("expand", 2, most=64)
    rank = config.take("time_step_rank", "auto", (int, str))
    config.expect("intermediate_size", expand * shared["d_model"], why="the inner width is expand x hidden_size")
    # Which code runs the scan, and what the released configurations say twice or keep of the authors' own format.
    config.ignore("use_mambapy", "use_associative_scan", "fused_add_norm", "pad_vocab_size_multiple")
    # The authors' own names of two keys.
    config.name_of("hidden_size", "d_model")
    config.name_of("num_hidden_layers", "n_layer")
    config.expect("d_inner", expand * shared["d_model"], why="the inner width is expand x hidden_size")
    config.expect("ssm_cfg", {}, why="the options of the block have keys of their own")
    spec = mamba_spec(
        **shared,
        expand=expand,
        dt_rank=None if rank == "auto" else config.size("time_step_rank"),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    mixer = op_of(decoder_of(spec), "mixer", Mamba)
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        **write_shared(spec, mixer),
        "expand": mixer.expand,
        "intermediate_size": mixer.expand * decoder_of(spec).d_model,
        "time_step_rank": mixer.dt_rank,
    }


def hf_layout(spec: ModelSpec) -> Layout:
    stack = decoder_of(spec)
    inner = op_of(stack, "mixer", Mamba).expand * stack.d_model
    return Layout([*stack_rules(spec), *mamba_rules("backbone.layers.{i}.mixer.", "decoder.blocks.{i}.mixer.", inner)])


def mamba_rules(theirs: str, ours: str, inner: int) -> list[Rule]:
    """A Mamba mixer of ``inner`` channels under a prefix; Jamba's layout has the same names and three norms more."""
    return [
        *mixer_rules(theirs, ours),
        Concat(theirs + "in_proj.{p}", (ours + "in_proj.{p}", ours + "gate_proj.{p}"), (inner, inner)),
        Rename(theirs + "x_proj.weight", ours + "x_proj.weight"),
        Rename(theirs + "dt_proj.weight", ours + "dt_proj.weight"),
        Rename(theirs + "dt_proj.bias", ours + "dt_bias"),
    ]


def mixer_rules(theirs: str, ours: str) -> list[Rule]:
    """What the mixers of Mamba and Mamba-2 have in common: all but the maps into the scan."""
    return [
        Rename(theirs + "A_log", ours + "A_log"),
        Rename(theirs + "D", ours + "D"),
        # A depthwise convolution's weight is stored (channels, 1, width).
        Reshaped(theirs + "conv1d.weight", ours + "conv.weight", lambda w: w.squeeze(1), lambda w: w.unsqueeze(1)),
        Rename(theirs + "conv1d.bias", ours + "conv.bias"),
        Rename(theirs + "out_proj.{p}", ours + "out_proj.{p}"),
    ]


def stack_rules(spec: ModelSpec) -> list[Rule]:
    """Embedding, norms and head of ``mixer_stack``."""
    # The authors' own checkpoints call the embedding in the singular.
    other = "backbone.embedding.weight"
    names = ("lm_head.weight", other) if is_tied(spec) else (other,)
    rules: list[Rule] = [
        Tied("backbone.embeddings.weight", "decoder.embed.tokens.weight", names),
        Rename("backbone.layers.{i}.norm.weight", "decoder.blocks.{i}.mixer_norm.weight"),
        Rename("backbone.norm_f.weight", "decoder.norm_final.weight"),
    ]
    return rules if is_tied(spec) else [*rules, Rename("lm_head.weight", "heads.lm.proj.weight")]


def _cases() -> list[ModelSpec]:
    tiny = partial(mamba_spec, d_model=24, n_layers=2, vocab_size=37, dt_min=0.2, dt_max=2.0)
    return [
        tiny(d_state=5),
        tiny(d_state=4, d_conv=3, expand=3, dt_rank=5, bias=True, conv_bias=False, activation="gelu", tied=False),
    ]


_mamba = partial(mamba_spec, vocab_size=50_280)

register_family(
    Family(
        name="mamba",
        title="Mamba",
        paper="arXiv:2312.00752",
        builder=mamba_spec,
        presets={
            "mamba-130m": partial(_mamba, d_model=768, n_layers=24),
            "mamba-370m": partial(_mamba, d_model=1024, n_layers=48),
            "mamba-790m": partial(_mamba, d_model=1536, n_layers=48),
            "mamba-1.4b": partial(_mamba, d_model=2048, n_layers=48),
            "mamba-2.8b": partial(_mamba, d_model=2560, n_layers=64),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("mamba",), read=read_config, write=write_config, layout=hf_layout),
            "Mamba",
            base="backbone.",
            text=False,
            token=None,
            span=None,
        ),
        golden={
            "mamba-130m": 129_135_360,
            "mamba-370m": 371_516_416,
            "mamba-790m": 793_204_224,
            "mamba-1.4b": 1_372_178_432,
            "mamba-2.8b": 2_768_345_600,
        },
    )
)

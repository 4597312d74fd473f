"""Jamba: attention, Mamba and experts in one stack. Lieber et al. (arXiv:2403.19887), section 3.1 and table 1.

Of every eight blocks one mixes by attention, without any positions, and the others by Mamba with norms on Δ, B and C
(section 6.4); every other block has sixteen experts, of which a token uses two, weighed by plain probabilities.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Concat, Layout, Rename, Reshaped, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    embed_of,
    embedding_rules,
    head_width,
    hf_activation,
    is_tied,
    norm_eps,
    part,
)
from phylon.families.sizes import sized
from phylon.families.sparse import expert_rules, gated_experts
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import SoftmaxRouter
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mamba import Mamba
from phylon.layers.norms import RMSNorm
from phylon.model.spec import Block, ModelSpec, Stack, pre_norm
from phylon.spec.base import FeedForward, Init, Mixer
from phylon.spec.errors import UserError


@sized
def jamba_spec(
    *,
    d_model: int = 256,
    n_layers: int = 8,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int = 512,
    n_experts: int = 16,
    top_k: int = 2,
    attention_period: int = 8,
    attention_offset: int = 4,
    expert_period: int = 2,
    expert_offset: int = 1,
    d_state: int = 16,
    d_conv: int = 4,
    expand: int = 2,
    dt_rank: int | None = None,
    conv_bias: bool = True,
    mamba_bias: bool = False,
    vocab_size: int = 4096,
    max_seq_len: int = 262_144,
    eps: float = 1e-6,
    activation: str = "silu",
    attention_dropout: float = 0.0,
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A Jamba-style decoder; ``head_dim`` is D / H. Block i mixes by attention where ``i % attention_period ==
    attention_offset``; it has experts where ``i % expert_period == expert_offset``."""
    for name, period, offset in (
        ("attention", attention_period, attention_offset),
        ("expert", expert_period, expert_offset),
    ):
        if not 0 <= offset < period:
            raise UserError(f"{name}_offset {offset} must be from 0 to below {name}_period {period}")
    norm = RMSNorm(eps=eps)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_dim=head_dim or head_width(d_model, n_heads),
        dropout=attention_dropout,
    )
    mamba = Mamba(
        d_state=d_state,
        d_conv=d_conv,
        expand=expand,
        dt_rank=dt_rank or -(-d_model // 16),
        bias=mamba_bias,
        conv_bias=conv_bias,
        activation=activation,
        inner_norm=norm,
    )
    dense = GLU(d_ff=d_ff, activation=activation)
    sparse = MoE(n_experts=n_experts, expert=dense, router=SoftmaxRouter(top_k=top_k)) if n_experts > 1 else dense

    def block(i: int) -> Block:
        mixer: Mixer = attention if i % attention_period == attention_offset else mamba
        ffn: FeedForward = sparse if i % expert_period == expert_offset else dense
        return Block(sublayers=(pre_norm(mixer, norm), pre_norm(ffn, norm)))

    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size),
        blocks=tuple(block(i) for i in range(n_layers)),
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    # Which code runs the scan, and what training adds to the loss.
    config.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    config.ignore("output_router_logits", "router_aux_loss_coef", "num_logits_to_keep", "n_ctx")
    config.ignore("calc_logits_for_entire_prompt")
    config.expect("sliding_window", None, why="the attention of Jamba sees the whole text")
    config.expect("mamba_inner_layernorms", True, why="the norms on dt, B and C are part of the family")
    rank = config.take("mamba_dt_rank", "auto", (int, str))
    n_heads = config.size("num_attention_heads", 32)
    spec = jamba_spec(
        d_model=config.size("hidden_size", 4096),
        n_layers=config.depth("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", None) if "num_key_value_heads" in config else 8,
        head_dim=config.size("head_dim", None),
        d_ff=config.size("intermediate_size", 14_336),
        n_experts=config.size(config.name_of("num_experts", "num_local_experts"), 16, most=65_536),
        top_k=config.size("num_experts_per_tok", 2, most=65_536),
        attention_period=config.size("attn_layer_period", 8),
        attention_offset=int(config.take("attn_layer_offset", 4, int)),
        expert_period=config.size("expert_layer_period", 2),
        expert_offset=int(config.take("expert_layer_offset", 1, int)),
        d_state=config.size("mamba_d_state", 16),
        d_conv=config.size("mamba_d_conv", 4),
        expand=config.size("mamba_expand", 2, most=64),
        dt_rank=None if rank == "auto" else config.size("mamba_dt_rank"),
        conv_bias=config.take("mamba_conv_bias", True, bool),
        mamba_bias=config.take("mamba_proj_bias", False, bool),
        vocab_size=config.size("vocab_size", 65_536),
        max_seq_len=config.size("max_position_embeddings", 262_144),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=activation_name(config, "hidden_act", "silu"),
        attention_dropout=config.number("attention_dropout", 0.0),
        tied=config.take("tie_word_embeddings", False, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    for block in stack.blocks:
        if set(block.ops()) not in ({"attn", "ffn"}, {"mixer", "ffn"}):
            raise UserError(
                f"this format needs attn or mixer, and ffn, in every block; one has {', '.join(block.ops())}"
            )
    places = [i for i, block in enumerate(stack.blocks) if "attn" in block.ops()]
    # Sizes that no block has, where all mix in one way.
    attention = Attention(n_heads=1, n_kv_heads=1, head_dim=stack.d_model)
    if places:
        attention = part(stack.blocks[places[0]].op("attn"), Attention, "attn")
    a_period, a_offset = _period(places, len(stack.blocks))
    moe, e_period, e_offset = _experts(stack)
    mixers = [b.op("mixer") for b in stack.blocks if "mixer" in b.ops()]
    unused = Mamba(d_state=16, d_conv=4, expand=2, dt_rank=-(-stack.d_model // 16))
    mamba = part(mixers[0] if mixers else unused, Mamba, "the mixer of the blocks without attention")
    expert = gated_experts(moe, SoftmaxRouter)
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        # No key of the reference's configuration; its attention looks for it and else takes D / H.
        **({} if attention.head_dim * attention.n_heads == stack.d_model else {"head_dim": attention.head_dim}),
        "attention_dropout": attention.dropout,
        "attn_layer_period": a_period,
        "attn_layer_offset": a_offset,
        "expert_layer_period": e_period,
        "expert_layer_offset": e_offset,
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.router.top_k,
        "intermediate_size": expert.d_ff,
        "hidden_act": hf_activation(expert.activation),
        "mamba_d_state": mamba.d_state,
        "mamba_d_conv": mamba.d_conv,
        "mamba_expand": mamba.expand,
        "mamba_dt_rank": mamba.dt_rank,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
        "vocab_size": embed_of(stack).vocab_size,
        "max_position_embeddings": spec.max_seq_len or 262_144,
        "rms_norm_eps": norm_eps(stack, RMSNorm),
        "tie_word_embeddings": is_tied(spec),
    }


def _experts(stack: Stack) -> tuple[MoE, int, int]:
    """The mixture with its period and offset; one expert everywhere where no block has several."""
    ffns = [block.op("ffn") for block in stack.blocks]
    if not any(isinstance(ffn, MoE) for ffn in ffns):
        return MoE(n_experts=1, expert=part(ffns[0], GLU, "ffn"), router=SoftmaxRouter(top_k=1)), 1, 0
    places = [i for i, ffn in enumerate(ffns) if isinstance(ffn, MoE)]
    return part(ffns[places[0]], MoE, "ffn"), *_period(places, len(ffns))


def _period(places: list[int], n_blocks: int) -> tuple[int, int]:
    """Period and offset of the blocks at ``places``; beyond the last block where there are none."""
    if not places:
        return n_blocks + 1, n_blocks
    return places[1] - places[0] if len(places) > 1 else n_blocks, places[0]


def hf_layout(spec: ModelSpec) -> Layout:
    stack = decoder_of(spec)
    theirs, ours = "model.layers.{i}.", "decoder.blocks.{i}."
    maps = ("gate_proj", "up_proj", "down_proj")
    rules: list[Rule] = [
        *embedding_rules(spec, "model.embed_tokens.weight", "lm_head.weight"),
        Rename("model.final_layernorm.weight", "decoder.norm_final.weight"),
        Rename(theirs + "pre_ff_layernorm.weight", ours + "ffn_norm.weight"),
        *(Rename(f"{theirs}self_attn.{m}_proj.weight", f"{ours}attn.{m}_proj.weight") for m in "qkvo"),
        *(Rename(f"{theirs}feed_forward.{m}.weight", f"{ours}ffn.{m}.weight") for m in maps),
        *expert_rules(theirs + "feed_forward.", ours + "ffn.", "router", maps),
        *_mamba_rules(stack, theirs + "mamba.", ours + "mixer."),
    ]
    # One foreign name for two of ours: the norm before the mixer, whichever that is.
    for i, block in enumerate(stack.blocks):
        name = "attn_norm" if "attn" in block.ops() else "mixer_norm"
        rules.append(Rename(f"model.layers.{i}.input_layernorm.weight", f"decoder.blocks.{i}.{name}.weight"))
    return Layout(rules)


def _mamba_rules(stack: Stack, theirs: str, ours: str) -> list[Rule]:
    mamba = next((b.op("mixer") for b in stack.blocks if "mixer" in b.ops()), None)
    if not isinstance(mamba, Mamba):
        return []
    inner = mamba.expand * stack.d_model
    same = ("x_proj.weight", "dt_proj.weight", "A_log", "D", "out_proj.{p}")
    return [
        Concat(theirs + "in_proj.{p}", (ours + "in_proj.{p}", ours + "gate_proj.{p}"), (inner, inner)),
        *(Rename(theirs + name, ours + name) for name in same),
        Rename(theirs + "dt_proj.bias", ours + "dt_bias"),
        # A depthwise convolution's weight is stored (channels, 1, width).
        Reshaped(theirs + "conv1d.weight", ours + "conv.weight", lambda w: w.squeeze(1), lambda w: w.unsqueeze(1)),
        Rename(theirs + "conv1d.bias", ours + "conv.bias"),
        *(Rename(f"{theirs}{p}_layernorm.weight", f"{ours}{p}_norm.weight") for p in ("dt", "b", "c")),
    ]


def _cases() -> list[ModelSpec]:
    tiny = partial(jamba_spec, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=37, d_ff=20, d_state=5)
    return [
        tiny(n_experts=4, attention_period=2, attention_offset=1, max_seq_len=64),
        tiny(n_experts=3, attention_period=2, attention_offset=0, expert_period=1, expert_offset=0, tied=True),
        tiny(n_experts=2, attention_period=2, attention_offset=1, head_dim=5),
    ]


register_family(
    Family(
        name="jamba",
        title="Jamba",
        paper="arXiv:2403.19887",
        builder=jamba_spec,
        presets={
            "jamba-v0.1": partial(
                jamba_spec, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14_336, vocab_size=65_536
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("jamba",), read=read_config, write=write_config, layout=hf_layout),
            "Jamba",
            token=None,
            span=None,
        ),
        golden={"jamba-v0.1": 51_570_323_328},
    )
)

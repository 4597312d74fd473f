"""Falcon: one or few key heads, attention and feed-forward in parallel.

Almazrouei et al. (arXiv:2311.16867), and RW-1B of Penedo et al. (arXiv:2306.01116). Three arrangements of the same
parts: 7B (one key head, one norm for both branches), 40B and 180B (a key head for each group, a norm each), and RW-1B
(every head its own keys, ALiBi, one branch after the other).

RW-1B scales its ALiBi with the scores, so its slopes are the paper's divided by ``sqrt(head_dim)``. The reference class
with ``attn_implementation="eager"`` adds the bias twice, once in the mask that it makes and once to the scores, and so
computes slopes twice as steep (about 9% off): its backends differ, which breaks the law. Ours is its "sdpa". Both round
slope and product to bfloat16, whereby the bias of a distance depends on where it stands; ours does not.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    drop_of,
    embed_of,
    embedding_rules,
    fused_qkv,
    head_width,
    hf_activation,
    is_tied,
    norm_eps,
    op_of,
    parallel,
    part,
    sequential,
)
from phylon.families.llama import whole_heads
from phylon.families.rope import read_rotary, write_rotary
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.rotary import Rotary
from phylon.layers.positions.score_bias import Alibi, alibi_slopes
from phylon.model.spec import Block, ModelSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError

_RESIDUALS = ("shared", "parallel", "sequential")


@sized
def falcon_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int = 1,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    eps: float = 1e-5,
    positions: str = "rotary",
    rotary: Rotary = Rotary(),  # noqa: B008 - frozen
    activation: str = "gelu",
    bias: bool = False,
    residual: str = "shared",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A Falcon-style decoder; ``d_ff`` is 4 D.

    ``residual``: "shared" (branches in parallel behind one norm), "parallel" (a norm each) or "sequential".
    ``positions``: "rotary" or "alibi".
    """
    if residual not in _RESIDUALS:
        raise UserError(f"residual must be one of {', '.join(_RESIDUALS)}, got '{residual}'")
    if positions not in ("rotary", "alibi"):
        raise UserError(f"positions must be 'rotary' or 'alibi', got '{positions}'")
    head_dim = head_width(d_model, n_heads)
    slopes = tuple(slope / head_dim**0.5 for slope in alibi_slopes(n_heads))
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rotary=rotary if positions == "rotary" else None,
        score_bias=Alibi(slopes=slopes) if positions == "alibi" else None,
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation, bias=bias)
    if residual == "sequential":
        block = sequential(attention, ffn, norm, drop=dropout)
    elif residual == "parallel":
        block = parallel(attention, ffn, norm_in=norm, drop=dropout)
    else:
        block = parallel(attention, ffn, norm_shared=norm, drop=dropout)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size),
        blocks=(block,) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    d_model, n_heads = config.size(config.name_of("hidden_size", "n_embed")), config.size("num_attention_heads")
    max_seq_len = config.size("max_position_embeddings", 2048)
    alibi = config.take("alibi", False, bool)
    why = "Falcon's residual is taken before the norm"
    config.expect("apply_residual_connection_post_layernorm", False, why=why)
    rotary = whole_heads(read_rotary(config, head_width(d_model, n_heads), max_seq_len), config.where)
    n_kv_heads, residual = _read_arrangement(config, n_heads)
    d_ff = config.size("ffn_hidden_size", None) or 4 * d_model
    # Kept by Falcon 2's files; the reference reads the width alone.
    config.expect("ff_factor", None, d_ff / d_model, why=f"the feed-forward width is {d_ff} ('ffn_hidden_size')")
    spec = falcon_spec(
        d_model=d_model,
        n_layers=config.depth("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_ff=d_ff,
        vocab_size=config.size("vocab_size"),
        max_seq_len=max_seq_len,
        eps=config.number("layer_norm_epsilon", 1e-5),
        positions="alibi" if alibi else "rotary",
        rotary=rotary,
        activation=activation_name(config, "activation", "gelu"),
        bias=config.take("bias", False, bool),
        residual=residual,
        attention_dropout=config.number("attention_dropout", 0.0),
        dropout=config.number("hidden_dropout", 0.0),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def _read_arrangement(config: Config, n_heads: int) -> tuple[int, str]:
    """How many key heads, and how the branches stand; the newer architecture ignores two of the older keys."""
    n_norms = config.size("num_ln_in_parallel_attn", None)
    n_kv_heads = config.size("num_kv_heads", None) or n_heads
    multi_query = config.take("multi_query", True, bool)
    beside = config.take("parallel_attn", True, bool)
    if config.take("new_decoder_architecture", False, bool):
        if n_norms not in (None, 1, 2):
            raise UserError(f"{config.where}: 'num_ln_in_parallel_attn' must be 1 or 2, got {n_norms}")
        if not beside:
            raise UserError(
                f"{config.where}: 'parallel_attn' is False beside 'new_decoder_architecture', whose branches always "
                "stand beside each other; no code runs the two together"
            )
        return n_kv_heads, "shared" if n_norms == 1 else "parallel"
    if not multi_query and n_kv_heads != n_heads:
        raise UserError(f"{config.where}: 'num_kv_heads' is {n_kv_heads}: groups need 'new_decoder_architecture'")
    if beside and n_norms == 2:
        raise UserError(f"{config.where}: 'num_ln_in_parallel_attn' is 2, which needs 'new_decoder_architecture'")
    return 1 if multi_query else n_heads, "shared" if beside else "sequential"


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP)
    max_seq_len = spec.max_seq_len or 2048
    rotary: dict[str, Any] = {}
    if attention.score_bias is None:
        whole = whole_heads(part(attention.rotary, Rotary, "attn.rotary"), "this format")
        rotary = write_rotary(whole, attention.head_dim, max_seq_len)
    one, all_ = attention.n_kv_heads == 1, attention.n_kv_heads == attention.n_heads
    newer = _residual(stack.blocks[0]) == "parallel" or not (one or all_)
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "num_kv_heads": attention.n_kv_heads if newer else attention.n_heads,
        "new_decoder_architecture": newer,
        "num_ln_in_parallel_attn": None if not newer else 2 if _residual(stack.blocks[0]) == "parallel" else 1,
        "multi_query": one,
        "parallel_attn": _residual(stack.blocks[0]) != "sequential",
        "ffn_hidden_size": ffn.d_ff,
        "vocab_size": embed_of(stack).vocab_size,
        "max_position_embeddings": max_seq_len,
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "alibi": attention.score_bias is not None,
        **rotary,
        "activation": hf_activation(ffn.activation),
        "bias": attention.qkv_bias,
        "attention_dropout": attention.dropout,
        "hidden_dropout": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def _residual(block: Block) -> str:
    if len(block.sublayers) > 1:
        return "sequential"
    return "parallel" if block.sublayers[0].norm_shared is None else "shared"


def hf_layout(spec: ModelSpec) -> Layout:
    stack = decoder_of(spec)
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    norms = {
        "shared": {"attn_norm_shared": "input_layernorm"},
        "parallel": {"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"},
        "sequential": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    }[_residual(stack.blocks[0])]
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "transformer.word_embeddings.weight", "lm_head.weight"),
        *(Rename(f"{theirs}{name}.{{p}}", f"{ours}{mine}.{{p}}") for mine, name in norms.items()),
        fused_qkv(theirs + "self_attention.query_key_value.{p}", op_of(stack, "attn", Attention)),
        Rename(theirs + "self_attention.dense.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.dense_h_to_4h.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.dense_4h_to_h.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
        Drop(theirs + "self_attention.rotary_emb.inv_freq", "computed from the configuration"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(falcon_spec, d_model=24, n_layers=2, n_heads=4, vocab_size=37, max_seq_len=64)
    return [
        tiny(n_heads=3, d_ff=50),
        tiny(n_kv_heads=2, residual="parallel", bias=True, tied=False),
        tiny(n_kv_heads=2, residual="shared"),
        tiny(n_kv_heads=4, residual="sequential", positions="alibi", bias=True),
    ]


_falcon = partial(falcon_spec, vocab_size=65_024)

register_family(
    Family(
        name="falcon",
        title="Falcon",
        paper="arXiv:2311.16867",
        builder=falcon_spec,
        presets={
            "falcon-rw-1b": partial(
                falcon_spec,
                d_model=2048,
                n_layers=24,
                n_heads=32,
                n_kv_heads=32,
                vocab_size=50_304,
                positions="alibi",
                residual="sequential",
                bias=True,
            ),
            "falcon-7b": partial(_falcon, d_model=4544, n_layers=32, n_heads=71),
            "falcon-40b": partial(_falcon, d_model=8192, n_layers=60, n_heads=128, n_kv_heads=8, residual="parallel"),
            "falcon-180b": partial(
                _falcon, d_model=14_848, n_layers=80, n_heads=232, n_kv_heads=8, residual="parallel", tied=False
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("falcon",), read=read_config, write=write_config, layout=hf_layout),
            "Falcon",
            base="transformer.",
            token="classifier",
        ),
        # In full from the reference class on the meta device.
        golden={
            "falcon-rw-1b": 1_311_625_216,
            "falcon-7b": 6_921_720_704,
            "falcon-40b": 41_303_293_952,
            "falcon-180b": 179_522_565_120,
        },
    )
)

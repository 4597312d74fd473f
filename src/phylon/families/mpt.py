"""MPT: a decoder without a single bias, ALiBi with slopes in an order of its own.

MosaicML 2023, *Introducing MPT-7B* and llm-foundry (released code and configurations); ALiBi: Press et al.
(arXiv:2108.12409), section 3.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Concat, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    causal_lm,
    decoder_of,
    drop_of,
    embed_of,
    embedding_rules,
    head_width,
    is_tied,
    norm_eps,
    op_of,
    part,
    sequential,
)
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.score_bias import Alibi
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError

_NOT_HERE = "no released MPT model uses it"


def mpt_slopes(n_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """``2^(-bias_max i / n)``; beyond a power of two, every second of the next power, then the others.

    The paper's order puts the whole lower power first (``alibi_slopes``).
    """
    power = 1 << (n_heads - 1).bit_length()
    slopes = [2 ** (-bias_max * (i + 1) / power) for i in range(power)]
    ordered = slopes if power == n_heads else slopes[1::2] + slopes[::2]
    return tuple(ordered[:n_heads])


@sized
def mpt_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    alibi_bias_max: float = 8.0,
    qkv_clip: float | None = None,
    scale: float | None = None,
    eps: float = 1e-5,
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """An MPT-style decoder; ``d_ff`` is 4 D."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_width(d_model, n_heads),
        score_bias=Alibi(slopes=mpt_slopes(n_heads, alibi_bias_max)),
        qkv_clip=qkv_clip,
        scale=scale,
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps, bias=False), MLP(d_ff=d_ff or 4 * d_model, bias=False)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, dropout=embed_dropout),
        blocks=(sequential(attention, ffn, norm, drop=dropout),) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    d_model = config.size(config.name_of("d_model", "hidden_size"))
    attention = _read_attention(Config(config.take("attn_config", None, dict) or {}, f"{config.where} attn_config"))
    config.expect("no_bias", True, why="MPT has no biases")
    config.expect("expansion_ratio", 4, why="the reference's feed-forwards are 4 times as wide whatever it says")
    config.expect("logit_scale", None, why=_NOT_HERE)
    norms = ("low_precision_layernorm", "layernorm", "low_precision_layer_norm")
    config.expect("norm_type", *norms, why="MPT's norms are LayerNorms")
    config.ignore("learned_pos_emb")  # said beside ALiBi, which then stands alone
    # How gradients, initialisation and the tokenizer of the training run were set up.
    config.ignore("embedding_fraction", "init_device", "init_config", "verbose", "tokenizer_name")
    config.expect("ffn_config", None, {}, {"ffn_type": "mptmlp"}, why="MPT's feed-forwards are plain GELU networks")
    spec = mpt_spec(
        d_model=d_model,
        n_layers=config.depth(config.name_of("n_layers", "num_hidden_layers")),
        n_heads=config.size(config.name_of("n_heads", "num_attention_heads")),
        d_ff=4 * d_model,
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size("max_seq_len", 2048),
        eps=config.number("layer_norm_epsilon", 1e-5),
        embed_dropout=config.number("emb_pdrop", 0.0),
        dropout=config.number("resid_pdrop", 0.0),
        tied=config.take("tie_word_embeddings", True, bool),
        **attention,
    )
    config.finish()
    return spec


def _read_attention(table: Config) -> dict[str, Any]:
    table.expect("attn_type", "multihead_attention", why=_NOT_HERE)
    table.expect("alibi", True, why="MPT without ALiBi has learned positions; no released model uses them")
    table.expect("prefix_lm", False, why=_NOT_HERE)
    table.expect("qk_ln", False, why="its norm spans all heads at once, and no released MPT model uses it")
    table.expect("attn_uses_sequence_id", False, why="segments say which tokens belong together")
    table.expect("attn_impl", "torch", "flash", "triton", None, why="it names the kernel of the training run")
    # 0 is no limit to the reference.
    clip = table.number("clip_qkv", above=0) if table.take("clip_qkv", None, (int, float)) else None
    scale = table.number("softmax_scale", above=0) if table.take("softmax_scale", None) is not None else None
    found = {
        "alibi_bias_max": table.number("alibi_bias_max", 8, above=0),
        "qkv_clip": clip,
        "scale": scale,
        "attention_dropout": table.number("attn_pdrop", 0.0),
    }
    table.finish()
    return found


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    if ffn.d_ff != 4 * stack.d_model:
        raise UserError(f"the reference of MPT has feed-forwards of 4 x d_model only, the model's is {ffn.d_ff}")
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": stack.d_model,
        "n_layers": len(stack.blocks),
        "n_heads": attention.n_heads,
        "expansion_ratio": 4,
        "vocab_size": embed.vocab_size,
        "max_seq_len": spec.max_seq_len,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": _bias_max(attention),
            "clip_qkv": attention.qkv_clip,
            "softmax_scale": attention.scale,
            "attn_pdrop": attention.dropout or 0,  # the reference takes whole numbers only
        },
        "learned_pos_emb": False,
        "no_bias": True,
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "emb_pdrop": embed.dropout,
        "resid_pdrop": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def _bias_max(attention: Attention) -> int:
    """The whole number that gives these slopes."""
    slopes = part(attention.score_bias, Alibi, "attn.score_bias").slopes
    for bias_max in range(1, 65):
        if mpt_slopes(attention.n_heads, bias_max) == slopes:
            return bias_max
    raise UserError("these ALiBi slopes are not MPT's for any alibi_bias_max from 1 to 64")


def departs(spec: ModelSpec) -> str | None:
    """Why the reference computes something else."""
    if _bias_max(op_of(decoder_of(spec), "attn", Attention)) == 8:
        return None
    return "its ALiBi ends at 2^-8, whatever alibi_bias_max says"


def hf_layout(spec: ModelSpec) -> Layout:
    attention = op_of(decoder_of(spec), "attn", Attention)
    size = attention.n_heads * attention.head_dim
    theirs, ours = "transformer.blocks.{i}.", "decoder.blocks.{i}."
    qkv = tuple(f"{ours}attn.{name}_proj.{{p}}" for name in "qkv")
    rules: list[Rule] = [
        *embedding_rules(spec, "transformer.wte.weight", "lm_head.weight"),
        Rename(theirs + "norm_1.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "norm_2.{p}", ours + "ffn_norm.{p}"),
        Concat(theirs + "attn.Wqkv.{p}", qkv, (size, size, size)),
        Rename(theirs + "attn.out_proj.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "ffn.up_proj.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "ffn.down_proj.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.norm_f.{p}", "decoder.norm_final.{p}"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(mpt_spec, d_model=24, n_layers=2, vocab_size=37, max_seq_len=64)
    return [
        tiny(n_heads=4),
        tiny(n_heads=3, qkv_clip=0.7, tied=False),
        tiny(n_heads=6, alibi_bias_max=16, scale=0.2, d_ff=48),
    ]


_mpt = partial(mpt_spec, vocab_size=50_432)

register_family(
    Family(
        name="mpt",
        title="MPT",
        paper="MosaicML 2023, Introducing MPT-7B",
        builder=mpt_spec,
        presets={
            "mpt-7b": partial(_mpt, d_model=4096, n_layers=32, n_heads=32),
            "mpt-7b-storywriter": partial(
                _mpt, d_model=4096, n_layers=32, n_heads=32, max_seq_len=65_536, alibi_bias_max=16, qkv_clip=6.0
            ),
            "mpt-30b": partial(_mpt, d_model=7168, n_layers=48, n_heads=64, max_seq_len=8192),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("mpt",), read=read_config, write=write_config, layout=hf_layout, departs=departs),
            "Mpt",
            base="transformer.",
            token="classifier",
        ),
        # The model cards' sizes; in full from the reference class on the meta device.
        golden={
            "mpt-7b": 6_649_286_656,
            "mpt-7b-storywriter": 6_649_286_656,
            "mpt-30b": 29_957_200_896,
        },
    )
)

"""GPT-NeoX and Pythia: attention and feed-forward in parallel with a norm each, rotary on a share of each head.

GPT-NeoX-20B: Black et al. (arXiv:2204.06745), section 2.1. Pythia: Biderman et al. (arXiv:2304.01373),
table 1. The 20B paper wished for one norm for both branches; by an oversight that it reports, each has its own.
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
from phylon.families.rope import read_rotary, write_rotary
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError

_SHARE = 0.25


@sized
def gpt_neox_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    eps: float = 1e-5,
    rotary: Rotary | None = None,
    activation: str = "gelu",
    attention_bias: bool = True,
    residual: str = "parallel",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A NeoX-style decoder; ``rotary`` turns a quarter of each head by default, ``d_ff`` is 4 D.

    ``residual`` "parallel" puts both branches in one sublayer, "sequential" one after the other.
    """
    if residual not in ("parallel", "sequential"):
        raise UserError(f"residual must be 'parallel' or 'sequential', got '{residual}'")
    head_dim = head_width(d_model, n_heads)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        rotary=rotary or Rotary(dim=int(head_dim * _SHARE)),
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    if residual == "parallel":
        block = parallel(attention, ffn, norm_in=norm, drop=dropout)
    else:
        block = sequential(attention, ffn, norm, drop=dropout)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, dropout=dropout),
        blocks=(block,) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    max_seq_len = config.size("max_position_embeddings", 2048)
    share_key = config.name_of("rotary_pct", "partial_rotary_factor")
    config.number(share_key, _SHARE, above=0)
    rotary = read_rotary(
        config,
        head_width(d_model, n_heads),
        max_seq_len,
        theta_key=config.name_of("rotary_emb_base", "rope_theta"),
        share_key=share_key,
        default_share=_SHARE,
    )
    # The classifier is no part of the language model, a decoder is what this always is, and two rates of the 20B's
    # training go by names that its reference does not read.
    config.ignore("classifier_dropout", "is_decoder", "attention_probs_dropout_prob", "hidden_dropout_prob")
    spec = gpt_neox_spec(
        d_model=d_model,
        n_layers=config.depth("num_hidden_layers"),
        n_heads=n_heads,
        d_ff=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_seq_len=max_seq_len,
        eps=config.number("layer_norm_eps", 1e-5),
        rotary=rotary,
        activation=activation_name(config, "hidden_act", "gelu"),
        attention_bias=config.take("attention_bias", True, bool),
        residual="parallel" if config.take("use_parallel_residual", True, bool) else "sequential",
        attention_dropout=config.number("attention_dropout", 0.0),
        dropout=config.number("hidden_dropout", 0.0),
        tied=config.take("tie_word_embeddings", False, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP)
    max_seq_len = spec.max_seq_len or 2048
    rotary = write_rotary(part(attention.rotary, Rotary, "attn.rotary"), attention.head_dim, max_seq_len)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "vocab_size": embed_of(stack).vocab_size,
        "max_position_embeddings": max_seq_len,
        "layer_norm_eps": norm_eps(stack, LayerNorm),
        "rotary_emb_base": rotary.pop("rope_theta"),
        "rotary_pct": rotary.pop("partial_rotary_factor", 1.0),
        **rotary,
        "hidden_act": hf_activation(ffn.activation),
        "attention_bias": attention.qkv_bias,
        "use_parallel_residual": len(stack.blocks[0].sublayers) == 1,
        "attention_dropout": attention.dropout,
        "hidden_dropout": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "gpt_neox.layers.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "gpt_neox.embed_in.weight", "embed_out.weight"),
        Rename(theirs + "input_layernorm.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "post_attention_layernorm.{p}", ours + "ffn_norm.{p}"),
        fused_qkv(theirs + "attention.query_key_value.{p}", op_of(decoder_of(spec), "attn", Attention)),
        Rename(theirs + "attention.dense.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.dense_h_to_4h.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.dense_4h_to_h.{p}", ours + "ffn.down_proj.{p}"),
        Rename("gpt_neox.final_layer_norm.{p}", "decoder.norm_final.{p}"),
        Drop(theirs + "attention.rotary_emb.inv_freq", "computed from the configuration"),
        Drop(theirs + "attention.bias", "the causal mask, which the pattern says"),
        Drop(theirs + "attention.masked_bias", "the masked score, which the kernels know"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(gpt_neox_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [
        tiny(),
        tiny(rotary=Rotary(theta=500.0), activation="gelu_tanh", d_ff=50, tied=True),
        tiny(residual="sequential", attention_bias=False, rotary=Rotary(dim=4)),
    ]


def _pythia(d_model: int, n_layers: int, n_heads: int, vocab_size: int = 50_304) -> partial[ModelSpec]:
    return partial(gpt_neox_spec, d_model=d_model, n_layers=n_layers, n_heads=n_heads, vocab_size=vocab_size)


register_family(
    Family(
        name="gpt_neox",
        title="GPT-NeoX, Pythia",
        paper="arXiv:2204.06745, arXiv:2304.01373",
        builder=gpt_neox_spec,
        presets={
            "gpt-neox-20b": partial(
                gpt_neox_spec, d_model=6144, n_layers=44, n_heads=64, vocab_size=50_432, activation="gelu_tanh"
            ),
            "pythia-70m": _pythia(512, 6, 8),
            "pythia-160m": _pythia(768, 12, 12),
            "pythia-410m": _pythia(1024, 24, 16),
            "pythia-1b": _pythia(2048, 16, 8),
            "pythia-1.4b": _pythia(2048, 24, 16),
            "pythia-2.8b": _pythia(2560, 32, 32),
            "pythia-6.9b": _pythia(4096, 32, 32, 50_432),
            "pythia-12b": _pythia(5120, 36, 40, 50_688),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("gpt_neox",), read=read_config, write=write_config, layout=hf_layout),
            "GPTNeoX",
            base="gpt_neox.",
            token="classifier",
        ),
        # Pythia: table 1 of its paper ("total"); all checked against the reference class on the meta device.
        golden={
            "gpt-neox-20b": 20_554_567_680,
            "pythia-70m": 70_426_624,
            "pythia-160m": 162_322_944,
            "pythia-410m": 405_334_016,
            "pythia-1b": 1_011_781_632,
            "pythia-1.4b": 1_414_647_808,
            "pythia-2.8b": 2_775_208_960,
            "pythia-6.9b": 6_857_302_016,
            "pythia-12b": 11_846_072_320,
        },
    )
)

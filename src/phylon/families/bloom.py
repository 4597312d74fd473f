"""BLOOM: ALiBi in place of positions, a norm behind the embedding, biases everywhere.

BigScience Workshop (arXiv:2211.05100), section 3.2 and table 3; ALiBi: Press et al. (arXiv:2108.12409), section 3.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    causal_lm,
    decoder_of,
    drop_of,
    embed_of,
    embedding_rules,
    fused_qkv,
    head_width,
    is_tied,
    norm_eps,
    op_of,
    sequential,
)
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.score_bias import Alibi, alibi_slopes
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init


@sized
def bloom_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    eps: float = 1e-5,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A BLOOM-style decoder; the feed-forward is 4 D wide."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_width(d_model, n_heads),
        qkv_bias=True,
        out_bias=True,
        score_bias=Alibi(slopes=alibi_slopes(n_heads)),
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=4 * d_model, activation="gelu_tanh")
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, norm=norm),
        blocks=(sequential(attention, ffn, norm, drop=dropout),) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    config.expect(
        "apply_residual_connection_post_layernorm",
        False,
        why="a residual taken behind the norm needs two norms in a row on the embedding, which no block can say",
    )
    # How the training was fused and cut over devices changes the rounding, not the maths; a softmax does not see an
    # offset of its positions.
    config.ignore("slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion", "offset_alibi")
    config.ignore("masked_softmax_fusion", "attention_softmax_in_fp32", "unk_token")
    d_model = config.size(config.name_of("hidden_size", "n_embed"))
    config.expect("n_inner", None, 4 * d_model, why="BLOOM's feed-forward is four times its width")
    spec = bloom_spec(
        d_model=d_model,
        n_layers=config.depth(config.name_of("n_layer", "num_hidden_layers")),
        n_heads=config.size(config.name_of("n_head", "num_attention_heads")),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size("seq_length", 2048),
        eps=config.number("layer_norm_epsilon", 1e-5),
        attention_dropout=config.number("attention_dropout", 0.0),
        dropout=config.number("hidden_dropout", 0.0),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention = op_of(stack, "attn", Attention)
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": stack.d_model,
        "n_layer": len(stack.blocks),
        "n_head": attention.n_heads,
        "vocab_size": embed_of(stack).vocab_size,
        "seq_length": spec.max_seq_len,
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "attention_dropout": attention.dropout,
        "hidden_dropout": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    rules: list[Rule] = [
        *embedding_rules(spec, "transformer.word_embeddings.weight", "lm_head.weight"),
        Rename("transformer.word_embeddings_layernorm.{p}", "decoder.embed.norm.{p}"),
        Rename(theirs + "input_layernorm.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "post_attention_layernorm.{p}", ours + "ffn_norm.{p}"),
        fused_qkv(theirs + "self_attention.query_key_value.{p}", op_of(decoder_of(spec), "attn", Attention)),
        Rename(theirs + "self_attention.dense.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.dense_h_to_4h.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.dense_4h_to_h.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
    ]
    return Layout(rules, optional_prefix="transformer.")


def _cases() -> list[ModelSpec]:
    tiny = partial(bloom_spec, d_model=24, n_layers=2, vocab_size=37, max_seq_len=64)
    return [tiny(n_heads=4), tiny(n_heads=3, tied=False), tiny(n_heads=6)]


_bloom = partial(bloom_spec, vocab_size=250_880, max_seq_len=2048)

register_family(
    Family(
        name="bloom",
        title="BLOOM",
        paper="arXiv:2211.05100",
        builder=bloom_spec,
        presets={
            "bloom-560m": partial(_bloom, d_model=1024, n_layers=24, n_heads=16),
            "bloom-1b1": partial(_bloom, d_model=1536, n_layers=24, n_heads=16),
            "bloom-1b7": partial(_bloom, d_model=2048, n_layers=24, n_heads=16),
            "bloom-3b": partial(_bloom, d_model=2560, n_layers=30, n_heads=32),
            "bloom-7b1": partial(_bloom, d_model=4096, n_layers=30, n_heads=32),
            "bloom-176b": partial(_bloom, d_model=14_336, n_layers=70, n_heads=112),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("bloom",), read=read_config, write=write_config, layout=hf_layout),
            "Bloom",
            base="transformer.",
            token="classifier",
        ),
        # Table 3 of the paper (in millions), and the model cards in full.
        golden={
            "bloom-560m": 559_214_592,
            "bloom-1b1": 1_065_314_304,
            "bloom-1b7": 1_722_408_960,
            "bloom-3b": 3_002_557_440,
            "bloom-7b1": 7_069_016_064,
            "bloom-176b": 176_247_271_424,
        },
    )
)

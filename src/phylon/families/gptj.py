"""GPT-J: attention and feed-forward in parallel behind one norm, interleaved rotary on 64 features of each head.

Wang and Komatsuzaki 2021, GPT-J-6B (mesh-transformer-jax); the parallel form: Chowdhery et al. (arXiv:2204.02311),
section 2, which credits it. Its neighbouring rotary pairs become half-split on load.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, PermuteRotary, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    drop_of,
    embed_of,
    embedding_rules,
    head_width,
    hf_activation,
    is_tied,
    norm_eps,
    op_of,
    parallel,
    part,
)
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init


@sized
def gptj_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    rotary_dim: int | None = None,
    eps: float = 1e-5,
    activation: str = "gelu_tanh",
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A GPT-J-style decoder; ``rotary_dim`` features of each head turn (default: all), ``d_ff`` is 4 D."""
    head_dim = head_width(d_model, n_heads)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        rotary=Rotary(dim=None if rotary_dim == head_dim else rotary_dim),
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, dropout=embed_dropout),
        blocks=(parallel(attention, ffn, norm_shared=norm, drop=dropout),) * n_layers,
        norm_final=norm,
        head=LMHead(vocab_size=vocab_size, bias=True),
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    # The summary head is no part of the language model.
    config.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    config.ignore("summary_first_dropout", "n_ctx")
    config.expect("scale_attn_weights", True, why="GPT-J scales its scores")
    config.expect("rotary", True, why="GPT-J's positions are rotary")
    spec = gptj_spec(
        d_model=config.size(config.name_of("n_embd", "hidden_size")),
        n_layers=config.depth(config.name_of("n_layer", "num_hidden_layers")),
        n_heads=config.size(config.name_of("n_head", "num_attention_heads")),
        d_ff=config.size("n_inner", None),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size(config.name_of("n_positions", "max_position_embeddings"), 2048),
        rotary_dim=config.size("rotary_dim", 64),
        eps=config.number("layer_norm_epsilon", 1e-5),
        activation=activation_name(config, "activation_function", "gelu_new"),
        embed_dropout=config.number("embd_pdrop", 0.0),
        attention_dropout=config.number("attn_pdrop", 0.0),
        dropout=config.number("resid_pdrop", 0.0),
        tied=config.take("tie_word_embeddings", False, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP)
    embed = embed_of(stack)
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "n_embd": stack.d_model,
        "n_layer": len(stack.blocks),
        "n_head": attention.n_heads,
        "n_inner": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "n_positions": spec.max_seq_len,
        "rotary_dim": part(attention.rotary, Rotary, "attn.rotary").width(attention.head_dim),
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "activation_function": hf_activation(ffn.activation),
        "embd_pdrop": embed.dropout,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    attention = op_of(decoder_of(spec), "attn", Attention)
    heads, width = attention.n_heads, attention.head_dim
    turned = part(attention.rotary, Rotary, "attn.rotary").width(width)
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "transformer.wte.weight", "lm_head.weight"),
        Rename("lm_head.bias", "heads.lm.proj.bias"),
        Rename(theirs + "ln_1.{p}", ours + "attn_norm_shared.{p}"),
        PermuteRotary(theirs + "attn.q_proj.{p}", ours + "attn.q_proj.{p}", heads, width, turned),
        PermuteRotary(theirs + "attn.k_proj.{p}", ours + "attn.k_proj.{p}", heads, width, turned),
        Rename(theirs + "attn.v_proj.{p}", ours + "attn.v_proj.{p}"),
        Rename(theirs + "attn.out_proj.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.fc_in.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.fc_out.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
        Drop(theirs + "attn.bias", "the causal mask, which the pattern says"),
        Drop(theirs + "attn.masked_bias", "the masked score, which the kernels know"),
        Drop(theirs + "attn.embed_positions", "computed from the configuration"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(gptj_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(rotary_dim=4), tiny(d_ff=50, activation="relu", tied=True)]


register_family(
    Family(
        name="gptj",
        title="GPT-J",
        paper="Wang and Komatsuzaki 2021, GPT-J-6B",
        builder=gptj_spec,
        presets={
            "gpt-j-6b": partial(
                gptj_spec, d_model=4096, n_layers=28, n_heads=16, vocab_size=50_400, max_seq_len=2048, rotary_dim=64
            )
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("gptj",), read=read_config, write=write_config, layout=hf_layout),
            "GPTJ",
            base="transformer.",
            token=None,
        ),
        golden={"gpt-j-6b": 6_050_882_784},
    )
)

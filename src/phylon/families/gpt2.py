"""GPT-2: pre-norm decoder, learned positions, GELU. Radford et al. 2019, section 2.3 and table 2.

``gpt2_spec`` also builds TinyGPT, the reference toy of the field guide this library grew from: no biases in the linear
maps, one standard deviation for every weight.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Concat, Drop, Layout, Rename, Rule, Tied, Transpose
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    TIED_HEAD,
    activation_name,
    decoder_of,
    head_width,
    hf_activation,
    is_tied,
    op_of,
    part,
)
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import DepthScaledInit, NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import Block, ModelSpec, Stack, pre_norm
from phylon.spec.base import Init
from phylon.spec.errors import UserError


@sized
def gpt2_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 1024,
    eps: float = 1e-5,
    activation: str = "gelu_tanh",
    bias: bool = True,
    attention_scales: tuple[float, ...] | None = None,
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A GPT-2-style decoder; ``d_ff`` defaults to 4 D. ``attention_scales`` gives one score scale a block."""
    head_dim = head_width(d_model, n_heads)
    scales = attention_scales or (None,) * n_layers
    if len(scales) != n_layers:
        raise UserError(f"{len(scales)} attention_scales do not fit {n_layers} blocks")
    norm = LayerNorm(eps=eps)
    ffn = MLP(d_ff=d_ff or 4 * d_model, activation=activation, bias=bias)

    def block(scale: float | None) -> Block:
        attention = Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=head_dim,
            qkv_bias=bias,
            out_bias=bias,
            scale=scale,
            dropout=attention_dropout,
        )
        return Block(sublayers=(pre_norm(attention, norm, drop=dropout), pre_norm(ffn, norm, drop=dropout)))

    positions = LearnedPositions(max_seq_len=max_seq_len)
    return ModelSpec(
        decoder=Stack(
            d_model=d_model,
            embed=TokenEmbed(vocab_size=vocab_size, positions=positions, dropout=embed_dropout),
            blocks=tuple(block(scale) for scale in scales),
            norm_final=norm,
        ),
        heads={"lm": LMHead(vocab_size=vocab_size)},
        ties=(TIED_HEAD,) if tied else (),
        init=init or DepthScaledInit(std=0.02),
        max_seq_len=max_seq_len,
    )


tinygpt_spec = partial(gpt2_spec, activation="gelu", bias=False, init=NormalInit(std=0.02))
"""The builder of GPT-2 with TinyGPT's activation, maps and initialisation."""


def read_config(config: Config) -> ModelSpec:
    d_model, n_heads, n_layers = (
        config.size(config.name_of("n_embd", "hidden_size")),
        config.size(config.name_of("n_head", "num_attention_heads")),
        config.depth(config.name_of("n_layer", "num_hidden_layers")),
    )
    scaled = config.take("scale_attn_weights", True, bool)
    by_depth = config.take("scale_attn_by_inverse_layer_idx", False, bool)
    config.expect("add_cross_attention", False, why="GPT-2 is a decoder without an encoder here")
    # Upcasting is a matter of precision, which the kernels settle; the summary head is not part of the language model.
    config.ignore("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation")
    config.ignore("summary_proj_to_labels", "summary_first_dropout", "n_special")
    base = head_width(d_model, n_heads) ** -0.5 if scaled else 1.0
    plain = scaled and not by_depth
    spec = gpt2_spec(
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        d_ff=config.size("n_inner", None),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size(config.name_of("n_positions", "max_position_embeddings"), 1024),
        eps=config.number("layer_norm_epsilon", 1e-5),
        activation=activation_name(config, "activation_function", "gelu_new"),
        attention_scales=None if plain else tuple(base / (i + 1 if by_depth else 1) for i in range(n_layers)),
        embed_dropout=config.number("embd_pdrop", 0.1),
        attention_dropout=config.number("attn_pdrop", 0.1),
        dropout=config.number("resid_pdrop", 0.1),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP)
    embed = part(stack.embed, TokenEmbed, "the embedding")
    positions = part(embed.positions, LearnedPositions, "the positions")
    scales = [part(block.op("attn"), Attention, "attn").scale for block in stack.blocks]
    scaled = scales[0] in (None, attention.head_dim**-0.5)
    base = attention.head_dim**-0.5 if scaled else 1.0
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": stack.d_model,
        "n_layer": len(stack.blocks),
        "n_head": attention.n_heads,
        "n_inner": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "n_positions": positions.max_seq_len,
        "layer_norm_epsilon": part(stack.norm_final, LayerNorm, "the final norm").eps,
        "activation_function": hf_activation(ffn.activation),
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": scales == [base / (i + 1) for i in range(len(scales))],
        "embd_pdrop": embed.dropout,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": stack.blocks[0].sublayers[0].branches[0].drop,
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    width = op_of(decoder_of(spec), "attn", Attention)
    size = width.n_heads * width.head_dim
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    embedding, ours_embedding = "transformer.wte.weight", "decoder.embed.tokens.weight"
    qkv = tuple(f"{ours}attn.{name}_proj.{{p}}" for name in "qkv")
    rules: list[Rule | Drop] = [
        Tied(embedding, ours_embedding, "lm_head.weight") if is_tied(spec) else Rename(embedding, ours_embedding),
        Rename("transformer.wpe.weight", "decoder.embed.positions.weight"),
        Rename(theirs + "ln_1.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "ln_2.{p}", ours + "ffn_norm.{p}"),
        Concat(theirs + "attn.c_attn.{p}", qkv, (size, size, size), transpose=True),
        Transpose(theirs + "attn.c_proj.{p}", ours + "attn.o_proj.{p}"),
        Transpose(theirs + "mlp.c_fc.{p}", ours + "ffn.up_proj.{p}"),
        Transpose(theirs + "mlp.c_proj.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
        Drop(theirs + "attn.bias", "the causal mask, which the pattern says"),
        Drop(theirs + "attn.masked_bias", "the masked score, which the kernels know"),
    ]
    if not is_tied(spec):
        rules.append(Rename("lm_head.weight", "heads.lm.proj.weight"))
    return Layout(rules, optional_prefix="transformer.")


def _cases() -> list[ModelSpec]:
    tiny = partial(gpt2_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(), tiny(d_ff=50, activation="relu", attention_scales=(8**-0.5, 8**-0.5 / 2), tied=False)]


_gpt2 = partial(gpt2_spec, vocab_size=50_257, max_seq_len=1024, embed_dropout=0.1, attention_dropout=0.1, dropout=0.1)

register_family(
    Family(
        name="gpt2",
        title="GPT-2",
        paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        builder=gpt2_spec,
        presets={
            "gpt2": partial(_gpt2, d_model=768, n_layers=12, n_heads=12),
            "gpt2-medium": partial(_gpt2, d_model=1024, n_layers=24, n_heads=16),
            "gpt2-large": partial(_gpt2, d_model=1280, n_layers=36, n_heads=20),
            "gpt2-xl": partial(_gpt2, d_model=1600, n_layers=48, n_heads=25),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("gpt2",), read=read_config, write=write_config, layout=hf_layout),
            "GPT2",
            base="transformer.",
            language_model="LMHeadModel",
            token="classifier",
        ),
        golden={
            "gpt2": 124_439_808,
            "gpt2-medium": 354_823_168,
            "gpt2-large": 774_030_080,
            "gpt2-xl": 1_557_611_200,
        },
    )
)
register_family(
    Family(
        name="tinygpt",
        title="TinyGPT, the field guide's toy",
        paper="Radford et al. 2019, in miniature",
        builder=tinygpt_spec,
        presets={"tinygpt": partial(tinygpt_spec, d_model=96, n_layers=3, n_heads=4, vocab_size=17, max_seq_len=152)},
        cases=lambda: [
            gpt2_spec(d_model=24, n_layers=2, n_heads=3, vocab_size=17, max_seq_len=64, activation="gelu", bias=False)
        ],
        golden={"tinygpt": 349_344},
    )
)

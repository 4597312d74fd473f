"""The Transformer: an encoder-decoder, post-norm, sinusoids, ReLU, one embedding for source, target and head.

Vaswani et al. (arXiv:1706.03762), section 3 and table 3. Marian's checkpoints (Junczys-Dowmunt et al.,
arXiv:1804.00344) are of this family: sinusoids in halves, often SiLU, and a bias on the head.
"""

from functools import partial
from typing import Any

import torch

from phylon.checkpoint import Checked, Computed, Copied, Layout, Rename, Reshaped, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, drop_of, embed_of, head_width, hf_activation, op_of, part
from phylon.families.seq2seq import (
    TIED_HEAD,
    TIED_TARGET,
    embedding_rules,
    lm_of,
    read_tied,
    stacks_of,
    with_lm,
    write_tied,
)
from phylon.families.sizes import sized
from phylon.families.tasks import bare_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.cross import CrossAttention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import Sinusoids, SinusoidsModule
from phylon.model.spec import Block, ModelSpec, Stack, post_norm
from phylon.patterns import Causal, Full
from phylon.spec.base import Init, Op
from phylon.spec.errors import UserError


@sized
def transformer2017_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_decoder_layers: int | None = None,
    n_heads: int = 4,
    n_decoder_heads: int | None = None,
    d_ff: int | None = None,
    d_ff_decoder: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 1024,
    sinusoids: str = "interleaved",
    scaled_embedding: bool = True,
    activation: str = "relu",
    head_bias: bool = False,
    tied: bool = True,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
    dropout: float = 0.0,
    init: Init | None = None,
) -> ModelSpec:
    """An encoder-decoder as of 2017; ``d_ff`` is 4 D. The decoder is as deep and wide as the encoder unless said.

    ``tied``: source, target and head are one matrix.
    """
    norm = LayerNorm()
    embed = TokenEmbed(
        vocab_size=vocab_size,
        scale=d_model**0.5 if scaled_embedding else None,
        positions=Sinusoids(layout=sinusoids),
        dropout=dropout,
    )

    def attention(heads: int, pattern: Causal | Full) -> Attention:
        return Attention(
            n_heads=heads,
            n_kv_heads=heads,
            head_dim=head_width(d_model, heads),
            qkv_bias=True,
            out_bias=True,
            pattern=pattern,
            dropout=attention_dropout,
        )

    def ffn(width: int | None) -> MLP:
        return MLP(d_ff=width or 4 * d_model, activation=activation, dropout=activation_dropout)

    def stack(n_blocks: int, *ops: Op) -> Stack:
        block = Block(sublayers=tuple(post_norm(op, norm, drop=dropout) for op in ops))
        return Stack(d_model=d_model, embed=embed, blocks=(block,) * n_blocks)

    heads = n_decoder_heads or n_heads
    cross = CrossAttention(
        n_heads=heads, head_dim=head_width(d_model, heads), qkv_bias=True, out_bias=True, dropout=attention_dropout
    )
    return ModelSpec(
        encoder=stack(n_layers, attention(n_heads, Full()), ffn(d_ff)),
        decoder=stack(n_decoder_layers or n_layers, attention(heads, Causal()), cross, ffn(d_ff_decoder or d_ff)),
        heads={"lm": LMHead(vocab_size=vocab_size, bias=head_bias)},
        ties=(TIED_TARGET, TIED_HEAD) if tied else (),
        # The scaled embedding enters with variance 1, and so do the logits of the shared head.
        init=init or NormalInit(std=d_model**-0.5),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    named = config.take("architectures", None, list) or ["MarianMTModel"]
    if named[:1] != ["MarianMTModel"]:
        raise UserError(f"{config.where}: the architecture {named} is not supported (known: MarianMTModel)")
    config.expect("is_decoder", False, why="a Marian decoder without its encoder is not read")
    config.expect("normalize_before", False, why="Marian's norms stand behind the sum")
    config.expect("normalize_embedding", False, why="Marian's embedding has no norm")
    config.expect("add_final_layer_norm", False, why="a post-norm stack has no final norm")
    config.expect("static_position_embeddings", True, why="Marian's positions are sinusoids")
    config.expect("share_encoder_decoder_embeddings", True, why="separate source and target vocabularies are not read")
    vocab_size = config.size("vocab_size")
    config.expect("decoder_vocab_size", None, vocab_size, why="source and target share one vocabulary")
    # Layer drop acts in training only; the others repeat what is said elsewhere, or are read by no code.
    config.ignore("encoder_layerdrop", "decoder_layerdrop", "init_std", "classifier_dropout")
    config.ignore("classif_dropout", "extra_pos_embeddings", "add_bias_logits", "force_bos_token_to_be_generated")
    spec = transformer2017_spec(
        d_model=config.size(config.name_of("d_model", "hidden_size")),
        n_layers=config.depth(config.name_of("encoder_layers", "num_hidden_layers")),
        n_decoder_layers=config.depth("decoder_layers"),
        n_heads=config.size(config.name_of("encoder_attention_heads", "num_attention_heads")),
        n_decoder_heads=config.size("decoder_attention_heads"),
        d_ff=config.size("encoder_ffn_dim"),
        d_ff_decoder=config.size("decoder_ffn_dim"),
        vocab_size=vocab_size,
        max_seq_len=config.size("max_position_embeddings", 1024),
        sinusoids="halves",
        scaled_embedding=config.take("scale_embedding", False, bool),
        activation=activation_name(config, "activation_function", "gelu"),
        head_bias=True,
        tied=read_tied(config),
        attention_dropout=config.number("attention_dropout", 0.0),
        activation_dropout=config.number("activation_dropout", 0.0),
        dropout=config.number("dropout", 0.1),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    encoder, decoder = stacks_of(spec)
    embed = embed_of(encoder)
    mine, theirs = op_of(encoder, "attn", Attention), op_of(decoder, "attn", Attention)
    if part(embed.positions, Sinusoids, "the positions").layout != "halves":
        raise UserError("Marian's sinusoids stand in halves, the model's are interleaved")
    if not lm_of(spec).bias:
        raise UserError("Marian's head has a bias (final_logits_bias), the model's has none")
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "d_model": encoder.d_model,
        "encoder_layers": len(encoder.blocks),
        "decoder_layers": len(decoder.blocks),
        "encoder_attention_heads": mine.n_heads,
        "decoder_attention_heads": theirs.n_heads,
        "encoder_ffn_dim": op_of(encoder, "ffn", MLP).d_ff,
        "decoder_ffn_dim": op_of(decoder, "ffn", MLP).d_ff,
        "vocab_size": embed.vocab_size,
        "decoder_vocab_size": embed.vocab_size,
        "share_encoder_decoder_embeddings": True,
        "max_position_embeddings": spec.max_seq_len,
        "scale_embedding": embed.scale is not None,
        "activation_function": hf_activation(op_of(encoder, "ffn", MLP).activation),
        "attention_dropout": mine.dropout,
        "activation_dropout": op_of(encoder, "ffn", MLP).dropout,
        "dropout": drop_of(encoder),
        **write_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    rules: list[Rule | Computed | Copied] = [
        *embedding_rules(spec, "model.", "model.shared.weight"),
        *_stack_rules("encoder", {"attn": "self_attn"}),
        *_stack_rules("decoder", {"attn": "self_attn", "cross_attn": "encoder_attn"}),
        Reshaped("final_logits_bias", ("heads.lm.proj.bias",), to=_without_row, back=_as_row),
        *(Checked(f"model.{stack}.embed_positions.weight", partial(_positions, spec)) for stack in spec.stacks),
    ]
    return Layout(rules)


def _positions(spec: ModelSpec) -> torch.Tensor:
    """(max_seq_len, D): the sinusoids, as older files store them."""
    width = stacks_of(spec)[0].d_model
    return SinusoidsModule(Sinusoids(layout="halves"), width)(torch.arange(spec.max_seq_len or 1))


def _stack_rules(stack: str, attentions: dict[str, str]) -> list[Rule]:
    theirs, ours = f"model.{stack}.layers.{{i}}.", f"{stack}.blocks.{{i}}."
    rules: list[Rule] = []
    for op, name in attentions.items():
        maps = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}
        rules += [Rename(f"{theirs}{name}.{x}.{{p}}", f"{ours}{op}.{y}.{{p}}") for y, x in maps.items()]
        rules.append(Rename(f"{theirs}{name}_layer_norm.{{p}}", f"{ours}{op}_norm_out.{{p}}"))
    return [
        *rules,
        Rename(theirs + "fc1.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "fc2.{p}", ours + "ffn.down_proj.{p}"),
        Rename(theirs + "final_layer_norm.{p}", ours + "ffn_norm_out.{p}"),
    ]


def _without_row(bias: torch.Tensor) -> torch.Tensor:
    return bias.reshape(-1)


def _as_row(bias: torch.Tensor) -> torch.Tensor:
    return bias[None]


def _whole(spec: ModelSpec) -> ModelSpec:
    encoder, _ = stacks_of(spec)
    return with_lm(spec, LMHead(vocab_size=embed_of(encoder).vocab_size, bias=True))


def _cases() -> list[ModelSpec]:
    tiny = partial(transformer2017_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    marian = partial(tiny, sinusoids="halves", head_bias=True)
    return [
        marian(activation="silu", n_decoder_heads=2, d_ff=50, d_ff_decoder=33, scaled_embedding=False),
        marian(),
        tiny(),
    ]


_wmt = partial(transformer2017_spec, n_layers=6, vocab_size=37_000, max_seq_len=1024)

register_family(
    Family(
        name="transformer2017",
        title="Transformer (2017)",
        paper="arXiv:1706.03762",
        builder=transformer2017_spec,
        presets={
            "transformer-base": partial(_wmt, d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
            "transformer-big": partial(_wmt, d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
        },
        cases=_cases,
        hf=bare_format(
            HFFormat(model_types=("marian",), read=read_config, write=write_config, layout=hf_layout),
            "MarianModel",
            "MarianMTModel",
            base="model.",
            inner=_whole,
        ),
        golden={"transformer-base": 63_082_496, "transformer-big": 214_245_376},
    )
)

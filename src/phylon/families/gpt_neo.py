"""GPT-Neo: GPT-2 with blocks that alternate between all earlier tokens and a window, and scores that are not scaled.

Black, Gao, Wang, Leahy and Biderman 2021, GPT-Neo (doi:10.5281/zenodo.5297715), an open replication of GPT-3's form:
arXiv:2005.14165, section 2.1.
"""

import operator
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
    head_width,
    hf_activation,
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
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import Block, ModelSpec
from phylon.patterns import Causal, Window
from phylon.spec.base import Init
from phylon.spec.errors import UserError


@sized
def gpt_neo_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 2048,
    window: int = 256,
    local: tuple[int, ...] | None = None,
    eps: float = 1e-5,
    activation: str = "gelu_tanh",
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A GPT-Neo-style decoder. ``local`` are the blocks with a window, by default every second; ``d_ff`` is 4 D."""
    local = tuple(range(1, n_layers, 2)) if local is None else local
    if not set(local) <= set(range(n_layers)):
        raise UserError(f"local blocks {list(local)} are not all from 0 to {n_layers - 1}")
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_width(d_model, n_heads),
        out_bias=True,
        scale=1.0,
        dropout=attention_dropout,
    )

    def block(i: int) -> Block:
        pattern = Window(size=window) if i in local else Causal()
        return sequential(attention.replace(pattern=pattern), ffn, norm, drop=dropout)

    positions = LearnedPositions(max_seq_len=max_seq_len)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, positions=positions, dropout=embed_dropout),
        blocks=tuple(block(i) for i in range(n_layers)),
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    n_layers = config.depth(config.name_of("num_layers", "num_hidden_layers"))
    kinds = _kinds(config, n_layers)
    # The classifier and the summary head are no part of the language model.
    config.ignore("classifier_dropout", "summary_type", "summary_use_proj", "summary_activation")
    config.ignore("summary_proj_to_labels", "summary_first_dropout")
    spec = gpt_neo_spec(
        d_model=config.size("hidden_size"),
        n_layers=n_layers,
        n_heads=config.size(config.name_of("num_heads", "num_attention_heads")),
        d_ff=config.size("intermediate_size", None),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size("max_position_embeddings", 2048),
        window=config.size("window_size", 256),
        local=tuple(i for i, kind in enumerate(kinds) if kind == "local"),
        eps=config.number("layer_norm_epsilon", 1e-5),
        activation=activation_name(config, "activation_function", "gelu_new"),
        embed_dropout=config.number("embed_dropout", 0.0),
        attention_dropout=config.number("attention_dropout", 0.0),
        dropout=config.number("resid_dropout", 0.0),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def _kinds(config: Config, n_layers: int) -> list[str]:
    """ "global" or "local" for every block, from ``attention_types``; ``attention_layers`` repeats it spelled out."""
    types = config.take("attention_types", None, list) or [[["global", "local"], 12]]
    try:
        kinds = [kind for group, count in types for kind in list(group) * min(operator.index(count), n_layers + 1)]
        if any(isinstance(count, bool) for _, count in types):
            raise TypeError
    except (TypeError, ValueError):
        raise UserError(f"{config.where}: 'attention_types' must be like [[['global', 'local'], 12]]") from None
    if len(kinds) != n_layers or not set(kinds) <= {"global", "local"}:
        raise UserError(f"{config.where}: 'attention_types' must say 'global' or 'local' for {n_layers} blocks")
    if config.take("attention_layers", kinds, list) != kinds:
        raise UserError(f"{config.where}: 'attention_layers' and 'attention_types' differ: remove the wrong one")
    return kinds


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    patterns = [part(block.op("attn"), Attention, "attn").pattern for block in stack.blocks]
    windows = [pattern.size for pattern in patterns if isinstance(pattern, Window)]
    return {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "hidden_size": stack.d_model,
        "num_layers": len(stack.blocks),
        "num_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "attention_types": [[["local" if isinstance(p, Window) else "global" for p in patterns], 1]],
        "window_size": windows[0] if windows else 256,
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "activation_function": hf_activation(ffn.activation),
        "embed_dropout": embed.dropout,
        "attention_dropout": attention.dropout,
        "resid_dropout": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "transformer.wte.weight", "lm_head.weight"),
        Rename("transformer.wpe.weight", "decoder.embed.positions.weight"),
        Rename(theirs + "ln_1.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "ln_2.{p}", ours + "ffn_norm.{p}"),
        *(Rename(f"{theirs}attn.attention.{m}_proj.{{p}}", f"{ours}attn.{m}_proj.{{p}}") for m in "qkv"),
        Rename(theirs + "attn.attention.out_proj.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.c_fc.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.c_proj.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
        Drop(theirs + "attn.attention.bias", "the mask, which the pattern says"),
        Drop(theirs + "attn.attention.masked_bias", "the masked score, which the kernels know"),
    ]
    return Layout(rules, optional_prefix="transformer.")


def _cases() -> list[ModelSpec]:
    tiny = partial(gpt_neo_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64, window=4)
    return [tiny(), tiny(local=(0,), d_ff=50, activation="relu", tied=False), tiny(local=(), window=256)]


_neo = partial(gpt_neo_spec, vocab_size=50_257, max_seq_len=2048, window=256)

register_family(
    Family(
        name="gpt_neo",
        title="GPT-Neo",
        paper="doi:10.5281/zenodo.5297715",
        builder=gpt_neo_spec,
        presets={
            "gpt-neo-125m": partial(_neo, d_model=768, n_layers=12, n_heads=12),
            "gpt-neo-1.3b": partial(_neo, d_model=2048, n_layers=24, n_heads=16),
            "gpt-neo-2.7b": partial(_neo, d_model=2560, n_layers=32, n_heads=20),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("gpt_neo",), read=read_config, write=write_config, layout=hf_layout),
            "GPTNeo",
            base="transformer.",
            token="classifier",
        ),
        golden={"gpt-neo-125m": 125_198_592, "gpt-neo-1.3b": 1_315_575_808, "gpt-neo-2.7b": 2_651_307_520},
    )
)

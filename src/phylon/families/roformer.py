"""RoFormer: BERT with rotary positions in place of learned ones. Su et al. (arXiv:2104.09864), section 3.

Its neighbouring rotary pairs become half-split on load; the table of sinusoids it stores is made anew on saving.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from phylon.checkpoint import Computed, Copied, Drop, Layout, PermuteRotary, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, embed_of, hf_activation, op_of, part
from phylon.families.encoder import (
    TASKS,
    bare_layout,
    bert_rules,
    bias_rules,
    embedding_rules,
    encoder_of,
    is_bare,
    labels,
    n_classes_of,
    norm_rules,
    post_norm_encoder,
    read_task,
    read_tied,
    refuse_decoder,
    task_heads,
    task_of,
    write_tied,
)
from phylon.families.sizes import sized
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.classify import MaskedLM
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import Sinusoids, SinusoidsModule
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init

_TASKS = {name: heads for name, heads in TASKS.items() if not {"nsp", "choice"} & set(heads)} | {"Model": ()}


@sized
def roformer_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    n_types: int = 2,
    max_seq_len: int = 1536,
    eps: float = 1e-12,
    activation: str = "gelu",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    heads: tuple[str, ...] = (),
    tied: bool = True,
    n_classes: int = 2,
    init: Init | None = None,
) -> ModelSpec:
    """A RoFormer encoder; ``d_ff`` is 4 D. ``heads``: mlm, class, token, span, or none.

    ``tied``: the mlm head is the embedding.
    """
    norm = LayerNorm(eps=eps)
    return post_norm_encoder(
        embed=TokenEmbed(vocab_size=vocab_size, n_types=n_types, norm=norm, dropout=dropout),
        heads=task_heads(
            heads,
            mlm=MaskedLM(vocab_size=vocab_size, norm=norm, activation=activation),
            n_classes=n_classes,
            dropout=dropout,
            activation=activation,
        ),
        norm=norm,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        d_ff=d_ff or 4 * d_model,
        activation=activation,
        attention_dropout=attention_dropout,
        attention_drop=dropout,
        ffn_drop=dropout,
        max_seq_len=max_seq_len,
        rotary=Rotary(),
        tied=tied,
        init=init,
    )


def read_config(config: Config) -> ModelSpec:
    refuse_decoder(config, "RoFormer")
    config.expect("rotary_value", False, why="rotated values make the output depend on absolute positions")
    heads = read_task(config, "RoFormer", _TASKS)
    d_model = config.size("hidden_size")
    config.expect("embedding_size", None, d_model, why="an embedding of another width than the blocks is not computed")
    spec = roformer_spec(
        d_model=d_model,
        n_layers=config.depth("num_hidden_layers"),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        n_types=config.size("type_vocab_size", 2),
        max_seq_len=config.size("max_position_embeddings", 1536),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=activation_name(config, "hidden_act", "gelu"),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.1),
        dropout=config.number("hidden_dropout_prob", 0.1),
        heads=heads,
        tied=read_tied(config),
        n_classes=n_classes_of(config, heads),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = encoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    return {
        "architectures": [task_of(spec, "RoFormer", _TASKS)],
        "model_type": "roformer",
        "hidden_size": stack.d_model,
        "embedding_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "type_vocab_size": embed.n_types or 0,
        "max_position_embeddings": spec.max_seq_len,
        "layer_norm_eps": part(embed.norm, LayerNorm, "the embedding's norm").eps,
        "hidden_act": hf_activation(ffn.activation),
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_dropout_prob": embed.dropout,
        "rotary_value": False,
        **labels(spec),
        **write_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    attention = op_of(encoder_of(spec), "attn", Attention)
    heads, width = attention.n_heads, attention.head_dim
    prefix = "" if is_bare(spec) else "roformer."
    turned = {"query": "q", "key": "k"}
    shared = [rule for rule in bert_rules(spec, prefix) if not any(f"self.{name}." in rule.theirs for name in turned)]
    rules: list[Rule | Drop | Computed | Copied] = [
        *shared,
        *(
            PermuteRotary(
                f"{prefix}encoder.layer.{{i}}.attention.self.{theirs}.{{p}}",
                f"encoder.blocks.{{i}}.attn.{ours}_proj.{{p}}",
                heads,
                width,
            )
            for theirs, ours in turned.items()
        ),
        Computed(prefix + "encoder.embed_positions.weight", partial(_sinusoids, spec.max_seq_len or 1, width)),
        *embedding_rules(spec, prefix + "embeddings.word_embeddings.weight", "cls.predictions.decoder"),
        *bias_rules(spec, "cls.predictions.bias", "cls.predictions.decoder"),
        Rename("cls.predictions.transform.dense.{p}", "heads.mlm.dense.{p}"),
        *norm_rules("cls.predictions.transform.LayerNorm", "heads.mlm.norm"),
        Rename("classifier.dense.{p}", "heads.class.dense.{p}"),
        Rename("classifier.out_proj.{p}", "heads.class.proj.{p}"),
        Rename("classifier.{p}", "heads.token.proj.{p}"),
        Rename("qa_outputs.{p}", "heads.span.proj.{p}"),
    ]
    return bare_layout(spec, rules, "roformer.")


def _sinusoids(length: int, width: int) -> Tensor:
    """(length, width): the sines and cosines of all angles, as the reference stores them."""
    return SinusoidsModule(Sinusoids(layout="halves"), width)(torch.arange(length))


def _cases() -> list[ModelSpec]:
    tiny = partial(roformer_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(heads=("mlm",)), tiny(n_heads=2, d_ff=50, activation="relu", heads=("class",), n_classes=5)]


register_family(
    Family(
        name="roformer",
        title="RoFormer",
        paper="arXiv:2104.09864",
        builder=roformer_spec,
        presets={
            "roformer-base": partial(
                roformer_spec,
                d_model=768,
                n_layers=12,
                n_heads=12,
                vocab_size=50_000,
                attention_dropout=0.1,
                dropout=0.1,
            )
        },
        cases=_cases,
        hf=HFFormat(model_types=("roformer",), read=read_config, write=write_config, layout=hf_layout),
        golden={"roformer-base": 123_457_536},
    )
)

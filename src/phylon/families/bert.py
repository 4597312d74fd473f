"""BERT: a post-norm encoder over words, segments and learned positions. Devlin et al. (arXiv:1810.04805), section 3.

The heads follow the architecture that a checkpoint names; a bare model has the pooler if its file holds one.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Copied, Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, embed_of, hf_activation, op_of, part
from phylon.families.encoder import (
    POOLING,
    TASKS,
    bare_layout,
    bert_rules,
    bias_rules,
    embedding_rules,
    encoder_of,
    head_dropout,
    is_bare,
    labels,
    n_classes_of,
    norm_rules,
    pooler_rules,
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
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init


@sized
def bert_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    n_types: int = 2,
    max_seq_len: int = 512,
    eps: float = 1e-12,
    activation: str = "gelu",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    heads: tuple[str, ...] = ("pooled",),
    tied: bool = True,
    n_classes: int = 2,
    head_dropout: float | None = None,
    init: Init | None = None,
) -> ModelSpec:
    """A BERT-style encoder; ``d_ff`` is 4 D. ``heads``: pooled, mlm, nsp, class, choice, token, span, or none.

    ``tied``: the mlm head is the embedding.
    """
    norm = LayerNorm(eps=eps)
    return post_norm_encoder(
        embed=TokenEmbed(
            vocab_size=vocab_size,
            n_types=n_types,
            positions=LearnedPositions(max_seq_len=max_seq_len),
            norm=norm,
            dropout=dropout,
        ),
        heads=task_heads(
            heads,
            mlm=MaskedLM(vocab_size=vocab_size, norm=norm, activation=activation),
            n_classes=n_classes,
            dropout=dropout if head_dropout is None else head_dropout,
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
        tied=tied,
        init=init,
    )


def read_config(config: Config) -> ModelSpec:
    refuse_decoder(config, "BERT")
    config.expect("position_embedding_type", "absolute", why="relative positions of BERT variants are not computed")
    # Kept by conversions of the first release; no code reads them.
    config.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    config.ignore("pooler_size_per_head", "pooler_type")
    heads = read_task(config, "Bert", TASKS)
    if heads == ("mlm",) and config.stores("cls.seq_relationship", False):
        heads = TASKS["ForPreTraining"]
    with_pooler = config.take("add_pooling_layer", None, bool)
    if heads == ("pooled",) and not (config.stores("pooler.", True) if with_pooler is None else with_pooler):
        heads = ()
    spec = bert_spec(
        d_model=config.size("hidden_size"),
        n_layers=config.depth("num_hidden_layers"),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        n_types=config.size("type_vocab_size", 2),
        max_seq_len=config.size("max_position_embeddings", 512),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=activation_name(config, "hidden_act", "gelu"),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.1),
        dropout=config.number("hidden_dropout_prob", 0.1),
        heads=heads,
        tied=read_tied(config),
        n_classes=n_classes_of(config, heads),
        head_dropout=config.take("classifier_dropout", None, (int, float)),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": [task_of(spec, "Bert", TASKS)],
        "model_type": "bert",
        **common_config(spec),
    }


def common_config(spec: ModelSpec) -> dict[str, Any]:
    """What BERT and RoBERTa say in the same words."""
    stack = encoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    positions = part(embed.positions, LearnedPositions, "the positions")
    return {
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "type_vocab_size": embed.n_types or 0,
        "max_position_embeddings": positions.max_seq_len + positions.offset,
        "layer_norm_eps": part(embed.norm, LayerNorm, "the embedding's norm").eps,
        "hidden_act": hf_activation(ffn.activation),
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_dropout_prob": embed.dropout,
        "classifier_dropout": head_dropout(spec),
        **labels(spec),
        **write_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    prefix = "" if is_bare(spec) else "bert."
    rules: list[Rule | Drop | Copied] = [
        *bert_rules(spec, prefix),
        *pooler_rules(spec, prefix, POOLING),
        *embedding_rules(spec, prefix + "embeddings.word_embeddings.weight", "cls.predictions.decoder"),
        *bias_rules(spec, "cls.predictions.bias", "cls.predictions.decoder"),
        Rename("cls.predictions.transform.dense.{p}", "heads.mlm.dense.{p}"),
        *norm_rules("cls.predictions.transform.LayerNorm", "heads.mlm.norm"),
        Rename("cls.seq_relationship.{p}", "heads.nsp.proj.{p}"),
        Rename("qa_outputs.{p}", "heads.span.proj.{p}"),
        *(Rename("classifier.{p}", f"heads.{name}.proj.{{p}}") for name in ("class", "choice", "token")),
    ]
    return bare_layout(spec, rules, "bert.")


def _cases() -> list[ModelSpec]:
    tiny = partial(bert_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [
        tiny(heads=("mlm", "nsp")),
        tiny(d_ff=50, activation="relu", heads=("class",), n_classes=5, n_types=3),
        tiny(n_heads=2, heads=("token",), n_classes=3, eps=1e-5),
        tiny(heads=("span",)),
        tiny(heads=()),
    ]


_bert = partial(bert_spec, vocab_size=30_522, max_seq_len=512, attention_dropout=0.1, dropout=0.1)

register_family(
    Family(
        name="bert",
        title="BERT",
        paper="arXiv:1810.04805",
        builder=bert_spec,
        presets={
            "bert-base": partial(_bert, d_model=768, n_layers=12, n_heads=12),
            "bert-large": partial(_bert, d_model=1024, n_layers=24, n_heads=16),
        },
        cases=_cases,
        hf=HFFormat(model_types=("bert",), read=read_config, write=write_config, layout=hf_layout),
        golden={"bert-base": 109_482_240, "bert-large": 335_141_888},
    )
)

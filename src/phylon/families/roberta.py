"""RoBERTa: BERT trained longer, without sentence pairs. Liu et al. (arXiv:1907.11692), section 3.

Its positions count from the padding id + 1 in a table that keeps the rows before (``LearnedPositions.offset``).
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Copied, Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.bert import common_config
from phylon.families.decoder import activation_name, embed_of, part
from phylon.families.encoder import (
    TASKS,
    bare_layout,
    bert_rules,
    bias_rules,
    embedding_rules,
    encoder_of,
    is_bare,
    n_classes_of,
    norm_rules,
    pooler_rules,
    post_norm_encoder,
    read_task,
    read_tied,
    refuse_decoder,
    task_heads,
    task_of,
)
from phylon.families.sizes import sized
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.heads.classify import MaskedLM
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError

_TASKS = {name: heads for name, heads in TASKS.items() if "nsp" not in heads}


@sized
def roberta_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    n_types: int = 1,
    max_seq_len: int = 512,
    pad_id: int = 1,
    eps: float = 1e-5,
    activation: str = "gelu",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    heads: tuple[str, ...] = ("pooled",),
    tied: bool = True,
    n_classes: int = 2,
    head_dropout: float | None = None,
    init: Init | None = None,
) -> ModelSpec:
    """A RoBERTa-style encoder; ``d_ff`` is 4 D. ``heads``: pooled, mlm, class, choice, token, span, or none.

    ``tied``: the mlm head is the embedding.
    """
    norm = LayerNorm(eps=eps)
    return post_norm_encoder(
        embed=TokenEmbed(
            vocab_size=vocab_size,
            n_types=n_types,
            positions=LearnedPositions(max_seq_len=max_seq_len, offset=pad_id + 1),
            norm=norm,
            dropout=dropout,
        ),
        heads=task_heads(
            heads,
            mlm=MaskedLM(vocab_size=vocab_size, norm=norm, activation="gelu"),
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
    refuse_decoder(config, "RoBERTa")
    config.expect("position_embedding_type", "absolute", why="relative positions of BERT variants are not computed")
    heads = read_task(config, "Roberta", _TASKS)
    with_pooler = config.take("add_pooling_layer", None, bool)
    if heads == ("pooled",) and not (config.stores("pooler.", True) if with_pooler is None else with_pooler):
        heads = ()
    pad_id, rows = config.take("pad_token_id", 1, int), config.size("max_position_embeddings", 512)
    if not 0 <= pad_id < rows - 1:
        raise UserError(
            f"{config.where}: 'pad_token_id' {pad_id} leaves no positions of 'max_position_embeddings' {rows}"
        )
    spec = roberta_spec(
        d_model=config.size("hidden_size"),
        n_layers=config.depth("num_hidden_layers"),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        n_types=config.size("type_vocab_size", 2),
        max_seq_len=rows - pad_id - 1,
        pad_id=pad_id,
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
    positions = part(embed_of(encoder_of(spec)).positions, LearnedPositions, "the positions")
    if not positions.offset:
        raise UserError("RoBERTa's positions start behind the padding id")
    return {
        "architectures": [task_of(spec, "Roberta", _TASKS)],
        "model_type": "roberta",
        "pad_token_id": positions.offset - 1,
        **common_config(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    prefix = "" if is_bare(spec) else "roberta."
    rules: list[Rule | Drop | Copied] = [
        *bert_rules(spec, prefix),
        *pooler_rules(spec, prefix, ("pooled", "choice")),
        *embedding_rules(spec, prefix + "embeddings.word_embeddings.weight", "lm_head.decoder"),
        *bias_rules(spec, "lm_head.bias", "lm_head.decoder"),
        Rename("lm_head.dense.{p}", "heads.mlm.dense.{p}"),
        *norm_rules("lm_head.layer_norm", "heads.mlm.norm"),
        Rename("classifier.dense.{p}", "heads.class.dense.{p}"),
        Rename("classifier.out_proj.{p}", "heads.class.proj.{p}"),
        Rename("classifier.{p}", "heads.token.proj.{p}"),
        Rename("classifier.{p}", "heads.choice.proj.{p}"),
        Rename("qa_outputs.{p}", "heads.span.proj.{p}"),
    ]
    return bare_layout(spec, rules, "roberta.")


def _cases() -> list[ModelSpec]:
    tiny = partial(roberta_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(heads=("mlm",)), tiny(d_ff=50, activation="relu", heads=("class",), n_classes=5, pad_id=0)]


_roberta = partial(roberta_spec, vocab_size=50_265, max_seq_len=512, attention_dropout=0.1, dropout=0.1)

register_family(
    Family(
        name="roberta",
        title="RoBERTa",
        paper="arXiv:1907.11692",
        builder=roberta_spec,
        presets={
            "roberta-base": partial(_roberta, d_model=768, n_layers=12, n_heads=12),
            "roberta-large": partial(_roberta, d_model=1024, n_layers=24, n_heads=16),
        },
        cases=_cases,
        hf=HFFormat(model_types=("roberta",), read=read_config, write=write_config, layout=hf_layout),
        golden={"roberta-base": 124_645_632, "roberta-large": 355_359_744},
    )
)

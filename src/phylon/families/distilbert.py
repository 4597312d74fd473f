"""DistilBERT: half of BERT's blocks, without segments and pooler. Sanh et al. (arXiv:1910.01108), section 2."""

from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, embed_of, hf_activation, op_of, part
from phylon.families.encoder import (
    bare_layout,
    embedding_rules,
    encoder_of,
    head_dropout,
    is_bare,
    labels,
    n_classes_of,
    post_norm_encoder,
    read_task,
    read_tied,
    task_heads,
    task_of,
    write_tied,
)
from phylon.families.sizes import sized
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.classify import MaskedLM, Span
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init

_TASKS: dict[str, tuple[str, ...]] = {
    "Model": (),
    "ForMaskedLM": ("mlm",),
    "ForSequenceClassification": ("class",),
    "ForMultipleChoice": ("choice",),
    "ForTokenClassification": ("token",),
    "ForQuestionAnswering": ("span",),
}


@sized
def distilbert_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 512,
    activation: str = "gelu",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    heads: tuple[str, ...] = (),
    tied: bool = True,
    n_classes: int = 2,
    head_dropout: float = 0.0,
    init: Init | None = None,
) -> ModelSpec:
    """A DistilBERT-style encoder; ``d_ff`` is 4 D. ``heads``: mlm, class, choice, token, span, or none.

    ``tied``: the mlm head is the embedding.
    """
    norm = LayerNorm(eps=1e-12)
    positions = LearnedPositions(max_seq_len=max_seq_len)
    return post_norm_encoder(
        embed=TokenEmbed(vocab_size=vocab_size, positions=positions, norm=norm, dropout=dropout),
        heads=task_heads(
            heads,
            mlm=MaskedLM(vocab_size=vocab_size, norm=norm, activation=activation),
            n_classes=n_classes,
            dropout=head_dropout,
            activation="relu",
            span=Span(dropout=head_dropout),
        ),
        norm=norm,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        d_ff=d_ff or 4 * d_model,
        activation=activation,
        attention_dropout=attention_dropout,
        # The released code drops nothing behind the attention.
        attention_drop=0.0,
        ffn_drop=dropout,
        max_seq_len=max_seq_len,
        tied=tied,
        init=init,
    )


def read_config(config: Config) -> ModelSpec:
    # Sinusoids would only be where the stored table of positions starts from.
    config.ignore("sinusoidal_pos_embds")
    config.expect("tie_weights_", True, why="the reference has tie_word_embeddings for it, and reads no other")
    heads = read_task(config, "DistilBert", _TASKS)
    dropout = config.number("dropout", 0.1)
    rates = {"span": config.number("qa_dropout", 0.1), "token": dropout}
    of_classes = config.number("seq_classif_dropout", 0.2)
    spec = distilbert_spec(
        d_model=config.size(config.name_of("dim", "hidden_size")),
        n_layers=config.depth(config.name_of("n_layers", "num_hidden_layers")),
        n_heads=config.size(config.name_of("n_heads", "num_attention_heads")),
        d_ff=config.size("hidden_dim"),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size("max_position_embeddings", 512),
        activation=activation_name(config, "activation", "gelu"),
        attention_dropout=config.number("attention_dropout", 0.1),
        dropout=dropout,
        heads=heads,
        tied=read_tied(config),
        n_classes=n_classes_of(config, heads),
        head_dropout=rates.get(next(iter(heads), ""), of_classes),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = encoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    span = spec.heads.get("span")
    return {
        "architectures": [task_of(spec, "DistilBert", _TASKS)],
        "model_type": "distilbert",
        "dim": stack.d_model,
        "n_layers": len(stack.blocks),
        "n_heads": attention.n_heads,
        "hidden_dim": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "max_position_embeddings": part(embed.positions, LearnedPositions, "the positions").max_seq_len,
        "activation": hf_activation(ffn.activation),
        "attention_dropout": attention.dropout,
        "dropout": embed.dropout,
        **({"seq_classif_dropout": head_dropout(spec)} if {"class", "choice"} & set(spec.heads) else {}),
        **({"qa_dropout": span.dropout} if isinstance(span, Span) else {}),
        **labels(spec),
        **write_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    prefix = "" if is_bare(spec) else "distilbert."
    theirs, ours = prefix + "transformer.layer.{i}.", "encoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, prefix + "embeddings.word_embeddings.weight", "vocab_projector"),
        Rename(prefix + "embeddings.position_embeddings.weight", "encoder.embed.positions.weight"),
        Rename(prefix + "embeddings.LayerNorm.{p}", "encoder.embed.norm.{p}"),
        *(Rename(f"{theirs}attention.{x}_lin.{{p}}", f"{ours}attn.{x}_proj.{{p}}") for x in "qkv"),
        Rename(theirs + "attention.out_lin.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "sa_layer_norm.{p}", ours + "attn_norm_out.{p}"),
        Rename(theirs + "ffn.lin1.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "ffn.lin2.{p}", ours + "ffn.down_proj.{p}"),
        Rename(theirs + "output_layer_norm.{p}", ours + "ffn_norm_out.{p}"),
        Drop(prefix + "embeddings.position_ids", "0, 1, 2, …, which segments say"),
        Rename("vocab_transform.{p}", "heads.mlm.dense.{p}"),
        Rename("vocab_layer_norm.{p}", "heads.mlm.norm.{p}"),
        Rename("vocab_projector.bias", "heads.mlm.proj.bias"),
        *(Rename("pre_classifier.{p}", f"heads.{name}.dense.{{p}}") for name in ("class", "choice")),
        *(Rename("classifier.{p}", f"heads.{name}.proj.{{p}}") for name in ("class", "choice", "token")),
        Rename("qa_outputs.{p}", "heads.span.proj.{p}"),
    ]
    return bare_layout(spec, rules, "distilbert.")


def _cases() -> list[ModelSpec]:
    tiny = partial(distilbert_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(heads=("mlm",)), tiny(d_ff=50, activation="relu", heads=("class",), n_classes=5)]


register_family(
    Family(
        name="distilbert",
        title="DistilBERT",
        paper="arXiv:1910.01108",
        builder=distilbert_spec,
        presets={
            "distilbert-base": partial(
                distilbert_spec,
                d_model=768,
                n_layers=6,
                n_heads=12,
                vocab_size=30_522,
                attention_dropout=0.1,
                dropout=0.1,
            )
        },
        cases=_cases,
        hf=HFFormat(model_types=("distilbert",), read=read_config, write=write_config, layout=hf_layout),
        golden={"distilbert-base": 66_362_880},
    )
)

"""The post-norm encoder that BERT and its descendants share, its task heads, and the foreign names of both."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from phylon.checkpoint import Computed, Copied, Drop, Layout, Rename, Rule, Tied
from phylon.families.base import Config
from phylon.families.decoder import embed_of, head_width, part
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.classify import Classify, MaskedLM, Pooled, Span
from phylon.layers.heads.pools import First
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import Block, ModelSpec, Stack, Tie, post_norm
from phylon.patterns import Full
from phylon.spec.base import Head, Init
from phylon.spec.errors import UserError, did_you_mean

TIED_MLM = Tie(name="heads.mlm.proj.weight", source="encoder.embed.tokens.weight")

TASKS: dict[str, tuple[str, ...]] = {
    "Model": ("pooled",),
    "ForPreTraining": ("mlm", "nsp"),
    "ForMaskedLM": ("mlm",),
    "ForNextSentencePrediction": ("nsp",),
    "ForSequenceClassification": ("class",),
    "ForMultipleChoice": ("choice",),
    "ForTokenClassification": ("token",),
    "ForQuestionAnswering": ("span",),
}
"""The heads that the second half of an architecture's name stands for."""

POOLING = ("pooled", "nsp", "class", "choice")
"""The heads that read one vector a document, through BERT's pooler."""


def post_norm_encoder(
    *,
    embed: TokenEmbed,
    heads: Mapping[str, Head],
    norm: LayerNorm,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    activation: str,
    attention_dropout: float,
    attention_drop: float,
    ffn_drop: float,
    max_seq_len: int,
    rotary: Rotary | None = None,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """Blocks of full attention and an MLP, a norm after each sum; ``tied``: a masked-LM head is the embedding."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_width(d_model, n_heads),
        qkv_bias=True,
        out_bias=True,
        pattern=Full(),
        rotary=rotary,
        dropout=attention_dropout,
    )
    ffn = MLP(d_ff=d_ff, activation=activation)
    block = Block(sublayers=(post_norm(attention, norm, drop=attention_drop), post_norm(ffn, norm, drop=ffn_drop)))
    return ModelSpec(
        encoder=Stack(d_model=d_model, embed=embed, blocks=(block,) * n_layers),
        heads=dict(heads),
        ties=(TIED_MLM,) if tied and "mlm" in heads else (),
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def task_heads(
    names: tuple[str, ...],
    *,
    mlm: MaskedLM,
    n_classes: int,
    dropout: float,
    activation: str | None = "tanh",
    span: Span = Span(),  # noqa: B008 - frozen
) -> dict[str, Head]:
    """The named heads; ``activation`` is that of the dense map before the classes of a whole text."""

    def classes(n: int, dropout: float = dropout) -> Classify:
        return Classify(n_classes=n, pool=First(), activation=activation, dropout=dropout)

    known: dict[str, Head] = {
        "pooled": Pooled(pool=First(), activation="tanh"),
        "mlm": mlm,
        "nsp": classes(2, 0.0),
        "class": classes(n_classes),
        "choice": classes(1),
        "token": Classify(n_classes=n_classes, dropout=dropout),
        "span": span,
    }
    for name in names:
        if name not in known:
            raise UserError(f"unknown head '{name}'{did_you_mean(name, known)}")
    return {name: known[name] for name in names}


def read_task(config: Config, prefix: str, tasks: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The heads of the architecture that a config names (the bare model where it names none)."""
    known = {prefix + name: heads for name, heads in tasks.items()}
    named = config.take("architectures", None, list) or [prefix + "Model"]
    name = str(named[0])
    if name not in known:
        raise UserError(f"{config.where}: the architecture '{name}' is not supported{did_you_mean(name, known)}")
    return known[name]


def task_of(spec: ModelSpec, prefix: str, tasks: Mapping[str, tuple[str, ...]]) -> str:
    """The architecture's name for the heads of ``spec``."""
    encoder_of(spec)
    heads = set(spec.heads) or set(tasks["Model"])
    for name, theirs in tasks.items():
        if set(theirs) == heads:
            return prefix + name
    raise UserError(f"this format has no architecture with the heads {', '.join(spec.heads)}")


def refuse_decoder(config: Config, name: str) -> None:
    """Refuse what would make the encoder a decoder."""
    config.expect("is_decoder", False, why=f"{name} is an encoder here; causal variants are not read")
    config.expect("add_cross_attention", False, why=f"{name} is an encoder here and reads no second text")


def read_tied(config: Config) -> bool:
    """Whether a masked-LM head, where there is one, is the embedding."""
    return config.take("tie_word_embeddings", True, bool)


def write_tied(spec: ModelSpec) -> dict[str, Any]:
    """The key that says it, of a model with such a head."""
    return {"tie_word_embeddings": TIED_MLM in spec.ties} if "mlm" in spec.heads else {}


def n_classes_of(config: Config, heads: Collection[str]) -> int:
    """How many labels a config declares; 2 where it is silent. Two that differ are refused where ``heads`` count."""
    labels = config.take("id2label", None, dict)
    if labels is None:
        return config.size("num_labels", 2, most=2**20)
    if {"class", "distilled", "token"} & set(heads) and config.take("num_labels", None, int) not in (None, len(labels)):
        raise UserError(
            f"{config.where}: 'num_labels' is {config.take('num_labels')} and 'id2label' names {len(labels)} classes: "
            "correct or remove one of them"
        )
    return max(len(labels), 1)


def labels(spec: ModelSpec) -> dict[str, Any]:
    """The label tables of the classes, which the reference counts; the hub writes their names over these."""
    for name in ("class", "token"):
        if name in spec.heads:
            n = part(spec.heads[name], Classify, f"heads.{name}").n_classes
            return {
                "id2label": {str(i): f"LABEL_{i}" for i in range(n)},
                "label2id": {f"LABEL_{i}": i for i in range(n)},
            }
    return {}


def encoder_of(spec: ModelSpec) -> Stack:
    """The encoder of an encoder-only model, or why there is none."""
    if spec.encoder is None or spec.decoder is not None:
        raise UserError("this format holds encoder-only models")
    return spec.encoder


def head_dropout(spec: ModelSpec) -> float | None:
    """The dropout of the heads that classify, where there is one."""
    found = [head.dropout for name, head in spec.heads.items() if isinstance(head, Classify) and name != "nsp"]
    return found[0] if found else None


def bert_rules(spec: ModelSpec, prefix: str) -> list[Rule | Drop]:
    """Embeddings, blocks and pooler in BERT's names; ``prefix`` is that of the bare model inside one with heads."""
    theirs, ours = prefix + "encoder.layer.{i}.", "encoder.blocks.{i}."
    # RoFormer has none: files that have them are those of a sibling.
    learned = [Rename(prefix + "embeddings.position_embeddings.weight", "encoder.embed.positions.weight")]
    if embed_of(encoder_of(spec)).positions is None:
        learned = []
    rules: list[Rule | Drop] = [
        Rename(prefix + "embeddings.token_type_embeddings.weight", "encoder.embed.types.weight"),
        *learned,
        *norm_rules(prefix + "embeddings.LayerNorm", "encoder.embed.norm"),
        Rename(theirs + "attention.self.query.{p}", ours + "attn.q_proj.{p}"),
        Rename(theirs + "attention.self.key.{p}", ours + "attn.k_proj.{p}"),
        Rename(theirs + "attention.self.value.{p}", ours + "attn.v_proj.{p}"),
        Rename(theirs + "attention.output.dense.{p}", ours + "attn.o_proj.{p}"),
        *norm_rules(theirs + "attention.output.LayerNorm", ours + "attn_norm_out"),
        Rename(theirs + "intermediate.dense.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "output.dense.{p}", ours + "ffn.down_proj.{p}"),
        *norm_rules(theirs + "output.LayerNorm", ours + "ffn_norm_out"),
        Drop(prefix + "embeddings.position_ids", "0, 1, 2, …, which segments say"),
    ]
    return rules


def norm_rules(theirs: str, ours: str) -> list[Rule]:
    """A LayerNorm; the oldest files call its vectors gamma and beta."""
    return [
        Tied(f"{theirs}.weight", f"{ours}.weight", f"{theirs}.gamma"),
        Tied(f"{theirs}.bias", f"{ours}.bias", f"{theirs}.beta"),
    ]


def pooler_rules(spec: ModelSpec, prefix: str, readers: tuple[str, ...]) -> list[Rule | Drop]:
    """BERT's pooler is the dense map of the one head that reads it."""
    for name in readers:
        if name in spec.heads:
            return [Rename(prefix + "pooler.dense.{p}", f"heads.{name}.dense.{{p}}")]
    return [Drop(prefix + "pooler.*", "no head of this architecture reads the pooler")]


def embedding_rules(spec: ModelSpec, theirs: str, head: str) -> list[Rule]:
    """The embedding, stored once also where it is the masked-LM head, whose map is called ``head``."""
    ours = "encoder.embed.tokens.weight"
    if TIED_MLM in spec.ties:
        return [Tied(theirs, ours, head + ".weight")]
    return [Rename(theirs, ours), Rename(head + ".weight", TIED_MLM.name)]


def bias_rules(spec: ModelSpec, theirs: str, head: str) -> list[Rule | Copied]:
    """The bias of the masked-LM head, which stands twice: beside the map ``head``, and in it.

    Without ties the reference reads the second alone, and draws it anew where a file lacks it.
    """
    ours, other = "heads.mlm.proj.bias", head + ".bias"
    if "mlm" not in spec.heads:
        return []
    if TIED_MLM in spec.ties:
        return [Tied(theirs, ours, other)]
    return [Rename(other, ours), Copied(theirs, ours)]


def is_bare(spec: ModelSpec) -> bool:
    """Whether ``spec`` is the bare model, whose tensors have no prefix."""
    return set(spec.heads) <= {"pooled"}


def bare_layout(spec: ModelSpec, rules: Iterable[Rule | Drop | Computed | Copied], prefix: str) -> Layout:
    """The layout of these rules; files of the bare model lack ``prefix``."""
    return Layout(rules, optional_prefix="" if is_bare(spec) else prefix)

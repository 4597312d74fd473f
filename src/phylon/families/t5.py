"""T5: an encoder-decoder with relative position buckets, pre-RMSNorm, no biases and unscaled scores.

Raffel et al. (arXiv:1910.10683), section 2.1; version 1.1 (gated GELU, a head of its own): Shazeer (arXiv:2002.05202),
released checkpoints. A stack shares one table of biases, which files keep in its first block.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, Other, Rename, Rule, Tied
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import ACTIVATIONS, drop_of, embed_of, hf_activation, op_of, part
from phylon.families.seq2seq import EMBEDDING, TIED_HEAD, TIED_TARGET, lm_of, stacks_of
from phylon.families.sizes import sized
from phylon.families.tasks import Task, of_spans, of_tokens, with_tasks
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.heads.classify import Classify
from phylon.layers.heads.lm import LMHead
from phylon.layers.heads.pools import Last
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.cross import CrossAttention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.score_bias import SharedRef, T5Bias
from phylon.model.spec import Block, ModelSpec, Stack, Sublayer, pre_norm
from phylon.patterns import Causal, Full
from phylon.spec.base import FeedForward, Head, Init, Op
from phylon.spec.errors import UserError, did_you_mean

BIAS = "rel_bias"


@sized
def t5_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_decoder_layers: int | None = None,
    n_heads: int = 4,
    head_dim: int = 64,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    n_buckets: int = 32,
    max_distance: int = 128,
    eps: float = 1e-6,
    activation: str = "relu",
    gated: bool = False,
    head_scale: float | None = None,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A T5-style encoder-decoder; ``d_ff`` is 4 D. ``head_scale`` is D^-0.5 in version 1.0, whose head is tied."""
    norm = RMSNorm(eps=eps)
    kind = GLU if gated else MLP
    ffn: FeedForward = kind(d_ff=d_ff or 4 * d_model, activation=activation, bias=False, dropout=dropout)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        pattern=Full(),
        score_bias=SharedRef(name=BIAS),
        scale=1.0,
        dropout=dropout,
    )
    cross = CrossAttention(n_heads=n_heads, head_dim=head_dim, scale=1.0, dropout=dropout)

    def stack(n_blocks: int, direction: str, *ops: Op) -> Stack:
        sublayers: tuple[Sublayer, ...] = tuple(pre_norm(op, norm, drop=dropout) for op in ops)
        bias = T5Bias(n_heads=n_heads, n_buckets=n_buckets, max_distance=max_distance, direction=direction)
        return Stack(
            d_model=d_model,
            embed=TokenEmbed(vocab_size=vocab_size, dropout=dropout),
            blocks=(Block(sublayers=sublayers),) * n_blocks,
            shared={BIAS: bias},
            norm_final=norm,
            dropout=dropout,
        )

    return ModelSpec(
        encoder=stack(n_layers, "both", attention, ffn),
        decoder=stack(n_decoder_layers or n_layers, "past", attention.replace(pattern=Causal()), cross, ffn),
        heads={"lm": LMHead(vocab_size=vocab_size, scale=head_scale)},
        ties=(TIED_TARGET, TIED_HEAD) if tied else (TIED_TARGET,),
        init=init or NormalInit(std=0.02),
    )


def encoder_alone(spec: ModelSpec) -> ModelSpec:
    """The encoder of a T5, as text embedders and image generators use it."""
    return spec.replace(decoder=None, heads={}, ties=())


def without_head(spec: ModelSpec) -> ModelSpec:
    """The two stacks alone."""
    return spec.replace(heads={}, ties=(TIED_TARGET,))


_ARCHITECTURES = {
    "T5ForConditionalGeneration": lambda spec: spec,
    "T5WithLMHeadModel": lambda spec: spec,
    "T5Model": without_head,
    "T5EncoderModel": encoder_alone,
}


def read_config(config: Config) -> ModelSpec:
    named = config.take("architectures", None, list) or ["T5ForConditionalGeneration"]
    name = str(named[0])
    if name not in _ARCHITECTURES:
        known = did_you_mean(name, _ARCHITECTURES)
        raise UserError(f"{config.where}: the architecture '{name}' is not supported{known}")
    config.expect("is_decoder", False, why="a T5 decoder without its encoder is not read")
    config.ignore("n_positions", "classifier_dropout")
    gated, activation = _feed_forward(config)
    tied = config.take("tie_word_embeddings", True, bool)
    # The current reference always says "tied" and tells the versions apart by the scale; the head is in the file.
    scaled = config.take("scale_decoder_outputs", tied, bool)
    tied = tied and (scaled or not config.stores("lm_head.weight", False))
    d_model = config.size(config.name_of("d_model", "hidden_size"))
    spec = t5_spec(
        d_model=d_model,
        n_layers=config.depth(config.name_of("num_layers", "num_hidden_layers")),
        n_decoder_layers=config.size("num_decoder_layers", None, most=4096),
        n_heads=config.size(config.name_of("num_heads", "num_attention_heads")),
        head_dim=config.size(config.name_of("d_kv", "head_dim")),
        d_ff=config.size("d_ff"),
        vocab_size=config.size("vocab_size"),
        n_buckets=config.size("relative_attention_num_buckets", 32),
        max_distance=config.size("relative_attention_max_distance", 128),
        eps=config.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        gated=gated,
        head_scale=d_model**-0.5 if scaled else None,
        dropout=config.number("dropout_rate", 0.1),
        tied=tied,
    )
    config.finish()
    return _ARCHITECTURES[name](spec)


def _feed_forward(config: Config) -> tuple[bool, str]:
    """Whether it is gated, and its activation: ``gated-gelu`` means the approximation by tanh."""
    whole = config.take("feed_forward_proj", "relu", str)
    words = whole.split("-")
    said = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    name, gated = config.take("dense_act_fn", said, str), config.take("is_gated_act", words[0] == "gated", bool)
    if name not in ACTIVATIONS or len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        said = "-".join(words)
        key = "dense_act_fn" if "dense_act_fn" in config else "feed_forward_proj"
        said = name if key == "dense_act_fn" else said
        raise UserError(f"{config.where}: unknown {key} '{said}'{did_you_mean(name, ACTIVATIONS)}")
    if "feed_forward_proj" in config:
        same = ACTIVATIONS.get(said) == ACTIVATIONS[name]
        config.agree({"feed_forward_proj": whole, "dense_act_fn": None if same else name})
        config.agree({"feed_forward_proj": whole, "is_gated_act": None if gated == (words[0] == "gated") else gated})
    return gated, ACTIVATIONS[name]


def write_config(spec: ModelSpec) -> dict[str, Any]:
    encoder = spec.encoder
    if encoder is None:
        raise UserError("this format holds T5 models, which have an encoder")
    if spec.decoder is None:
        architecture, blocks, scaled, tied = "T5EncoderModel", len(encoder.blocks), True, True
    else:
        blocks = len(stacks_of(spec)[1].blocks)
        architecture = "T5ForConditionalGeneration" if spec.heads else "T5Model"
        scaled = lm_of(spec).scale is not None if spec.heads else True
        tied = TIED_HEAD in spec.ties if spec.heads else True
    attention, embed = op_of(encoder, "attn", Attention), embed_of(encoder)
    ffn = op_of(encoder, "ffn", (GLU, MLP))
    bias = part(encoder.shared.get(BIAS), T5Bias, "the shared bias")
    if scaled and not tied:
        raise UserError("T5 scales the head's input only where the head is the embedding")
    if scaled and spec.heads and lm_of(spec).scale != encoder.d_model**-0.5:
        raise UserError("T5 scales the head's input by D^-0.5 or not at all")
    return {
        "architectures": [architecture],
        "model_type": "t5",
        "is_encoder_decoder": spec.decoder is not None,
        "d_model": encoder.d_model,
        "d_kv": attention.head_dim,
        "d_ff": ffn.d_ff,
        "num_layers": len(encoder.blocks),
        "num_decoder_layers": blocks,
        "num_heads": attention.n_heads,
        "vocab_size": embed.vocab_size,
        "relative_attention_num_buckets": bias.n_buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": part(encoder.norm_final, RMSNorm, "the final norm").eps,
        "feed_forward_proj": _projection(ffn),
        "dropout_rate": drop_of(encoder),
        # The reference takes "untied" for version 1.1, which neither ties nor scales.
        **({"tie_word_embeddings": tied, "scale_decoder_outputs": scaled} if spec.heads else {}),
    }


def _projection(ffn: GLU | MLP) -> str:
    """The name of a feed-forward network, the reverse of ``_feed_forward``."""
    name = hf_activation(ffn.activation)
    if isinstance(ffn, MLP):
        return name
    if name == "gelu":
        raise UserError("T5's gated-gelu is the approximation by tanh; the model has the exact GELU")
    return "gated-gelu" if name == "gelu_new" else f"gated-{name}"


def hf_layout(spec: ModelSpec) -> Layout:
    shared = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    gated = any(isinstance(block.op("ffn"), GLU) for stack in spec.stacks.values() for block in stack.blocks[:1])
    tied = (*shared, "lm_head.weight") if TIED_HEAD in spec.ties else shared
    rules: list[Rule | Drop] = [
        Tied("shared.weight", EMBEDDING, tied),
        *stack_rules("encoder", ("attn", "ffn"), gated),
        *stack_rules("decoder", ("attn", "cross_attn", "ffn"), gated),
        Rename("lm_head.weight", "heads.lm.proj.weight"),
    ]
    if spec.decoder is not None:
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        rules.append(Drop(unused, "an unused table of the first release"))
    else:
        rules += [Other(name, "the encoder is asked for alone") for name in ("decoder.block.*", "decoder.final*")]
    return Layout(rules)


def stack_rules(stack: str, ops: tuple[str, ...], gated: bool, ffn: str = "DenseReluDense") -> list[Rule]:
    """Everything of a stack but its embedding; ``ffn`` is the reference's name of a feed-forward network."""
    names = {"attn": "SelfAttention", "cross_attn": "EncDecAttention"}
    theirs, ours = f"{stack}.block.{{i}}.layer.", f"{stack}.blocks.{{i}}."
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rules: list[Rule] = [
        Rename(table, f"{stack}.shared.{BIAS}.weight"),
        Rename(f"{stack}.final_layer_norm.weight", f"{stack}.norm_final.weight"),
    ]
    for number, op in enumerate(ops):
        rules.append(Rename(f"{theirs}{number}.layer_norm.weight", f"{ours}{op}_norm.weight"))
        if op in names:
            at = f"{theirs}{number}.{names[op]}."
            rules += [Rename(f"{at}{x}.weight", f"{ours}{op}.{x}_proj.weight") for x in "qkvo"]
    maps = {"gate_proj": "wi_0", "up_proj": "wi_1"} if gated else {"up_proj": "wi"}
    at = f"{theirs}{len(ops) - 1}.{ffn}."
    return rules + [
        Rename(f"{at}{x}.weight", f"{ours}ffn.{name}.weight") for name, x in (maps | {"down_proj": "wo"}).items()
    ]


def _class_of_texts(n_classes: int, dropout: float) -> dict[str, Head]:
    """Read at the last token that the decoder sees, the source's end mark."""
    return {"class": Classify(n_classes=n_classes, pool=Last(), activation="tanh", dropout=dropout)}


_TASKS = {
    "T5ForSequenceClassification": Task(
        architecture="T5Model",
        prefix=("", "transformer."),
        heads=_class_of_texts,
        maps={
            "heads.class.dense.{p}": "classification_head.dense.{p}",
            "heads.class.proj.{p}": "classification_head.out_proj.{p}",
        },
        dropout=0.0,
    ),
    "T5ForTokenClassification": Task(
        architecture="T5EncoderModel",
        prefix=("", "transformer."),
        heads=of_tokens,
        maps={"heads.token.proj.{p}": "classifier.{p}"},
        dropout=0.0,
    ),
    "T5ForQuestionAnswering": Task(
        architecture="T5Model", prefix=("", ""), heads=of_spans, maps={"heads.span.proj.{p}": "qa_outputs.{p}"}
    ),
}


def _fits(task: Task, spec: ModelSpec) -> bool:
    return (spec.decoder is None) == (task.architecture == "T5EncoderModel")


def _cases() -> list[ModelSpec]:
    tiny = partial(t5_spec, d_model=24, n_layers=2, n_heads=3, head_dim=10, d_ff=40, vocab_size=37)
    return [
        tiny(head_scale=24**-0.5),
        tiny(n_buckets=8, max_distance=20, activation="gelu_tanh", gated=True, tied=False, n_decoder_layers=1),
        encoder_alone(tiny(n_buckets=12, max_distance=9)),
    ]


_v10 = partial(t5_spec, vocab_size=32_128, dropout=0.1)
_v11 = partial(t5_spec, vocab_size=32_128, dropout=0.1, activation="gelu_tanh", gated=True, tied=False)


def _scaled(**sizes: Any) -> ModelSpec:
    return _v10(**sizes, head_scale=sizes["d_model"] ** -0.5)


_SIZES: dict[str, dict[str, Any]] = {
    "t5-small": {"d_model": 512, "n_layers": 6, "n_heads": 8, "head_dim": 64, "d_ff": 2048},
    "t5-base": {"d_model": 768, "n_layers": 12, "n_heads": 12, "head_dim": 64, "d_ff": 3072},
    "t5-large": {"d_model": 1024, "n_layers": 24, "n_heads": 16, "head_dim": 64, "d_ff": 4096},
    "t5-3b": {"d_model": 1024, "n_layers": 24, "n_heads": 32, "head_dim": 128, "d_ff": 16_384},
    "t5-11b": {"d_model": 1024, "n_layers": 24, "n_heads": 128, "head_dim": 128, "d_ff": 65_536},
}
_SIZES_V11: dict[str, dict[str, Any]] = {
    "t5-v1.1-small": {"d_model": 512, "n_layers": 8, "n_heads": 6, "head_dim": 64, "d_ff": 1024},
    "t5-v1.1-base": {"d_model": 768, "n_layers": 12, "n_heads": 12, "head_dim": 64, "d_ff": 2048},
    "t5-v1.1-large": {"d_model": 1024, "n_layers": 24, "n_heads": 16, "head_dim": 64, "d_ff": 2816},
    "t5-v1.1-xl": {"d_model": 2048, "n_layers": 24, "n_heads": 32, "head_dim": 64, "d_ff": 5120},
    "t5-v1.1-xxl": {"d_model": 4096, "n_layers": 24, "n_heads": 64, "head_dim": 64, "d_ff": 10_240},
}

register_family(
    Family(
        name="t5",
        title="T5",
        paper="arXiv:1910.10683",
        builder=t5_spec,
        presets={
            **{name: partial(_scaled, **sizes) for name, sizes in _SIZES.items()},
            **{name: partial(_v11, **sizes) for name, sizes in _SIZES_V11.items()},
        },
        cases=_cases,
        hf=with_tasks(
            HFFormat(model_types=("t5",), read=read_config, write=write_config, layout=hf_layout),
            _TASKS,
            lambda spec: spec.replace(heads={}),
            _fits,
        ),
        golden={
            "t5-small": 60_506_624,
            "t5-base": 222_903_552,
            "t5-large": 737_668_096,
            "t5-3b": 2_851_598_336,
            "t5-11b": 11_307_321_344,
            "t5-v1.1-small": 76_961_152,
            "t5-v1.1-base": 247_577_856,
            "t5-v1.1-large": 783_150_080,
            "t5-v1.1-xl": 2_849_757_184,
            "t5-v1.1-xxl": 11_135_332_352,
        },
    )
)

"""The pre-norm decoder that LLaMA and its descendants share, and the parts of foreign formats that go with it."""

from typing import Any, TypeVar

from phylon.checkpoint import Fused, Rename, Rule, Tied, interleaved
from phylon.families.base import Config
from phylon.families.sizes import sized
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm, RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import Block, Branch, ModelSpec, Stack, Sublayer, Tie, pre_norm
from phylon.patterns import Causal, Pattern
from phylon.spec.base import FeedForward, Init, Mixer, Norm
from phylon.spec.errors import UserError, did_you_mean

T = TypeVar("T")

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's names of the activations; the first of each is the one written."""

TIED_HEAD = Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight")


@sized
def llama_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 1024,
    eps: float = 1e-5,
    rotary: Rotary = Rotary(),  # noqa: B008 - frozen
    activation: str = "silu",
    attention_bias: bool = False,
    ffn_bias: bool = False,
    attention_dropout: float = 0.0,
    pattern: Pattern = Causal(),  # noqa: B008 - frozen
    qk_norm: Norm | None = None,
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A LLaMA-style decoder: RMSNorm, rotary grouped-query attention, gated feed-forward; ``d_ff`` is 8/3 D."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_dim=head_dim or head_width(d_model, n_heads),
        qk_norm=qk_norm,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        pattern=pattern,
        rotary=rotary,
        dropout=attention_dropout,
    )
    ffn = GLU(d_ff=d_ff or -(-8 * d_model // 3 // 32) * 32, activation=activation, bias=ffn_bias)
    norm = RMSNorm(eps=eps)
    block = Block(sublayers=(pre_norm(attention, norm), pre_norm(ffn, norm)))
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size),
        blocks=(block,) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def causal_lm(
    *,
    d_model: int,
    embed: TokenEmbed,
    blocks: tuple[Block, ...],
    norm_final: Norm,
    tied: bool,
    init: Init,
    max_seq_len: int,
    head: LMHead | None = None,
) -> ModelSpec:
    """A decoder with a final norm and one language-model head, which may be the embedding."""
    return ModelSpec(
        decoder=Stack(d_model=d_model, embed=embed, blocks=blocks, norm_final=norm_final),
        heads={"lm": head or LMHead(vocab_size=embed.vocab_size)},
        ties=(TIED_HEAD,) if tied else (),
        init=init,
        max_seq_len=max_seq_len,
    )


def parallel(
    attention: Mixer,
    ffn: FeedForward,
    *,
    norm_in: Norm | None = None,
    norm_shared: Norm | None = None,
    drop: float = 0.0,
) -> Block:
    """Attention and feed-forward beside each other in one sublayer, with a norm each or one for both."""
    branches = tuple(Branch(op=op, norm_in=norm_in, drop=drop) for op in (attention, ffn))
    return Block(sublayers=(Sublayer(branches=branches, norm_shared=norm_shared),))


def sequential(attention: Mixer, ffn: FeedForward, norm: Norm, *, drop: float = 0.0) -> Block:
    """Attention, then feed-forward, each behind its norm (GPT-2)."""
    return Block(sublayers=(pre_norm(attention, norm, drop=drop), pre_norm(ffn, norm, drop=drop)))


def head_width(d_model: int, n_heads: int) -> int:
    """The width of a head where the heads share out ``d_model``."""
    if d_model % n_heads:
        raise UserError(f"d_model {d_model} is no multiple of n_heads {n_heads}")
    return d_model // n_heads


def activation_name(config: Config, key: str, default: str) -> str:
    """Our name of the activation that a config names."""
    name = config.take(key, default, str)
    if name not in ACTIVATIONS:
        raise UserError(f"{config.where}: '{key}': unknown activation '{name}'{did_you_mean(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def hf_activation(name: str) -> str:
    """Hugging Face's name of one of our activations."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def decoder_of(spec: ModelSpec) -> Stack:
    """The decoder of a decoder-only language model, or why there is none."""
    if spec.decoder is None or spec.encoder is not None or list(spec.heads) != ["lm"]:
        raise UserError("this format holds decoder-only models with one language-model head")
    return spec.decoder


def part(value: Any, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    """``value`` as the kind of part a format can say, or a one-line refusal."""
    if not isinstance(value, kind):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"this format needs {what} to be {wanted}, the model has {type(value).__name__}")
    return value


def op_of(stack: Stack, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """The op of one name in the first block."""
    block = stack.blocks[0]
    if name not in block.ops():
        raise UserError(f"this format needs an op '{name}' in every block; the model has {', '.join(block.ops())}")
    return part(block.op(name), kind, name)


def is_tied(spec: ModelSpec) -> bool:
    """Whether the head is the embedding."""
    return TIED_HEAD in spec.ties


def embed_of(stack: Stack) -> TokenEmbed:
    """The token embedding."""
    return part(stack.embed, TokenEmbed, "the embedding")


def drop_of(stack: Stack) -> float:
    """The dropout on the increments, of the first branch."""
    return stack.blocks[0].sublayers[0].branches[0].drop


def norm_eps(stack: Stack, kind: type[LayerNorm] | type[RMSNorm]) -> float:
    """The ``eps`` of the final norm."""
    return part(stack.norm_final, kind, "the final norm").eps


def embedding_rules(spec: ModelSpec, name: str, head: str) -> list[Rule]:
    """Embedding and head: one tensor where they are tied, else two."""
    ours = "decoder.embed.tokens.weight"
    if is_tied(spec):
        return [Tied(name, ours, head)]
    return [Rename(name, ours), Rename(head, "heads.lm.proj.weight")]


def fused_qkv(theirs: str, attention: Attention) -> Fused:
    """One tensor for q, k and v, group by group: all query heads of a key head, then that key and value head.

    NeoX and Bloom are the case K = H, multi-query (one group) is q, then k, then v.
    """
    width, groups = attention.head_dim, attention.n_kv_heads
    ours = tuple(f"decoder.blocks.{{i}}.attn.{name}_proj.{{p}}" for name in "qkv")
    return Fused(theirs, ours, interleaved(groups, (attention.n_heads // groups * width, width, width)))


def layer_kinds(config: Config, n_layers: int) -> list[str] | None:
    """``layer_types``, one a block, or ``None`` where the config has none."""
    kinds = config.take("layer_types", None, list)
    if kinds is None:
        return None
    if len(kinds) != n_layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise UserError(f"{config.where}: 'layer_types' must say full_attention or sliding_attention, {n_layers} times")
    return kinds

"""The pre-norm decoder that LLaMA and its descendants share, and the parts of foreign formats that go with it."""

from typing import Any, TypeVar

from phylon.families.base import Config
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import Block, ModelSpec, Stack, Tie, pre_norm
from phylon.patterns import Causal, Pattern
from phylon.spec.base import Init
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
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A LLaMA-style decoder: RMSNorm, rotary grouped-query attention, gated feed-forward; ``d_ff`` is 8/3 D."""
    if head_dim is None and d_model % n_heads:
        raise UserError(f"d_model {d_model} is no multiple of n_heads {n_heads}; give head_dim")
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_dim=head_dim or d_model // n_heads,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        pattern=pattern,
        rotary=rotary,
        dropout=attention_dropout,
    )
    ffn = GLU(d_ff=d_ff or -(-8 * d_model // 3 // 32) * 32, activation=activation, bias=ffn_bias)
    norm = RMSNorm(eps=eps)
    block = Block(sublayers=(pre_norm(attention, norm), pre_norm(ffn, norm)))
    return ModelSpec(
        decoder=Stack(
            d_model=d_model, embed=TokenEmbed(vocab_size=vocab_size), blocks=(block,) * n_layers, norm_final=norm
        ),
        heads={"lm": LMHead(vocab_size=vocab_size)},
        ties=(TIED_HEAD,) if tied else (),
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def activation_name(config: Config, key: str, default: str) -> str:
    """Our name of the activation that a config names."""
    name = config.take(key, default, str)
    if name not in ACTIVATIONS:
        raise UserError(f"{config.where}: unknown activation '{name}'{did_you_mean(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def hf_activation(name: str) -> str:
    """Hugging Face's name of one of our activations."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def decoder_of(spec: ModelSpec) -> Stack:
    """The decoder of a decoder-only language model, or why there is none."""
    if spec.decoder is None or spec.encoder is not None or list(spec.heads) != ["lm"]:
        raise UserError("this format holds decoder-only models with one language-model head")
    return spec.decoder


def part(value: Any, kind: type[T], what: str) -> T:
    """``value`` as the kind of part a format can say, or a one-line refusal."""
    if not isinstance(value, kind):
        raise UserError(f"this format needs {what} to be {kind.__name__}, the model has {type(value).__name__}")
    return value


def op_of(stack: Stack, name: str, kind: type[T]) -> T:
    """The op of one name in the first block."""
    block = stack.blocks[0]
    if name not in block.ops():
        raise UserError(f"this format needs an op '{name}' in every block; the model has {', '.join(block.ops())}")
    return part(block.op(name), kind, name)


def is_tied(spec: ModelSpec) -> bool:
    """Whether the head is the embedding."""
    return TIED_HEAD in spec.ties

"""GPT-3: GPT-2 at eight sizes, with blocks that alternate between dense and locally banded attention.

Brown et al. (arXiv:2005.14165), section 2.1 and table 2.1; the banded pattern is that of the Sparse Transformer, Child
et al. (arXiv:1904.10509), section 4.3. No weights were released, so there is no foreign format of its own: a dense one
is a GPT-2 file.

Table 2.1 is followed to the letter, also where n_heads x d_head is not d_model: 1.3B (24 x 128 beside 2048, which makes
it 1.5 B parameters) and 13B (40 x 128 beside 5140). The paper does not publish the width of the band; 256 is that of
GPT-Neo, its open replication.
"""

from functools import partial

from phylon.families.base import Family, register_family
from phylon.families.decoder import causal_lm, head_width, sequential
from phylon.families.sizes import sized
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import DepthScaledInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import ModelSpec
from phylon.patterns import Pattern, Strided, Window
from phylon.spec.base import Init


@sized
def gpt3_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    head_dim: int | None = None,
    d_ff: int | None = None,
    vocab_size: int = 50_257,
    max_seq_len: int = 2048,
    band: Pattern | None = Window(size=256),  # noqa: B008 - frozen
    eps: float = 1e-5,
    activation: str = "gelu_tanh",
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    init: Init | None = None,
) -> ModelSpec:
    """A GPT-3-style decoder; ``d_ff`` is 4 D. ``band`` is the pattern of every second block; ``None`` is dense."""
    head_dim = head_dim or head_width(d_model, n_heads)
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        qkv_bias=True,
        out_bias=True,
        dropout=attention_dropout,
    )
    dense = sequential(attention, ffn, norm, drop=dropout)
    banded = dense if band is None else sequential(attention.replace(pattern=band), ffn, norm, drop=dropout)
    positions = LearnedPositions(max_seq_len=max_seq_len)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, positions=positions, dropout=embed_dropout),
        blocks=tuple(banded if i % 2 else dense for i in range(n_layers)),
        norm_final=norm,
        tied=True,
        init=init or DepthScaledInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def _cases() -> list[ModelSpec]:
    tiny = partial(gpt3_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [
        tiny(band=Window(size=4)),
        tiny(band=None),
        tiny(head_dim=10, d_ff=50, band=Window(size=4) | Strided(stride=4)),
    ]


def _size(n_layers: int, d_model: int, n_heads: int, head_dim: int) -> partial[ModelSpec]:
    return partial(gpt3_spec, n_layers=n_layers, d_model=d_model, n_heads=n_heads, head_dim=head_dim)


register_family(
    Family(
        name="gpt3",
        title="GPT-3",
        paper="arXiv:2005.14165",
        builder=gpt3_spec,
        presets={
            "gpt3-125m": _size(12, 768, 12, 64),
            "gpt3-350m": _size(24, 1024, 16, 64),
            "gpt3-760m": _size(24, 1536, 16, 96),
            "gpt3-1.3b": _size(24, 2048, 24, 128),
            "gpt3-2.7b": _size(32, 2560, 32, 80),
            "gpt3-6.7b": _size(32, 4096, 32, 128),
            "gpt3-13b": _size(40, 5140, 40, 128),
            "gpt3-175b": _size(96, 12_288, 96, 128),
        },
        cases=_cases,
        golden={
            "gpt3-125m": 125_226_240,
            "gpt3-350m": 355_871_744,
            "gpt3-760m": 760_300_032,
            "gpt3-1.3b": 1_517_123_584,
            "gpt3-2.7b": 2_651_553_280,
            "gpt3-6.7b": 6_658_404_352,
            "gpt3-13b": 12_936_488_380,
            "gpt3-175b": 174_604_259_328,
        },
    )
)

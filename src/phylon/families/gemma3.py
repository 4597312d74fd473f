"""Gemma 3, its text model: norms before and behind every branch, five blocks with a window for one without.

Gemma team (arXiv:2503.19786), section 2 and table 1; the norms behind the branches and soft caps: Gemma 2
(arXiv:2408.00118), section 2. Norm weights count from 1 (``RMSNorm.offset``), as stored: a 1 added on load would not
come back bit for bit.

Blocks with a window turn by theta 10,000, the others by 1,000,000, which longer contexts stretch.

The scale of the embedding, ``sqrt(d_model)``, stays exact here; the reference rounds it to the dtype of the model
(2,560 in bfloat16: 50.5 for 50.596), as the training did.
"""

import math
from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    embed_of,
    embedding_rules,
    hf_activation,
    is_tied,
    layer_kinds,
    norm_eps,
    op_of,
    part,
)
from phylon.families.llama import whole_heads
from phylon.families.rope import plain_table, read_rotary, write_rotary
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import LinearScaling, Rotary
from phylon.model.spec import Block, Branch, ModelSpec, Sublayer
from phylon.patterns import Causal, Window
from phylon.spec.base import Init, Op
from phylon.spec.errors import UserError


@sized
def gemma3_spec(
    *,
    d_model: int = 256,
    n_layers: int = 6,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int = 256,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 32_768,
    window: int = 512,
    wide: tuple[int, ...] | None = None,
    rotary: Rotary = Rotary(theta=1e6),  # noqa: B008 - frozen
    local_rotary: Rotary = Rotary(theta=1e4),  # noqa: B008 - frozen
    query_scale: float = 256.0,
    eps: float = 1e-6,
    activation: str = "gelu_tanh",
    attention_bias: bool = False,
    attention_dropout: float = 0.0,
    softcap: float | None = None,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A Gemma-3-style decoder; ``wide`` are the blocks without a window, by default every sixth; ``d_ff`` is 4 D.

    Scores are multiplied by ``query_scale ** -0.5``.
    """
    wide = tuple(range(5, n_layers, 6)) if wide is None else wide
    if not set(wide) <= set(range(n_layers)):
        raise UserError(f"wide blocks {list(wide)} are not all from 0 to {n_layers - 1}")
    norm = RMSNorm(eps=eps, offset=1.0)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_dim=head_dim,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=norm,
        scale=query_scale**-0.5,
        dropout=attention_dropout,
    )
    ffn = GLU(d_ff=d_ff or 4 * d_model, activation=activation)

    def sandwich(op: Op) -> Sublayer:
        return Sublayer(branches=(Branch(op=op, norm_in=norm, norm_branch=norm),))

    def block(i: int) -> Block:
        pattern, turn = (Causal(), rotary) if i in wide else (Window(size=window), local_rotary)
        return Block(sublayers=(sandwich(attention.replace(pattern=pattern, rotary=turn)), sandwich(ffn)))

    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, scale=math.sqrt(d_model)),
        blocks=tuple(block(i) for i in range(n_layers)),
        norm_final=norm,
        head=LMHead(vocab_size=vocab_size, softcap=softcap),
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    n_layers, head_dim = config.depth("num_hidden_layers"), config.size("head_dim", 256)
    max_seq_len = config.size("max_position_embeddings", 131_072)
    rotary, local_rotary = _read_rotaries(config, head_dim, max_seq_len)
    config.expect("use_bidirectional_attention", False, why="this is the causal text model")
    config.expect("attn_logit_softcapping", None, why="Gemma 3 caps no scores, and its reference ignores the key")
    config.ignore("cache_implementation")  # how the reference keeps keys
    spec = gemma3_spec(
        d_model=config.size("hidden_size", 2304),
        n_layers=n_layers,
        n_heads=config.size("num_attention_heads", 8),
        n_kv_heads=config.size("num_key_value_heads", 4),
        head_dim=head_dim,
        d_ff=config.size("intermediate_size", 9216),
        vocab_size=config.size("vocab_size", 262_208),
        max_seq_len=max_seq_len,
        window=config.size("sliding_window", 4096),
        wide=_read_wide(config, n_layers),
        rotary=rotary,
        local_rotary=local_rotary,
        query_scale=config.number("query_pre_attn_scalar", 256, above=0),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=activation_name(config, "hidden_activation", "gelu_pytorch_tanh"),
        attention_bias=config.take("attention_bias", False, bool),
        attention_dropout=config.number("attention_dropout", 0.0),
        softcap=_read_softcap(config),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def _read_softcap(config: Config) -> float | None:
    key = "final_logit_softcapping"
    return None if config.take(key, None) is None else config.number(key, above=0)


def _read_wide(config: Config, n_layers: int) -> tuple[int, ...]:
    every = config.size("sliding_window_pattern", 6)
    by_pattern = tuple(range(every - 1, n_layers, every))
    kinds = layer_kinds(config, n_layers)
    if kinds is None:
        config.expect("_sliding_window_pattern", every, why="its code reads 'sliding_window_pattern' alone")
        return by_pattern
    # Its code writes 6 there whatever the kinds are.
    config.ignore("_sliding_window_pattern")
    wide = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if "sliding_window_pattern" in config and wide != by_pattern:
        raise UserError(
            f"{config.where}: 'layer_types' has full attention in the blocks {wide} and 'sliding_window_pattern' "
            f"{every} in the blocks {by_pattern}: correct or remove one of them"
        )
    return wide


def _read_rotaries(config: Config, head_dim: int, max_seq_len: int) -> tuple[Rotary, Rotary]:
    """Of wide and of local blocks: from the older flat keys, or from ``rope_parameters`` by the kind of block."""
    theta, local_theta = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    newer = config.take("rope_parameters", None, dict) or {}
    said = {"rope_theta": config.take("rope_theta", None), **(plain_table(config, "rope_scaling") or {})}
    older = {"full_attention": said, "sliding_attention": {"rope_theta": config.take("rope_local_base_freq", None)}}
    full = {"rope_theta": theta, **{key: value for key, value in said.items() if value is not None}}
    tables = {"full_attention": full, "sliding_attention": {"rope_theta": local_theta}}
    for kind, table in newer.items():
        if kind not in tables or not isinstance(table, dict):
            raise UserError(f"{config.where}: 'rope_parameters' must be by {' and '.join(tables)}, got '{kind}'")
        flat = {"rope_theta": "rope_theta" if kind == "full_attention" else "rope_local_base_freq"}
        table = plain_table(config, f"rope_parameters.{kind}", table) or {}
        for key, value in table.items():
            config.agree(
                {flat.get(key, f"rope_scaling.{key}"): older[kind].get(key), f"rope_parameters.{kind}.{key}": value}
            )
        tables[kind] |= table
    wide, local = (
        whole_heads(read_rotary(Config({"rope_parameters": table}, config.where), head_dim, max_seq_len), config.where)
        for table in tables.values()
    )
    return wide, local


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", GLU)
    mixers = [part(block.op("attn"), Attention, "attn") for block in stack.blocks]
    windows = [m.pattern.size for m in mixers if isinstance(m.pattern, Window)]
    max_seq_len = spec.max_seq_len or 131_072
    scale = part(attention.scale, float, "attn.scale")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": ffn.d_ff,
        "vocab_size": embed_of(stack).vocab_size,
        "max_position_embeddings": max_seq_len,
        "sliding_window": windows[0] if windows else 4096,
        "layer_types": ["sliding_attention" if isinstance(m.pattern, Window) else "full_attention" for m in mixers],
        **_write_rotaries(mixers, max_seq_len),
        "query_pre_attn_scalar": _query_scale(scale),
        "rms_norm_eps": norm_eps(stack, RMSNorm),
        "hidden_activation": hf_activation(ffn.activation),
        "attention_bias": attention.qkv_bias,
        "attention_dropout": attention.dropout,
        "final_logit_softcapping": part(spec.heads["lm"], LMHead, "the head").softcap,
        "tie_word_embeddings": is_tied(spec),
    }


def _write_rotaries(mixers: list[Attention], max_seq_len: int) -> dict[str, Any]:
    found: dict[type, Rotary] = {}
    for mixer in mixers:
        turn = whole_heads(part(mixer.rotary, Rotary, "attn.rotary"), "this format")
        found.setdefault(type(mixer.pattern), turn)
    local = found.get(Window, Rotary(theta=1e4))
    wide = write_rotary(found.get(Causal, Rotary(theta=1e6)), mixers[0].head_dim, max_seq_len)
    if local.scaling is None:
        return {**wide, "rope_local_base_freq": local.theta}
    # The older keys stretch blocks without a window only.
    written = {"full_attention": wide, "sliding_attention": write_rotary(local, mixers[0].head_dim, max_seq_len)}
    tables = {
        kind: {"rope_type": "default", "rope_theta": table["rope_theta"], **table.get("rope_scaling", {})}
        for kind, table in written.items()
    }
    return {"rope_parameters": tables}


def _query_scale(scale: float) -> float:
    """The shortest number whose ``** -0.5`` is ``scale``, a whole one where there is one.

    The reference documents a real number; its pinned release checks for a whole one.
    """
    exact = scale**-2
    candidates = (round(exact), *(round(exact, digits) for digits in range(1, 17)))
    return next((short for short in candidates if short > 0 and short**-0.5 == scale), exact)


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "model.layers.{i}.", "decoder.blocks.{i}."
    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_norm_branch",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_norm_branch",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
    }
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "model.embed_tokens.weight", "lm_head.weight"),
        *(Rename(f"{theirs}{name}.weight", f"{ours}{mine}.weight") for name, mine in norms.items()),
        *(Rename(f"{theirs}self_attn.{m}_proj.{{p}}", f"{ours}attn.{m}_proj.{{p}}") for m in "qkvo"),
        *(Rename(f"{theirs}mlp.{m}_proj.weight", f"{ours}ffn.{m}_proj.weight") for m in ("gate", "up", "down")),
        Rename("model.norm.weight", "decoder.norm_final.weight"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(gemma3_spec, d_model=24, n_layers=2, n_heads=4, vocab_size=37, d_ff=40, max_seq_len=64, window=4)
    return [
        tiny(n_kv_heads=2, head_dim=10, wide=(1,), rotary=Rotary(theta=1e6, scaling=LinearScaling(factor=8.0))),
        tiny(n_kv_heads=1, head_dim=6, wide=(0,), query_scale=7.0, softcap=5.0, tied=False),
        tiny(head_dim=6, wide=(), attention_bias=True),
    ]


_gemma3 = partial(
    gemma3_spec,
    vocab_size=262_208,
    max_seq_len=131_072,
    window=1024,
    rotary=Rotary(theta=1e6, scaling=LinearScaling(factor=8.0)),
)
_small = partial(gemma3_spec, n_heads=4, n_kv_heads=1, vocab_size=262_144)

register_family(
    Family(
        name="gemma3",
        title="Gemma 3 (text)",
        paper="arXiv:2503.19786",
        builder=gemma3_spec,
        presets={
            "gemma3-270m": partial(_small, d_model=640, n_layers=18, d_ff=2048),
            "gemma3-1b": partial(_small, d_model=1152, n_layers=26, d_ff=6912),
            "gemma3-4b": partial(_gemma3, d_model=2560, n_layers=34, n_heads=8, n_kv_heads=4, d_ff=10_240),
            "gemma3-12b": partial(_gemma3, d_model=3840, n_layers=48, n_heads=16, n_kv_heads=8, d_ff=15_360),
            "gemma3-27b": partial(
                _gemma3,
                d_model=5376,
                n_layers=62,
                n_heads=32,
                n_kv_heads=16,
                head_dim=128,
                d_ff=21_504,
                query_scale=168.0,
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(
                model_types=("gemma3_text",),
                read=read_config,
                write=write_config,
                layout=hf_layout,
                stems=("Gemma3",),
            ),
            "Gemma3Text",
            token=None,
            span=None,
        ),
        # Sizes of table 1; the counts in full from the reference class on the meta device.
        golden={
            "gemma3-270m": 268_098_176,
            "gemma3-1b": 999_885_952,
            "gemma3-4b": 3_880_263_168,
            "gemma3-12b": 11_766_034_176,
            "gemma3-27b": 27_009_346_304,
        },
    )
)

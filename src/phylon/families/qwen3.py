"""Qwen3: grouped-query attention with a norm on every query and key head, heads wider than their share of the model.

Qwen team (arXiv:2505.09388), section 2 and table 1; QK-norm: Dehghani et al. (arXiv:2302.05442). The small sizes tie
the head to the embedding.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Layout, Rename
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import decoder_of, layer_kinds, llama_spec, op_of, part
from phylon.families.llama import hf_rules, read_shared, write_shared
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import ModelSpec
from phylon.patterns import Window
from phylon.spec.base import Init
from phylon.spec.errors import UserError
from phylon.spec.override import override


@sized
def qwen3_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int = 128,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 40_960,
    eps: float = 1e-6,
    rotary: Rotary = Rotary(theta=1e6),  # noqa: B008 - frozen
    activation: str = "silu",
    attention_bias: bool = False,
    attention_dropout: float = 0.0,
    window: int | None = None,
    local: tuple[int, ...] = (),
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A Qwen3-style decoder; the blocks in ``local`` see a ``window``."""
    spec = llama_spec(
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        eps=eps,
        rotary=rotary,
        activation=activation,
        attention_bias=attention_bias,
        attention_dropout=attention_dropout,
        qk_norm=RMSNorm(eps=eps),
        tied=tied,
        init=init,
    )
    if not local:
        return spec
    if window is None:
        raise UserError(f"blocks {list(local)} are local; give their window")
    return override(spec, {f"decoder.blocks.{i}.attn.pattern": Window(size=window) for i in local})


def read_config(config: Config) -> ModelSpec:
    n_layers = config.depth("num_hidden_layers")
    local = _read_local(config, n_layers)
    # Null where windows are turned off, as every release writes it.
    window = config.size("sliding_window", None) if "sliding_window" in config else 4096
    shared = read_shared(config, n_kv_heads=32, max_seq_len=32_768)
    if "head_dim" not in config:
        shared["head_dim"] = 128
    spec = qwen3_spec(
        **shared,
        attention_bias=config.take("attention_bias", False, bool),
        window=window,
        local=local,
    )
    config.finish()
    return spec


def _read_local(config: Config, n_layers: int) -> tuple[int, ...]:
    """The blocks with a window: those of ``layer_types``, or from ``max_window_layers`` on where windows are on."""
    windowed = config.take("use_sliding_window", False, bool)
    first = config.take("max_window_layers", 28, int)
    kinds = layer_kinds(config, n_layers)
    if kinds is None:
        return tuple(range(max(first, 0), n_layers)) if windowed else ()
    local = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if local and not windowed:
        raise UserError(f"{config.where}: 'layer_types' has windows, which 'use_sliding_window' turns off")
    return local


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention = op_of(stack, "attn", Attention)
    part(attention.qk_norm, RMSNorm, "attn.qk_norm")
    patterns = [part(block.op("attn"), Attention, "attn").pattern for block in stack.blocks]
    windows = [pattern.size for pattern in patterns if isinstance(pattern, Window)]
    kinds = ["sliding_attention" if isinstance(p, Window) else "full_attention" for p in patterns]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **write_shared(spec),
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": kinds.index("sliding_attention") if windows else len(kinds),
        "layer_types": kinds,
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "model.layers.{i}.self_attn.", "decoder.blocks.{i}.attn."
    norms = [Rename(f"{theirs}{m}_norm.weight", f"{ours}{m}_norm.weight") for m in "qk"]
    return Layout([*hf_rules(spec), *norms])


def _cases() -> list[ModelSpec]:
    tiny = partial(qwen3_spec, d_model=24, n_layers=2, n_heads=4, vocab_size=37, d_ff=40, max_seq_len=64)
    return [
        tiny(n_kv_heads=2, head_dim=10, tied=True),
        tiny(n_kv_heads=1, head_dim=6, attention_bias=True, window=4, local=(1,)),
    ]


_qwen3 = partial(qwen3_spec, n_kv_heads=8, vocab_size=151_936)

register_family(
    Family(
        name="qwen3",
        title="Qwen3",
        paper="arXiv:2505.09388",
        builder=qwen3_spec,
        presets={
            "qwen3-0.6b": partial(_qwen3, d_model=1024, n_layers=28, n_heads=16, d_ff=3072, tied=True),
            "qwen3-1.7b": partial(_qwen3, d_model=2048, n_layers=28, n_heads=16, d_ff=6144, tied=True),
            "qwen3-4b": partial(_qwen3, d_model=2560, n_layers=36, n_heads=32, d_ff=9728, tied=True),
            "qwen3-8b": partial(_qwen3, d_model=4096, n_layers=36, n_heads=32, d_ff=12_288),
            "qwen3-14b": partial(_qwen3, d_model=5120, n_layers=40, n_heads=40, d_ff=17_408),
            "qwen3-32b": partial(_qwen3, d_model=5120, n_layers=64, n_heads=64, d_ff=25_600),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("qwen3",), read=read_config, write=write_config, layout=hf_layout),
            "Qwen3",
            span="transformer.",
        ),
        # Sizes of table 1; the counts in full from the reference class on the meta device.
        golden={
            "qwen3-0.6b": 596_049_920,
            "qwen3-1.7b": 1_720_574_976,
            "qwen3-4b": 4_022_468_096,
            "qwen3-8b": 8_190_735_360,
            "qwen3-14b": 14_768_307_200,
            "qwen3-32b": 32_762_123_264,
        },
    )
)

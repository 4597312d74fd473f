"""Mistral 7B: LLaMA with grouped queries and a sliding window. Jiang et al. (arXiv:2310.06825), section 2, table 1."""

from functools import partial
from typing import Any

from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import decoder_of, llama_spec, op_of
from phylon.families.llama import hf_layout, read_shared, write_shared
from phylon.families.tasks import decoder_format
from phylon.layers.mixers.attention import Attention
from phylon.model.spec import ModelSpec
from phylon.patterns import Causal, Pattern, Window
from phylon.spec.errors import UserError

mistral_spec = partial(llama_spec, pattern=Window(size=4096))
"""The builder of the LLaMA family with Mistral's window."""


def read_config(config: Config) -> ModelSpec:
    window = config.size("sliding_window", None) if "sliding_window" in config else 4096
    pattern: Pattern = Causal() if window is None else Window(size=window)
    spec = llama_spec(**read_shared(config, n_kv_heads=8, max_seq_len=131_072), pattern=pattern)
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    pattern = op_of(decoder_of(spec), "attn", Attention).pattern
    if not isinstance(pattern, Causal | Window):
        raise UserError(f"a Mistral config says a causal window, the model has {type(pattern).__name__}")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **write_shared(spec),
        "sliding_window": pattern.size if isinstance(pattern, Window) else None,
    }


def _cases() -> list[ModelSpec]:
    tiny = partial(
        mistral_spec, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=37, d_ff=40, max_seq_len=64
    )
    return [tiny(pattern=Window(size=4)), tiny(head_dim=10, pattern=Causal(), tied=True)]


_7b = partial(
    mistral_spec,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    d_ff=14_336,
    vocab_size=32_000,
    max_seq_len=32_768,
)

register_family(
    Family(
        name="mistral",
        title="Mistral 7B",
        paper="arXiv:2310.06825",
        builder=mistral_spec,
        presets={"mistral-7b": _7b},
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("mistral",), read=read_config, write=write_config, layout=hf_layout),
            "Mistral",
        ),
        golden={"mistral-7b": 7_241_732_096},
    )
)

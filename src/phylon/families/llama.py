"""LLaMA, Llama 2, Llama 3: RMSNorm, rotary attention (grouped from Llama 2 70B on), SwiGLU.

Touvron et al. (arXiv:2302.13971), section 2.2 and table 2; Llama 2 (arXiv:2307.09288), section 2.2 and table 1;
Llama 3 (arXiv:2407.21783), section 3.2 and table 3.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from phylon.checkpoint import Drop, Layout, PermuteRotary, Rename, Rule, TensorSource, Tied
from phylon.families.base import Config, Family, GGUFFormat, HFFormat, register_family
from phylon.families.decoder import activation_name, decoder_of, hf_activation, is_tied, llama_spec, op_of, part
from phylon.families.rope import read_rotary, write_rotary
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import (
    DynamicNTKScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    YarnScaling,
)
from phylon.model.spec import ModelSpec
from phylon.patterns import Causal
from phylon.spec.errors import UserError


def read_config(config: Config) -> ModelSpec:
    spec = llama_spec(**read_shared(config), **read_biases(config), pattern=Causal())
    config.finish()
    return spec


def read_shared(
    config: Config, *, n_kv_heads: int | None = None, max_seq_len: int = 2048, theta: float = 10_000.0
) -> dict[str, Any]:
    """The keys that LLaMA and Mistral configurations have in common, as arguments of ``llama_spec``.

    ``n_kv_heads`` (``None``: those of the queries), ``max_seq_len`` and the rotary ``theta`` are the reference's where
    a file is silent.
    """
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if "num_key_value_heads" in config:
        n_kv_heads = config.size("num_key_value_heads", None)
    head_dim = config.size("head_dim", None) or d_model // n_heads
    max_seq_len = config.size("max_position_embeddings", max_seq_len)
    config.expect("partial_rotary_factor", 1.0, why="the reference turns whole heads of this family whatever it says")
    return {
        "d_model": d_model,
        "n_layers": config.depth("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads or n_heads,
        "head_dim": head_dim,
        "d_ff": config.size("intermediate_size"),
        "vocab_size": config.size("vocab_size"),
        "max_seq_len": max_seq_len,
        "eps": config.number("rms_norm_eps", 1e-6),
        "rotary": whole_heads(read_rotary(config, head_dim, max_seq_len, default_theta=theta), config.where),
        "activation": activation_name(config, "hidden_act", "silu"),
        "attention_dropout": config.number("attention_dropout", 0.0),
        "tied": config.take("tie_word_embeddings", False, bool),
    }


def whole_heads(rotary: Rotary, where: str) -> Rotary:
    """Refuses partial rotary: the reference LLaMA and Mistral turn whole heads, whatever their configuration says."""
    if rotary.dim is not None:
        why = "the reference of this family turns whole heads"
        raise UserError(f"{where}: partial rotary ('partial_rotary_factor') is not supported: {why}")
    return rotary


def read_biases(config: Config) -> dict[str, Any]:
    config.expect("rope_interleaved", False, why="weights of Hugging Face folders are in the half-split layout")
    config.ignore("is_llama_config", "max_sequence_length")
    return {
        "attention_bias": config.take("attention_bias", False, bool),
        "ffn_bias": config.take("mlp_bias", False, bool),
    }


def write_config(spec: ModelSpec) -> dict[str, Any]:
    attention, ffn = op_of(decoder_of(spec), "attn", Attention), op_of(decoder_of(spec), "ffn", GLU)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **write_shared(spec),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": ffn.bias,
    }


def write_shared(spec: ModelSpec) -> dict[str, Any]:
    """The reverse of ``read_shared``."""
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", GLU)
    max_seq_len = spec.max_seq_len or 2048
    return {
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": ffn.d_ff,
        "vocab_size": part(stack.embed, TokenEmbed, "the embedding").vocab_size,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": part(stack.norm_final, RMSNorm, "the final norm").eps,
        **write_rotary(
            whole_heads(part(attention.rotary, Rotary, "attn.rotary"), "this format"), attention.head_dim, max_seq_len
        ),
        "hidden_act": hf_activation(ffn.activation),
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    return Layout(hf_rules(spec))


def hf_rules(spec: ModelSpec) -> list[Rule | Drop]:
    """The rules that LLaMA's descendants share."""
    theirs, ours = "model.layers.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        _embedding(spec, "model.embed_tokens.weight", "lm_head.weight"),
        Rename(theirs + "input_layernorm.weight", ours + "attn_norm.weight"),
        Rename(theirs + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        *(
            Rename(f"{theirs}self_attn.{m}.{{p}}", f"{ours}attn.{m}.{{p}}")
            for m in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        *(Rename(f"{theirs}mlp.{m}.{{p}}", f"{ours}ffn.{m}.{{p}}") for m in ("gate_proj", "up_proj", "down_proj")),
        Rename("model.norm.weight", "decoder.norm_final.weight"),
        Drop(theirs + "self_attn.rotary_emb.inv_freq", "computed from the configuration"),
    ]
    if not is_tied(spec):
        rules.append(Rename("lm_head.weight", "heads.lm.proj.weight"))
    return rules


def _embedding(spec: ModelSpec, name: str, head: str) -> Rule:
    ours = "decoder.embed.tokens.weight"
    return Tied(name, ours, head) if is_tied(spec) else Rename(name, ours)


def read_gguf(metadata: Config, source: TensorSource) -> ModelSpec:
    prefix = "llama."
    d_model, n_heads = metadata.size(prefix + "embedding_length"), metadata.size(prefix + "attention.head_count")
    head_dim = metadata.size(prefix + "attention.key_length", d_model // n_heads)
    max_seq_len = metadata.size(prefix + "context_length")
    metadata.expect(prefix + "attention.value_length", head_dim, why="keys and values have one width")
    metadata.expect(prefix + "rope.scale_linear", 1.0, why="linear scaling is read from rope.scaling")
    metadata.expect(prefix + "expert_count", 0, why="mixtures of experts come with their own family")
    rotary_dim = metadata.size(prefix + "rope.dimension_count", head_dim)
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{metadata.where} lacks the matrix 'token_embd.weight'")
    vocab_size = metadata.size(prefix + "vocab_size", embedding.shape[0])
    spec = llama_spec(
        d_model=d_model,
        n_layers=metadata.depth(prefix + "block_count"),
        n_heads=n_heads,
        n_kv_heads=metadata.size(prefix + "attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=metadata.size(prefix + "feed_forward_length"),
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        eps=_shortest(metadata.number(prefix + "attention.layer_norm_rms_epsilon")),
        rotary=Rotary(
            theta=_shortest(metadata.number(prefix + "rope.freq_base", 10_000.0)),
            dim=None if rotary_dim == head_dim else rotary_dim,
            scaling=_read_gguf_scaling(metadata, source, max_seq_len),
        ),
        attention_bias="blk.0.attn_q.bias" in source.tensors,
        ffn_bias="blk.0.ffn_up.bias" in source.tensors,
        tied="output.weight" not in source.tensors,
    )
    metadata.finish()
    return spec


def _shortest(number: float) -> float:
    """1e-5 where the file holds the float32 nearest to it: what was meant, and the same in fp32."""
    return float(str(np.float32(number))) if float(np.float32(number)) == number else number


def _read_gguf_scaling(metadata: Config, source: TensorSource, max_seq_len: int) -> Any:
    prefix = "llama.rope.scaling."
    kind = metadata.take(prefix + "type", "none", str)
    factor = _shortest(metadata.number(prefix + "factor", 1.0))
    original = metadata.size(prefix + "original_context_length", max_seq_len)
    metadata.ignore(prefix + "finetuned")
    if "rope_freqs.weight" in source.tensors:
        if kind != "none":
            raise UserError(f"{metadata.where} scales its frequencies twice: by 'rope_freqs.weight' and by '{kind}'")
        return FrequencyFactors(factors=tuple(source.read("rope_freqs.weight").double().tolist()))
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "yarn":
        return YarnScaling(factor=factor, original_max_seq_len=original)
    if kind != "none":
        raise UserError(f"{metadata.where}: unknown rope scaling '{kind}' (known: none, linear, yarn)")
    return None


def write_gguf(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn = op_of(stack, "attn", Attention), op_of(stack, "ffn", GLU)
    rotary = part(attention.rotary, Rotary, "attn.rotary")
    if ffn.activation != "silu":
        raise UserError(f"GGUF of the llama kind holds SwiGLU only, the model has '{ffn.activation}'")
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": len(stack.blocks),
        "llama.context_length": spec.max_seq_len or 2048,
        "llama.embedding_length": stack.d_model,
        "llama.feed_forward_length": ffn.d_ff,
        "llama.attention.head_count": attention.n_heads,
        "llama.attention.head_count_kv": attention.n_kv_heads,
        "llama.attention.key_length": attention.head_dim,
        "llama.attention.value_length": attention.head_dim,
        "llama.attention.layer_norm_rms_epsilon": part(stack.norm_final, RMSNorm, "the final norm").eps,
        "llama.rope.freq_base": rotary.theta,
        "llama.rope.dimension_count": rotary.width(attention.head_dim),
        "llama.vocab_size": part(stack.embed, TokenEmbed, "the embedding").vocab_size,
    }
    scaling = rotary.scaling
    if isinstance(scaling, LinearScaling):
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": scaling.factor}
    elif isinstance(scaling, YarnScaling):
        if (scaling.beta_fast, scaling.beta_slow, scaling.attention_factor, scaling.round_ramp) != (32, 1, None, True):
            raise UserError("GGUF says YaRN with its default constants only")
        metadata |= {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": scaling.factor,
            "llama.rope.scaling.original_context_length": scaling.original_max_seq_len,
        }
    elif isinstance(scaling, DynamicNTKScaling):
        raise UserError("GGUF cannot say dynamic NTK; fold it into theta")
    return metadata


def gguf_extra(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Numbers that GGUF stores as tensors: by how much each rotary frequency is divided."""
    rotary = op_of(decoder_of(spec), "attn", Attention).rotary
    if not isinstance(rotary, Rotary) or not isinstance(rotary.scaling, Llama3Scaling | FrequencyFactors):
        return {}
    head_dim = op_of(decoder_of(spec), "attn", Attention).head_dim
    plain, _ = rotary.replace(scaling=None).frequencies(head_dim)
    scaled, _ = rotary.frequencies(head_dim)
    return {"rope_freqs.weight": (plain / scaled).to(torch.float32)}


def gguf_layout(spec: ModelSpec) -> Layout:
    attention = op_of(decoder_of(spec), "attn", Attention)
    dim = part(attention.rotary, Rotary, "attn.rotary").width(attention.head_dim)
    theirs, ours = "blk.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        _embedding(spec, "token_embd.weight", "output.weight"),
        Rename(theirs + "attn_norm.weight", ours + "attn_norm.weight"),
        Rename(theirs + "ffn_norm.weight", ours + "ffn_norm.weight"),
        PermuteRotary(theirs + "attn_q.{p}", ours + "attn.q_proj.{p}", attention.n_heads, attention.head_dim, dim),
        PermuteRotary(theirs + "attn_k.{p}", ours + "attn.k_proj.{p}", attention.n_kv_heads, attention.head_dim, dim),
        Rename(theirs + "attn_v.{p}", ours + "attn.v_proj.{p}"),
        Rename(theirs + "attn_output.{p}", ours + "attn.o_proj.{p}"),
        *(Rename(f"{theirs}ffn_{m}.{{p}}", f"{ours}ffn.{m}_proj.{{p}}") for m in ("gate", "up", "down")),
        Rename("output_norm.weight", "decoder.norm_final.weight"),
        Drop("rope_freqs.weight", "read as the factors of the rotary frequencies"),
    ]
    if not is_tied(spec):
        rules.append(Rename("output.weight", "heads.lm.proj.weight"))
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(llama_spec, d_model=24, n_layers=2, vocab_size=37, d_ff=40, max_seq_len=64)
    scalings = (
        LinearScaling(factor=2.0),
        YarnScaling(factor=4.0, original_max_seq_len=16),
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16),
        DynamicNTKScaling(factor=2.0, original_max_seq_len=64, seq_len=64),
    )
    return [
        tiny(n_heads=4, n_kv_heads=2, tied=True),
        tiny(n_heads=3, n_kv_heads=1, head_dim=10, attention_bias=True, ffn_bias=True),
        *(tiny(n_heads=4, rotary=Rotary(theta=5e5, scaling=scaling)) for scaling in scalings),
    ]


_llama = partial(llama_spec, vocab_size=32_000, max_seq_len=2048, eps=1e-6)
_llama2 = partial(llama_spec, vocab_size=32_000, max_seq_len=4096, eps=1e-5)
_llama3 = partial(
    llama_spec, vocab_size=128_256, max_seq_len=8192, eps=1e-5, rotary=Rotary(theta=500_000.0), n_kv_heads=8
)
_llama31 = partial(
    _llama3,
    max_seq_len=131_072,
    rotary=Rotary(
        theta=500_000.0,
        scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
    ),
)
_size_7b = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 11_008}
_size_13b = {"d_model": 5120, "n_layers": 40, "n_heads": 40, "d_ff": 13_824}
_size_8b = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 14_336}
_size_70b = {"d_model": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28_672}

register_family(
    Family(
        name="llama",
        title="LLaMA, Llama 2, Llama 3",
        paper="arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783",
        builder=llama_spec,
        presets={
            "llama-7b": partial(_llama, **_size_7b),
            "llama-13b": partial(_llama, **_size_13b),
            "llama-30b": partial(_llama, d_model=6656, n_layers=60, n_heads=52, d_ff=17_920),
            "llama-65b": partial(_llama, d_model=8192, n_layers=80, n_heads=64, d_ff=22_016),
            "llama2-7b": partial(_llama2, **_size_7b),
            "llama2-13b": partial(_llama2, **_size_13b),
            "llama2-70b": partial(_llama2, **_size_70b),
            "llama3-8b": partial(_llama3, **_size_8b),
            "llama3-70b": partial(_llama3, **_size_70b),
            "llama3.1-8b": partial(_llama31, **_size_8b),
            "llama3.1-70b": partial(_llama31, **_size_70b),
            "llama3.1-405b": partial(_llama31, d_model=16_384, n_layers=126, n_heads=128, d_ff=53_248),
            "smollm2-135m": partial(
                llama_spec,
                d_model=576,
                n_layers=30,
                n_heads=9,
                n_kv_heads=3,
                d_ff=1536,
                vocab_size=49_152,
                max_seq_len=8192,
                rotary=Rotary(theta=100_000.0),
                tied=True,
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("llama",), read=read_config, write=write_config, layout=hf_layout),
            "Llama",
            span="transformer.",
        ),
        gguf=GGUFFormat(
            architectures=("llama",), read=read_gguf, write=write_gguf, layout=gguf_layout, extra=gguf_extra
        ),
        golden={
            "llama-7b": 6_738_415_616,
            "llama-13b": 13_015_864_320,
            "llama-30b": 32_528_943_616,
            "llama-65b": 65_285_660_672,
            "llama2-7b": 6_738_415_616,
            "llama2-13b": 13_015_864_320,
            "llama2-70b": 68_976_648_192,
            "llama3-8b": 8_030_261_248,
            "llama3-70b": 70_553_706_496,
            "llama3.1-8b": 8_030_261_248,
            "llama3.1-70b": 70_553_706_496,
            "llama3.1-405b": 405_853_388_800,
            "smollm2-135m": 134_515_008,
        },
    )
)

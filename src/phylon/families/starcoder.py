"""StarCoder: GPT-2 with one key and value head for all query heads.

Li et al. (arXiv:2305.06161), table 6; SantaCoder: Ben Allal et al. (arXiv:2301.03988); multi-query attention: Shazeer
(arXiv:1911.02150). With a key head for each query head it is GPT-2 exactly, and is saved as such.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Drop, Layout, Rename, Rule
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    drop_of,
    embed_of,
    embedding_rules,
    fused_qkv,
    head_width,
    hf_activation,
    is_tied,
    norm_eps,
    op_of,
    sequential,
)
from phylon.families.sizes import sized
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model.spec import ModelSpec
from phylon.spec.base import Init


@sized
def starcoder_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int = 1,
    d_ff: int | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 1024,
    scale: float | None = None,
    eps: float = 1e-5,
    activation: str = "gelu_tanh",
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A StarCoder-style decoder; ``d_ff`` is 4 D."""
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_width(d_model, n_heads),
        qkv_bias=True,
        out_bias=True,
        scale=scale,
        dropout=attention_dropout,
    )
    norm, ffn = LayerNorm(eps=eps), MLP(d_ff=d_ff or 4 * d_model, activation=activation)
    positions = LearnedPositions(max_seq_len=max_seq_len)
    return causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size, positions=positions, dropout=embed_dropout),
        blocks=(sequential(attention, ffn, norm, drop=dropout),) * n_layers,
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.02),
        max_seq_len=max_seq_len,
    )


def read_config(config: Config) -> ModelSpec:
    n_heads = config.size(config.name_of("n_head", "num_attention_heads"))
    config.expect("add_cross_attention", False, why="StarCoder is a decoder without an encoder")
    # Precision and kernels, which the backends settle; the summary head is no part of the language model.
    config.ignore(
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "pre_allocate_kv_cache"
    )
    config.ignore("validate_runner_input", "max_sequence_length", "max_batch_size", "pad_key_length")
    config.ignore(
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"
    )
    n_kv_heads = 1 if config.take("multi_query", True, bool) else n_heads
    config.expect(
        "num_key_value_heads", None, n_kv_heads, why="'multi_query' says whether it is 1 or every head has one"
    )
    spec = starcoder_spec(
        d_model=config.size(config.name_of("n_embd", "hidden_size")),
        n_layers=config.depth(config.name_of("n_layer", "num_hidden_layers")),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_ff=config.size("n_inner", None),
        vocab_size=config.size("vocab_size"),
        max_seq_len=config.size(config.name_of("n_positions", "max_position_embeddings"), 1024),
        scale=None if config.take("scale_attn_weights", True, bool) else 1.0,
        eps=config.number("layer_norm_epsilon", 1e-5),
        activation=activation_name(config, "activation_function", "gelu_pytorch_tanh"),
        embed_dropout=config.number("embd_pdrop", 0.1),
        attention_dropout=config.number("attn_pdrop", 0.1),
        dropout=config.number("resid_pdrop", 0.1),
        tied=config.take("tie_word_embeddings", True, bool),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    attention, ffn, embed = op_of(stack, "attn", Attention), op_of(stack, "ffn", MLP), embed_of(stack)
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "n_embd": stack.d_model,
        "n_layer": len(stack.blocks),
        "n_head": attention.n_heads,
        "multi_query": attention.n_kv_heads == 1,
        "n_inner": ffn.d_ff,
        "vocab_size": embed.vocab_size,
        "n_positions": spec.max_seq_len,
        "scale_attn_weights": attention.scale is None,
        "layer_norm_epsilon": norm_eps(stack, LayerNorm),
        "activation_function": hf_activation(ffn.activation),
        "embd_pdrop": embed.dropout,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": drop_of(stack),
        "tie_word_embeddings": is_tied(spec),
    }


def hf_layout(spec: ModelSpec) -> Layout:
    theirs, ours = "transformer.h.{i}.", "decoder.blocks.{i}."
    rules: list[Rule | Drop] = [
        *embedding_rules(spec, "transformer.wte.weight", "lm_head.weight"),
        Rename("transformer.wpe.weight", "decoder.embed.positions.weight"),
        Rename(theirs + "ln_1.{p}", ours + "attn_norm.{p}"),
        Rename(theirs + "ln_2.{p}", ours + "ffn_norm.{p}"),
        fused_qkv(theirs + "attn.c_attn.{p}", op_of(decoder_of(spec), "attn", Attention)),
        Rename(theirs + "attn.c_proj.{p}", ours + "attn.o_proj.{p}"),
        Rename(theirs + "mlp.c_fc.{p}", ours + "ffn.up_proj.{p}"),
        Rename(theirs + "mlp.c_proj.{p}", ours + "ffn.down_proj.{p}"),
        Rename("transformer.ln_f.{p}", "decoder.norm_final.{p}"),
        Drop("transformer.bias", "the causal mask, which the pattern says"),
    ]
    return Layout(rules)


def _cases() -> list[ModelSpec]:
    tiny = partial(starcoder_spec, d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)
    return [tiny(), tiny(n_kv_heads=3, d_ff=50, activation="relu", scale=1.0, tied=False)]


_starcoder = partial(
    starcoder_spec, vocab_size=49_152, max_seq_len=8192, embed_dropout=0.1, attention_dropout=0.1, dropout=0.1
)

register_family(
    Family(
        name="starcoder",
        title="StarCoder, SantaCoder",
        paper="arXiv:2305.06161, arXiv:2301.03988",
        builder=starcoder_spec,
        presets={
            "starcoder": partial(_starcoder, d_model=6144, n_layers=40, n_heads=48),
            "starcoderbase-1b": partial(_starcoder, d_model=2048, n_layers=24, n_heads=16),
            "starcoderbase-3b": partial(_starcoder, d_model=2816, n_layers=36, n_heads=22),
            "starcoderbase-7b": partial(_starcoder, d_model=4096, n_layers=42, n_heads=32),
            "santacoder": partial(
                _starcoder, d_model=2048, n_layers=24, n_heads=16, vocab_size=49_280, max_seq_len=2048
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("gpt_bigcode",), read=read_config, write=write_config, layout=hf_layout),
            "GPTBigCode",
            base="transformer.",
            token="classifier",
            span=None,
        ),
        # Table 6 ("15.5B"); in full from the reference class on the meta device.
        golden={
            "starcoder": 15_517_456_384,
            "starcoderbase-1b": 1_137_207_296,
            "starcoderbase-3b": 3_043_311_104,
            "starcoderbase-7b": 7_327_263_232,
            "santacoder": 1_124_886_528,
        },
    )
)

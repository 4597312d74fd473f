"""Mixtral: Mistral with eight experts a block, of which every token uses two. Jiang et al. (arXiv:2401.04088), §2."""

from functools import partial
from typing import Any

from phylon.checkpoint import Layout
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import decoder_of, llama_spec, op_of
from phylon.families.llama import hf_rules, read_shared, write_shared
from phylon.families.sizes import sized
from phylon.families.sparse import expert_rules, gated_experts, with_ffn
from phylon.families.tasks import decoder_format
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.layers.mixers.attention import Attention
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import ModelSpec
from phylon.patterns import Causal, Pattern, Window
from phylon.spec.base import Init
from phylon.spec.errors import UserError


@sized
def mixtral_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int = 512,
    n_experts: int = 8,
    top_k: int = 2,
    jitter: float = 0.0,
    vocab_size: int = 4096,
    max_seq_len: int = 32_768,
    eps: float = 1e-5,
    rotary: Rotary = Rotary(theta=1e6),  # noqa: B008 - frozen
    activation: str = "silu",
    attention_dropout: float = 0.0,
    pattern: Pattern = Causal(),  # noqa: B008 - frozen
    tied: bool = False,
    init: Init | None = None,
) -> ModelSpec:
    """A Mixtral-style decoder: ``n_experts`` SwiGLU experts of width ``d_ff`` in every block, ``top_k`` a token."""
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
        attention_dropout=attention_dropout,
        pattern=pattern,
        tied=tied,
        init=init,
    )
    moe = MoE(
        n_experts=n_experts,
        expert=GLU(d_ff=d_ff, activation=activation),
        router=RenormalisedRouter(top_k=top_k, jitter=jitter),
    )
    return with_ffn(spec, list(range(n_layers)), moe)


def read_config(config: Config) -> ModelSpec:
    shared = read_shared(config, n_kv_heads=8, max_seq_len=131_072, theta=1e6)
    # The reference's where a file is silent, and not LLaMA's.
    if "rms_norm_eps" not in config:
        shared["eps"] = 1e-5
    window = config.size("sliding_window", None)
    # What training adds to the loss is said by the recipe.
    config.ignore("output_router_logits", "router_aux_loss_coef")
    spec = mixtral_spec(
        **shared,
        pattern=Causal() if window is None else Window(size=window),
        n_experts=config.size(config.name_of("num_local_experts", "num_experts"), 8, most=65_536),
        top_k=config.size("num_experts_per_tok", 2, most=65_536),
        jitter=config.number("router_jitter_noise", 0.0),
    )
    config.finish()
    return spec


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = decoder_of(spec)
    moe, pattern = op_of(stack, "ffn", MoE), op_of(stack, "attn", Attention).pattern
    expert = gated_experts(moe, RenormalisedRouter)
    assert isinstance(moe.router, RenormalisedRouter)
    if not isinstance(pattern, Causal | Window):
        raise UserError(f"a Mixtral config says a causal window, the model has {type(pattern).__name__}")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **write_shared(with_ffn(spec, [0], expert)),
        "sliding_window": pattern.size if isinstance(pattern, Window) else None,
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.router.top_k,
        "router_jitter_noise": moe.router.jitter,
    }


def hf_layout(spec: ModelSpec) -> Layout:
    experts = expert_rules("model.layers.{i}.block_sparse_moe.", "decoder.blocks.{i}.ffn.", "gate", ("w1", "w3", "w2"))
    return Layout([*hf_rules(spec), *experts])


def _cases() -> list[ModelSpec]:
    tiny = partial(
        mixtral_spec, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=37, d_ff=20, max_seq_len=64
    )
    return [
        tiny(n_experts=4),
        tiny(n_experts=3, top_k=1, head_dim=10, pattern=Window(size=4), tied=True, activation="gelu"),
    ]


_mixtral = partial(mixtral_spec, n_kv_heads=8, head_dim=128)

register_family(
    Family(
        name="mixtral",
        title="Mixtral",
        paper="arXiv:2401.04088",
        builder=mixtral_spec,
        presets={
            "mixtral-8x7b": partial(_mixtral, d_model=4096, n_layers=32, n_heads=32, d_ff=14_336, vocab_size=32_000),
            "mixtral-8x22b": partial(
                _mixtral,
                d_model=6144,
                n_layers=56,
                n_heads=48,
                d_ff=16_384,
                vocab_size=32_000,
                max_seq_len=65_536,
            ),
        },
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("mixtral",), read=read_config, write=write_config, layout=hf_layout),
            "Mixtral",
        ),
        golden={"mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112},
    )
)

"""Switch Transformers: T5 with one expert of many for each token, in every other block.

Fedus, Zoph and Shazeer (arXiv:2101.03961), section 2 and table 9. An expert takes ``capacity`` tokens of a row in
training; what is more adds nothing. In evaluation nothing is dropped, which is the same while nothing overflows.
"""

from functools import partial
from typing import Any

from phylon.checkpoint import Layout, Rename, Rule, Stack
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import activation_name, drop_of, embed_of, hf_activation, norm_eps, op_of, part
from phylon.families.seq2seq import embedding_rules, lm_of, read_tied, stacks_of, with_lm, write_tied
from phylon.families.sizes import sized
from phylon.families.t5 import BIAS, stack_rules, t5_spec
from phylon.families.tasks import bare_format
from phylon.layers.ffn.dispatchers import Capacity, Dropless
from phylon.layers.ffn.mlp import MLP
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import SoftmaxRouter
from phylon.layers.heads.lm import LMHead
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.score_bias import T5Bias
from phylon.model.spec import ModelSpec
from phylon.model.spec import Stack as StackSpec
from phylon.spec.base import Init
from phylon.spec.errors import UserError
from phylon.spec.override import override


@sized
def switch_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_decoder_layers: int | None = None,
    sparse_step: int = 2,
    decoder_sparse_step: int | None = None,
    n_heads: int = 4,
    head_dim: int = 64,
    d_ff: int | None = None,
    n_experts: int = 8,
    capacity: int = 64,
    jitter: float = 0.01,
    router_bias: bool = False,
    vocab_size: int = 4096,
    n_buckets: int = 32,
    max_distance: int = 128,
    eps: float = 1e-6,
    activation: str = "relu",
    dropout: float = 0.0,
    tied: bool = True,
    init: Init | None = None,
) -> ModelSpec:
    """A Switch Transformer: of every ``sparse_step`` blocks the second has ``n_experts`` experts, top-1.

    ``decoder_sparse_step`` is that of the decoder where it differs. ``d_ff`` is 4 D. ``tied``: source, target and head
    are one matrix, and the head's input is multiplied by D^-0.5.
    """
    n_decoder_layers, decoder_sparse_step = n_decoder_layers or n_layers, decoder_sparse_step or sparse_step
    spec = t5_spec(
        d_model=d_model,
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        n_heads=n_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=vocab_size,
        n_buckets=n_buckets,
        max_distance=max_distance,
        eps=eps,
        activation=activation,
        head_scale=d_model**-0.5 if tied else None,
        dropout=dropout,
        init=init,
    )
    moe = MoE(
        n_experts=n_experts,
        expert=MLP(d_ff=d_ff or 4 * d_model, activation=activation, bias=False, dropout=dropout),
        router=SoftmaxRouter(jitter=jitter, bias=router_bias),
        dispatch=Capacity(tokens=capacity),
    )
    spec = spec if tied else spec.replace(ties=())
    places = {"encoder": _sparse(n_layers, sparse_step), "decoder": _sparse(n_decoder_layers, decoder_sparse_step)}
    return override(spec, {f"{stack}.blocks.{i}.ffn": moe for stack, blocks in places.items() for i in blocks})


def _sparse(n_layers: int, step: int) -> list[int]:
    """The second block of every ``step``; all of them where that is 1."""
    if step < 1:
        raise UserError(f"sparse_step must be at least 1, got {step}")
    return [i for i in range(n_layers) if step == 1 or i % step == 1]


def read_config(config: Config) -> ModelSpec:
    n_layers = config.depth(config.name_of("num_layers", "num_hidden_layers"))
    n_decoder_layers = config.size("num_decoder_layers", None, most=4096) or n_layers
    config.expect("router_dtype", "float32", why="routers run in at least fp32")
    config.expect("is_decoder", False, why="a decoder without its encoder is not read")
    config.expect("add_cross_attention", False, why="the decoder always reads the encoder")
    config.expect("is_gated_act", False, why="no release gates its feed-forward networks")
    config.expect("feed_forward_proj", "relu", why="no release has another")
    config.agree({key: config.take(key, None) for key in ("feed_forward_proj", "dense_act_fn")})
    # Training adds them to the loss, and the reference itself ignores the last.
    config.ignore("router_z_loss_coef", "router_aux_loss_coef", "add_router_probs", "output_router_logits")
    config.ignore(
        "router_ignore_padding_tokens",
        "router_type",
        "classifier_dropout",
        "n_positions",
        "batch_prioritized_routing",
        "num_selected_experts",
    )
    spec = switch_spec(
        d_model=config.size(config.name_of("d_model", "hidden_size"), 768),
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        sparse_step=_read_step(config, "encoder", n_layers),
        decoder_sparse_step=_read_step(config, "decoder", n_decoder_layers),
        n_heads=config.size(config.name_of("num_heads", "num_attention_heads"), 12),
        head_dim=config.size("d_kv", 64),
        d_ff=config.size("d_ff", 2048),
        n_experts=config.size("num_experts", 8, most=65_536),
        capacity=config.size("expert_capacity", 64),
        jitter=config.number("router_jitter_noise", 0.01),
        router_bias=config.take("router_bias", False, bool),
        vocab_size=config.size("vocab_size", 32_128),
        n_buckets=config.size("relative_attention_num_buckets", 32),
        max_distance=config.size("relative_attention_max_distance", 128),
        eps=config.number("layer_norm_epsilon", 1e-6),
        activation=activation_name(config, "dense_act_fn", "relu"),
        dropout=config.number("dropout_rate", 0.1),
        tied=read_tied(config),
    )
    config.finish()
    return spec


def _read_step(config: Config, stack: str, n_layers: int) -> int:
    """Every how many blocks one is sparse, which the reference reckons from how many are."""
    count = config.take(f"num_sparse_{stack}_layers", 3, int)
    if not 0 <= count <= n_layers:
        raise UserError(f"{config.where}: 'num_sparse_{stack}_layers' is {count}; there are {n_layers} layers")
    step = n_layers // count if count else n_layers
    config.expect(f"{stack}_sparse_step", step, why="it follows from the number of sparse layers")
    return step


def write_config(spec: ModelSpec) -> dict[str, Any]:
    encoder, decoder = stacks_of(spec)
    (step, moe), (decoder_step, _) = (_write_step(stack) for stack in (encoder, decoder))
    attention, bias = op_of(encoder, "attn", Attention), part(encoder.shared.get(BIAS), T5Bias, "the shared bias")
    router = part(moe.router, SoftmaxRouter, "the router")
    capacity = moe.dispatch.tokens if isinstance(moe.dispatch, Capacity) else None
    if capacity is None or not isinstance(moe.eval_dispatch, Dropless):
        raise UserError("a Switch config says a capacity in tokens for training, and none is kept for evaluation")
    if lm_of(spec).scale != (encoder.d_model**-0.5 if spec.ties else None):
        raise UserError("the head of a Switch Transformer scales its input by D^-0.5 where and only where it is tied")
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "is_encoder_decoder": True,
        "d_model": encoder.d_model,
        "d_kv": attention.head_dim,
        "d_ff": moe.expert.d_ff,
        "num_layers": len(encoder.blocks),
        "num_decoder_layers": len(decoder.blocks),
        "num_sparse_encoder_layers": len(encoder.blocks) // step,
        "num_sparse_decoder_layers": len(decoder.blocks) // decoder_step,
        "encoder_sparse_step": step,
        "decoder_sparse_step": decoder_step,
        "num_heads": attention.n_heads,
        "num_experts": moe.n_experts,
        "expert_capacity": capacity,
        "router_bias": router.bias,
        "router_jitter_noise": router.jitter,
        "router_dtype": "float32",
        "vocab_size": embed_of(encoder).vocab_size,
        "relative_attention_num_buckets": bias.n_buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": norm_eps(encoder, RMSNorm),
        "dense_act_fn": hf_activation(moe.expert.activation),
        "dropout_rate": drop_of(encoder),
        **write_tied(spec),
    }


def _write_step(stack: StackSpec) -> tuple[int, MoE]:
    places = [i for i, block in enumerate(stack.blocks) if isinstance(block.op("ffn"), MoE)]
    if not places:
        raise UserError("this format needs experts in both stacks; one of the model's has none")
    n_layers = len(stack.blocks)
    step = places[1] - places[0] if len(places) > 1 else 1 if n_layers == 1 else n_layers
    moe = stack.blocks[places[0]].op("ffn")
    assert isinstance(moe, MoE)
    return n_layers // (n_layers // step), moe


def hf_layout(spec: ModelSpec) -> Layout:
    return Layout(
        [
            *embedding_rules(spec, "", "shared.weight"),
            *_sparse_rules("encoder", ("attn", "ffn")),
            *_sparse_rules("decoder", ("attn", "cross_attn", "ffn")),
        ]
    )


def _sparse_rules(stack: str, ops: tuple[str, ...]) -> list[Rule]:
    theirs, ours = f"{stack}.block.{{i}}.layer.{len(ops) - 1}.mlp.", f"{stack}.blocks.{{i}}.ffn."
    return [
        *stack_rules(stack, ops, gated=False, ffn="mlp"),
        Rename(theirs + "router.classifier.{p}", ours + "router.proj.{p}"),
        Stack(theirs + "experts.expert_{e}.wi.weight", ours + "experts.up_proj.weight"),
        Stack(theirs + "experts.expert_{e}.wo.weight", ours + "experts.down_proj.weight"),
    ]


def _whole(spec: ModelSpec) -> ModelSpec:
    encoder, _ = stacks_of(spec)
    return with_lm(
        spec, LMHead(vocab_size=embed_of(encoder).vocab_size, scale=encoder.d_model**-0.5 if spec.ties else None)
    )


def _cases() -> list[ModelSpec]:
    tiny = partial(switch_spec, d_model=24, n_layers=2, n_heads=3, head_dim=10, d_ff=20, vocab_size=37)
    return [
        tiny(n_experts=4),
        tiny(n_experts=3, sparse_step=1, router_bias=True, jitter=0.0, n_buckets=8, max_distance=20),
    ]


_base = partial(switch_spec, d_model=768, n_layers=12, n_heads=12, d_ff=3072, vocab_size=32_128, dropout=0.1)

register_family(
    Family(
        name="switch",
        title="Switch Transformer",
        paper="arXiv:2101.03961",
        builder=switch_spec,
        presets={
            **{f"switch-base-{n}": partial(_base, n_experts=n) for n in (8, 16, 32, 64, 128, 256)},
            "switch-large-128": partial(_base, d_model=1024, n_layers=24, n_heads=16, d_ff=4096, n_experts=128),
        },
        cases=_cases,
        hf=bare_format(
            HFFormat(model_types=("switch_transformers",), read=read_config, write=write_config, layout=hf_layout),
            "SwitchTransformersModel",
            "SwitchTransformersForConditionalGeneration",
            base="",
            inner=_whole,
        ),
        golden={
            "switch-base-8": 619_339_008,
            "switch-base-16": 1_072_397_568,
            "switch-base-32": 1_978_514_688,
            "switch-base-64": 3_790_748_928,
            "switch-base-128": 7_415_217_408,
            "switch-base-256": 14_664_154_368,
            "switch-large-128": 26_309_291_008,
        },
    )
)

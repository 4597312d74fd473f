"""DeepSeek-V3: latent attention, dense blocks first, then experts chosen in groups, with a shared one.

DeepSeek-AI (arXiv:2412.19437), sections 2.1, 2.2 and 4.2. The head that predicts a second token is one more layer of
the released checkpoints, with copies of the embedding and the head: it is loaded where the file has it.
"""

from functools import partial
from typing import Any

import torch

from phylon.checkpoint import Drop, Fused, Layout, Rename, Rule, Tied, interleaved, rotary_rows
from phylon.families.base import Config, Family, HFFormat, register_family
from phylon.families.decoder import (
    activation_name,
    causal_lm,
    decoder_of,
    embed_of,
    hf_activation,
    is_tied,
    norm_eps,
    op_of,
    part,
)
from phylon.families.llama import whole_heads
from phylon.families.rope import read_attention_scale, read_rotary, write_rotary, write_scaled, yarn_scale
from phylon.families.sizes import sized
from phylon.families.sparse import expert_rules, gated_experts
from phylon.families.tasks import decoder_format
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import GroupedSigmoidRouter
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import NormalInit
from phylon.layers.mixers.mla import MLA
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import Rotary, YarnScaling
from phylon.model.mtp import MTP
from phylon.model.spec import Block, ModelSpec, Stack, Tie, pre_norm
from phylon.patterns import Causal
from phylon.spec.base import FeedForward, Init
from phylon.spec.errors import UserError

_TIED_MTP = Tie(name="heads.mtp.lm.proj.weight", source="heads.lm.proj.weight")
LATENT_NORM = RMSNorm(eps=1e-6)
"""The reference's norm of the latents, whatever the configuration's eps."""


@sized
def deepseek_spec(
    *,
    d_model: int = 256,
    n_layers: int = 4,
    n_dense: int = 1,
    n_heads: int = 4,
    q_lora_rank: int | None = None,
    kv_lora_rank: int = 64,
    qk_nope_head_dim: int = 32,
    qk_rope_head_dim: int = 16,
    v_head_dim: int = 32,
    d_ff: int = 704,
    d_ff_expert: int = 128,
    n_experts: int = 16,
    top_k: int = 4,
    n_groups: int = 1,
    top_groups: int = 1,
    n_shared: int = 1,
    routed_scale: float = 2.5,
    attention_scale: float | None = None,
    vocab_size: int = 4096,
    max_seq_len: int = 4096,
    eps: float = 1e-6,
    rotary: Rotary = Rotary(),  # noqa: B008 - frozen
    activation: str = "silu",
    attention_bias: bool = False,
    attention_dropout: float = 0.0,
    tied: bool = False,
    n_mtp: int = 0,
    init: Init | None = None,
) -> ModelSpec:
    """A DeepSeek-V3-style decoder: ``n_dense`` blocks of width ``d_ff``, then blocks of ``n_experts`` experts of width
    ``d_ff_expert`` beside ``n_shared`` that every token uses, kept as one of their joint width; ``n_mtp`` heads, 0 or
    1, that predict a further token."""
    if n_mtp not in (0, 1):
        raise UserError(f"n_mtp must be 0 or 1, got {n_mtp}")
    mixer = MLA(
        n_heads=n_heads,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=q_lora_rank,
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim,
        rotary=rotary,
        norm=LATENT_NORM,
        bias=attention_bias,
        scale=attention_scale,
        dropout=attention_dropout,
    )
    dense = GLU(d_ff=d_ff, activation=activation)
    sparse = MoE(
        n_experts=n_experts,
        expert=GLU(d_ff=d_ff_expert, activation=activation),
        router=GroupedSigmoidRouter(top_k=top_k, n_groups=n_groups, top_groups=top_groups, scale=routed_scale),
        shared=GLU(d_ff=d_ff_expert * n_shared, activation=activation),
    )
    norm = RMSNorm(eps=eps)

    def block(ffn: FeedForward) -> Block:
        return Block(sublayers=(pre_norm(mixer, norm), pre_norm(ffn, norm)))

    spec = causal_lm(
        d_model=d_model,
        embed=TokenEmbed(vocab_size=vocab_size),
        blocks=tuple(block(dense if i < n_dense else sparse) for i in range(n_layers)),
        norm_final=norm,
        tied=tied,
        init=init or NormalInit(std=0.006),
        max_seq_len=max_seq_len,
    )
    if not n_mtp:
        return spec
    mtp = MTP(block=block(sparse), norm=norm, lm=LMHead(vocab_size=vocab_size))
    return spec.replace(heads=spec.heads | {"mtp": mtp}, ties=(*spec.ties, _TIED_MTP))


def read_config(config: Config) -> ModelSpec:
    n_heads = config.size("num_attention_heads", 128)
    nope, rope = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
    max_seq_len = config.size("max_position_embeddings", 4096)
    _expectations(config, n_heads, nope, rope)
    rotary = whole_heads(read_rotary(config, rope, max_seq_len), config.where)
    n_layers = config.depth("num_hidden_layers")
    # The reference writes that there is such a layer, and does not write the layer.
    key = config.name_of("num_nextn_predict_layers", "num_mtp_layers")
    config.expect(key, 0, 1, why="at most one layer predicts a further token")
    ahead = config.take(key, 0, int)
    ahead = ahead if config.stores(f"model.layers.{n_layers}.eh_proj.weight", True) else 0
    spec = deepseek_spec(
        d_model=config.size("hidden_size", 7168),
        n_layers=n_layers,
        n_dense=config.take("first_k_dense_replace", 3, int),
        n_heads=n_heads,
        q_lora_rank=config.size("q_lora_rank", None) if "q_lora_rank" in config else 1536,
        kv_lora_rank=config.size("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.size("v_head_dim", 128),
        d_ff=config.size("intermediate_size", 18_432),
        d_ff_expert=config.size("moe_intermediate_size", 2048),
        n_experts=config.size(config.name_of("n_routed_experts", "num_local_experts"), 256, most=65_536),
        top_k=config.size("num_experts_per_tok", 8, most=65_536),
        n_groups=config.size("n_group", 8),
        top_groups=config.size("topk_group", 4),
        n_shared=config.size("n_shared_experts", 1),
        routed_scale=config.number("routed_scaling_factor", 2.5),
        attention_scale=read_attention_scale(config, rotary, nope + rope),
        vocab_size=config.size("vocab_size", 129_280),
        max_seq_len=max_seq_len,
        eps=config.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        activation=activation_name(config, "hidden_act", "silu"),
        attention_bias=config.take("attention_bias", False, bool),
        attention_dropout=config.number("attention_dropout", 0.0),
        tied=config.take("tie_word_embeddings", False, bool),
        n_mtp=ahead,
    )
    config.finish()
    return spec


def _expectations(config: Config, n_heads: int, nope: int, rope: int) -> None:
    config.expect("num_key_value_heads", n_heads, None, why="every head has keys and values of its own")
    config.expect("head_dim", rope, None, why="it must equal qk_rope_head_dim, as the reference writes it")
    config.expect("qk_head_dim", nope + rope, why="it must be qk_nope_head_dim + qk_rope_head_dim")
    config.expect("rope_interleave", True, why="weights are read as stored for neighbouring rotary pairs")
    config.expect("norm_topk_prob", True, why="the gates of the chosen experts are divided by their sum")
    config.expect("scoring_func", "sigmoid", why="scores are sigmoids")
    config.expect("topk_method", "noaux_tc", why="groups are ranked by their two best experts, with the bias")
    config.expect("moe_layer_freq", 1, why="every block after the dense ones has experts")
    # Training, and other code.
    config.ignore("ep_size", "aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef")


def _main(spec: ModelSpec) -> Stack:
    """The decoder of a model whose heads are ``lm`` and at most ``mtp``."""
    return decoder_of(spec.replace(heads={name: head for name, head in spec.heads.items() if name != "mtp"}))


def write_config(spec: ModelSpec) -> dict[str, Any]:
    stack = _main(spec)
    mla, sparse = op_of(stack, "attn", MLA), _sparse(spec, stack)
    if mla.norm != LATENT_NORM or not isinstance(mla.pattern, Causal):
        raise UserError("the latents' norm must be RMSNorm with eps 1e-6, and the pattern causal")
    expert, router = gated_experts(sparse, GroupedSigmoidRouter), sparse.router
    assert isinstance(router, GroupedSigmoidRouter)
    shared = part(sparse.shared, GLU, "the shared expert")
    n_dense = sum(isinstance(block.op("ffn"), GLU) for block in stack.blocks)
    dense = part(stack.blocks[0].op("ffn"), GLU, "the first feed-forward network") if n_dense else shared
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": stack.d_model,
        "num_hidden_layers": len(stack.blocks),
        "first_k_dense_replace": n_dense,
        "num_attention_heads": mla.n_heads,
        "num_key_value_heads": mla.n_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "intermediate_size": dense.d_ff,
        "moe_intermediate_size": expert.d_ff,
        "n_routed_experts": sparse.n_experts,
        "n_shared_experts": max(1, shared.d_ff // expert.d_ff),
        "num_experts_per_tok": router.top_k,
        "n_group": router.n_groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": True,
        "routed_scaling_factor": router.scale,
        "vocab_size": embed_of(stack).vocab_size,
        "max_position_embeddings": spec.max_seq_len or 4096,
        "rms_norm_eps": norm_eps(stack, RMSNorm),
        **_write_rotary(mla, spec.max_seq_len or 4096),
        "rope_interleave": True,
        "hidden_act": hf_activation(expert.activation),
        "attention_bias": mla.bias,
        "attention_dropout": mla.dropout,
        "tie_word_embeddings": is_tied(spec),
        "num_nextn_predict_layers": int("mtp" in spec.heads),
    }


def _sparse(spec: ModelSpec, stack: Stack) -> MoE:
    """The experts, or the least that the reference constructs where no block of the model has any."""
    last = stack.blocks[-1].op("ffn")
    if not isinstance(last, GLU):
        return part(last, MoE, "the last feed-forward network")
    if "mtp" in spec.heads:
        return part(part(spec.heads["mtp"], MTP, "the second head").block.op("ffn"), MoE, "its feed-forward network")
    router = GroupedSigmoidRouter(top_k=1, n_groups=1, top_groups=1, scale=1.0)
    return MoE(n_experts=2, expert=last, router=router, shared=last)


def _write_rotary(mla: MLA, max_seq_len: int) -> dict[str, Any]:
    rotary = whole_heads(part(mla.rotary, Rotary, "attn.rotary"), "this format")
    return write_scaled(write_rotary(rotary, mla.qk_rope_head_dim, max_seq_len), rotary, mla.qk_head_dim, mla.scale)


def hf_layout(spec: ModelSpec) -> Layout:
    stack = _main(spec)
    # The layer after the last predicts a second token, with copies of what it shares.
    last = f"model.layers.{len(stack.blocks)}."
    embed, head = "decoder.embed.tokens.weight", "heads.lm.proj.weight"
    embeds, heads = (last + "embed_tokens.weight",), ("lm_head.weight", last + "shared_head.head.weight")
    rules: list[Rule | Drop] = [
        Tied("model.embed_tokens.weight", embed, (*embeds, *heads) if is_tied(spec) else embeds),
        Rename("model.norm.weight", "decoder.norm_final.weight"),
        *_block_rules(stack, "model.layers.{i}.", "decoder.blocks.{i}."),
    ]
    if not is_tied(spec):
        rules.append(Tied(heads[0], head, heads[1]))
    if "mtp" in spec.heads:
        names = {
            "enorm": "embed_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "proj",
            "shared_head.norm": "norm_final",
        }
        rules += [Rename(f"{last}{theirs}.weight", f"heads.mtp.{ours}.weight") for theirs, ours in names.items()]
        rules += _block_rules(stack, last, "heads.mtp.block.")
    return Layout(rules)


def _block_rules(stack: Stack, theirs: str, ours: str) -> list[Rule | Drop]:
    maps = ("gate_proj", "up_proj", "down_proj")
    return [
        Rename(theirs + "input_layernorm.weight", ours + "attn_norm.weight"),
        Rename(theirs + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        *_attention_rules(op_of(stack, "attn", MLA), theirs + "self_attn.", ours + "attn."),
        *(Rename(f"{theirs}mlp.{m}.weight", f"{ours}ffn.{m}.weight") for m in maps),
        *(Rename(f"{theirs}mlp.shared_experts.{m}.weight", f"{ours}ffn.shared.{m}.weight") for m in maps),
        *expert_rules(theirs + "mlp.", ours + "ffn.", "gate", maps),
        Rename(theirs + "mlp.gate.e_score_correction_bias", ours + "ffn.router.selection_bias"),
        Drop(theirs + "self_attn.rotary_emb.inv_freq", "computed from the configuration"),
    ]


def _attention_rules(mla: MLA, theirs: str, ours: str) -> list[Rule]:
    heads, nope, rope, rank = mla.n_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    turned = rotary_rows(heads, nope + rope, rope, start=nope)
    query = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
    return [
        Fused(f"{theirs}{query}.weight", (f"{ours}{query}.weight",), (turned,)),
        Rename(theirs + "q_a_proj.{p}", ours + "q_a_proj.{p}"),
        Rename(theirs + "q_a_layernorm.weight", ours + "q_a_norm.weight"),
        Fused(
            theirs + "kv_a_proj_with_mqa.{p}",
            (ours + "kv_a_proj.{p}", ours + "k_rope_proj.{p}"),
            (torch.arange(rank), rank + rotary_rows(1, rope)),
        ),
        Rename(theirs + "kv_a_layernorm.weight", ours + "kv_a_norm.weight"),
        Fused(
            theirs + "kv_b_proj.weight",
            (ours + "k_b_proj.weight", ours + "v_b_proj.weight"),
            interleaved(heads, (nope, mla.v_head_dim)),
        ),
        Rename(theirs + "o_proj.{p}", ours + "o_proj.{p}"),
    ]


def _cases() -> list[ModelSpec]:
    tiny = partial(
        deepseek_spec,
        d_model=24,
        n_layers=2,
        n_heads=3,
        kv_lora_rank=9,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        d_ff=20,
        d_ff_expert=12,
        n_experts=6,
        top_k=2,
        vocab_size=37,
        max_seq_len=64,
    )
    yarn = Rotary(scaling=YarnScaling(factor=4.0, original_max_seq_len=16, attention_factor=1.0))
    return [
        tiny(q_lora_rank=7, n_groups=3, top_groups=2, rotary=yarn, attention_scale=yarn_scale(10, 4.0, 1.0)),
        tiny(n_dense=0, n_shared=2, attention_bias=True, routed_scale=1.0, tied=True),
        tiny(n_mtp=1),
    ]


_v3 = partial(
    deepseek_spec,
    d_model=7168,
    n_layers=61,
    n_dense=3,
    n_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    d_ff=18_432,
    d_ff_expert=2048,
    n_experts=256,
    top_k=8,
    n_groups=8,
    top_groups=4,
    attention_scale=yarn_scale(192, 40.0, 1.0),
    vocab_size=129_280,
    max_seq_len=163_840,
    rotary=Rotary(scaling=YarnScaling(factor=40.0, original_max_seq_len=4096, attention_factor=1.0)),
)

register_family(
    Family(
        name="deepseek",
        title="DeepSeek-V3",
        paper="arXiv:2412.19437",
        builder=deepseek_spec,
        presets={"deepseek-v3": _v3, "deepseek-v3-mtp": partial(_v3, n_mtp=1)},
        cases=_cases,
        hf=decoder_format(
            HFFormat(model_types=("deepseek_v3",), read=read_config, write=write_config, layout=hf_layout),
            "DeepseekV3",
            span=None,
        ),
        golden={"deepseek-v3": 671_026_404_352, "deepseek-v3-mtp": 682_636_472_320},
    )
)

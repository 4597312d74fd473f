"""Tiny models around every registered mechanism, drawn so that errors show, and the tolerance of the design."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import phylon.layers
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.dispatchers import Dispatcher
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter, Router
from phylon.layers.heads.classify import Pooled
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import FanInInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.cross import CrossAttention
from phylon.layers.norms import LayerNorm, RMSNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.layers.positions.rotary import Rotary, Rotation
from phylon.layers.positions.score_bias import SharedRef
from phylon.model import Block, Branch, Model, ModelSpec, Stack, Sublayer, build, post_norm, pre_norm
from phylon.patterns import Full, Pattern
from phylon.spec import (
    Embed,
    FeedForward,
    Head,
    Init,
    Mechanism,
    Mixer,
    Norm,
    Pool,
    Position,
    RopeScaling,
    ScoreBias,
    Shared,
    Slot,
    Spec,
    entries,
)

assert phylon.layers, "importing the package registers every mechanism in it"

WIDTH, VOCAB, TOLERANCE = 32, 11, 1e-5
ATTENTION = Attention(n_heads=4, n_kv_heads=2, head_dim=8, rotary=Rotary())
PLAIN = ATTENTION.replace(rotary=None)
FFN = GLU(d_ff=24)
EMBED = TokenEmbed(vocab_size=VOCAB)


def decoder(*blocks: Block, embed: Embed = EMBED, norm_final: Norm | None = None, **fields: object) -> ModelSpec:
    """A language model of the given blocks."""
    stack = Stack(d_model=WIDTH, embed=embed, blocks=blocks, norm_final=norm_final)
    changes = {"heads": {"lm": LMHead(vocab_size=VOCAB)}, "init": FanInInit(gain=2.0)} | fields
    return ModelSpec(decoder=stack).replace(**changes)


def pre(mixer: Mixer = ATTENTION, ffn: FeedForward = FFN, norm: Norm | None = None, **fields: object) -> ModelSpec:
    """Two equal pre-norm blocks."""
    norm = norm or RMSNorm()
    block = Block(sublayers=(pre_norm(mixer, norm), pre_norm(ffn, norm)))
    return decoder(block, block, norm_final=norm, **fields)


def of_training(spec: type) -> bool:
    """Whether a mechanism belongs to training or its data, and to no model."""
    return spec.__module__.startswith(("phylon.train", "phylon.data"))


def cases(slot: type[Slot]) -> Iterator[tuple[str, Slot]]:
    """Every case of every mechanism of models that is registered for ``slot``, with an id.

    Training registers objectives, optimizers, sources and more as well, once something imports it.
    """
    for entry in entries(slot):
        if of_training(entry.spec):
            continue
        for i, case in enumerate(entry.cases()):
            yield f"{entry.kind}-{i}", case


def wrapped(slot: type[Slot], case: Slot) -> ModelSpec | None:
    """A model around one mechanism, or ``None`` for a slot that models do not have yet."""
    match case:
        case CrossAttention():
            return encoder_decoder(pre_norm(case, RMSNorm()))
        case Shared():
            shared = pre(mixer=PLAIN.replace(score_bias=SharedRef(name="rel_bias")))
            assert shared.decoder is not None
            return shared.replace(decoder=shared.decoder.replace(shared={"rel_bias": case}))
        case ScoreBias():
            return None if isinstance(case, SharedRef) else pre(mixer=_with_bias(case))
        case Mixer():
            return pre(mixer=case, embed=EMBED.replace(positions=LearnedPositions(max_seq_len=64)))
        case FeedForward():
            return pre(ffn=case)
        case Router():
            return pre(ffn=MoE(n_experts=6, expert=FFN, router=case))
        case Dispatcher():
            return pre(ffn=MoE(n_experts=6, expert=FFN, router=RenormalisedRouter(), dispatch=case))
        case Norm():
            return pre(norm=case)
        case Embed():
            # What reads images has tests of its own: the law is told of tokens.
            return pre(embed=case, heads={"lm": LMHead(vocab_size=VOCAB)}) if hasattr(case, "vocab_size") else None
        case Position():
            return pre(mixer=PLAIN, embed=EMBED.replace(positions=case))
        case Head():
            return pre(heads={"head": case})
        case Rotation():
            return pre(mixer=ATTENTION.replace(rotary=case))
        case RopeScaling():
            return pre(mixer=ATTENTION.replace(rotary=Rotary(scaling=case)))
        case Pattern():
            return pre(mixer=ATTENTION.replace(pattern=case))
        case Init():
            return pre(init=case)
        case Pool():
            return pre(heads={"head": Pooled(pool=case)})
    return None


def _with_bias(case: ScoreBias) -> Attention:
    heads = len(getattr(case, "slopes", range(4)))
    return PLAIN.replace(n_heads=heads, n_kv_heads=1, score_bias=case)


def encoder_decoder(*middle: Sublayer) -> ModelSpec:
    """Pre-norm encoder and decoder with cross-attention, positions by rotation."""
    norm = RMSNorm()
    first, last = pre_norm(ATTENTION, norm), pre_norm(FFN, norm)
    both_ways = pre_norm(ATTENTION.replace(pattern=Full()), norm)
    spec = decoder(*[Block(sublayers=(first, *middle, last))] * 2, norm_final=norm)
    encoder = Stack(d_model=WIDTH, embed=EMBED, blocks=(Block(sublayers=(both_ways, last)),) * 2, norm_final=norm)
    return spec.replace(encoder=encoder)


def arrangements() -> dict[str, ModelSpec]:
    """The other ways to wire the same parts (design, section 1)."""
    norm, bert = RMSNorm(), LayerNorm(eps=1e-12)
    mixer, ffn = Branch(op=ATTENTION), Branch(op=FFN)
    sandwich = tuple(Sublayer(branches=(b.replace(norm_in=norm, norm_branch=norm),)) for b in (mixer, ffn))
    branch_only = tuple(Sublayer(branches=(b.replace(norm_branch=norm),)) for b in (mixer, ffn))
    post = (post_norm(PLAIN, bert), post_norm(MLP(d_ff=24), bert))
    parallel = (Sublayer(branches=(mixer, ffn), norm_shared=bert),)
    own = (Sublayer(branches=(mixer.replace(norm_in=bert), ffn.replace(norm_in=norm, gain=0.5))),)
    blocks = {"sandwich": sandwich, "branch-only": branch_only, "parallel": parallel, "parallel-own": own}
    made = {name: decoder(*[Block(sublayers=s)] * 2, norm_final=norm) for name, s in blocks.items()}
    made["post"] = decoder(
        *[Block(sublayers=post)] * 2,
        embed=EMBED.replace(positions=LearnedPositions(max_seq_len=64), norm=bert, n_types=2),
    )
    windows = [Block(sublayers=(pre_norm(ATTENTION.replace(pattern=p), norm), pre_norm(FFN, norm))) for p in _banded()]
    made["alternating"] = decoder(*windows, norm_final=norm)
    return made


def _banded() -> list[Pattern]:
    return [case for name, case in cases(Pattern) if name in ("window-1", "causal-0") and isinstance(case, Pattern)]


def small_models() -> dict[str, ModelSpec]:
    """A tiny model around every registered mechanism, and around every arrangement, by id."""
    made = {name: wrapped(Slot, case) for name, case in cases(Slot)} | arrangements()
    return {name: spec for name, spec in made.items() if spec is not None}


def draw(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    """An eval-mode model whose vectors (norm gains, biases) are perturbed, so that each of them shows."""
    assert max(len(stack.blocks) for stack in spec.stacks.values()) <= 2, "deep models hide errors behind rounding"
    model = build(spec, seed=seed, device="cpu", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


@functools.cache
def drawn(name: str) -> Model:
    """The model of one of ``small_models``."""
    return draw(small_models()[name])


def assert_close(
    ours: Tensor, reference: Tensor, tolerance: float = TOLERANCE, what: str = "", floor: float = 0.0
) -> None:
    """``max|difference| <= tolerance x max(floor, max|reference|)``, and the same shape."""
    ours, reference = ours.detach(), reference.detach()
    assert ours.shape == reference.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(reference.shape)}"
    if ours.numel() == 0:
        return
    assert not ours.isnan().any(), f"{what}: NaN"
    ours, reference = ours.detach().double(), reference.detach().double()
    difference = float((ours - reference).abs().max())
    limit = tolerance * max(floor, float(reference.abs().max()))
    assert difference <= limit, f"{what}: off by {difference:.3g}, limit {limit:.3g}"


def nodes(spec: object, *, evaluation: bool = False) -> Iterator[Spec]:
    """Every node of a spec tree, or every one that counts in ``evaluation``."""
    if isinstance(spec, Spec):
        yield spec
        for name in spec.__struct_fields__:
            if not (evaluation and name in spec.training_only):
                yield from nodes(getattr(spec, name), evaluation=evaluation)
    elif isinstance(spec, dict | tuple):
        for item in spec.values() if isinstance(spec, dict) else spec:
            yield from nodes(item, evaluation=evaluation)


def mechanisms(spec: object, *, evaluation: bool = False) -> Iterator[Mechanism]:
    """Every mechanism of a spec tree, or every one that counts in ``evaluation``."""
    return (node for node in nodes(spec, evaluation=evaluation) if isinstance(node, Mechanism))


def gpt_like() -> ModelSpec:
    """Pre-norm, LayerNorm, learned positions, biases, tied embedding: GPT-2's shape."""
    from phylon.layers.inits import DepthScaledInit
    from phylon.model import Tie

    norm = LayerNorm()
    mixer = Attention(n_heads=4, n_kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True)
    block = Block(sublayers=(pre_norm(mixer, norm), pre_norm(MLP(d_ff=64, activation="gelu_tanh"), norm)))
    return decoder(
        block,
        block,
        embed=EMBED.replace(positions=LearnedPositions(max_seq_len=64)),
        norm_final=norm,
        ties=(Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight"),),
        init=DepthScaledInit(),
    )


def llama_like() -> ModelSpec:
    """Pre-norm, RMSNorm, rotary, grouped heads, SwiGLU: LLaMA's shape."""
    return pre(init=FanInInit(gain=2.0))


class Made(TorchDispatchMode):
    """Bytes of the tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.sizes.append(t.untyped_storage().nbytes())
        return out

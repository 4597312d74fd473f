"""Hooks on an inner module, parametrisations of it and modules put in its place are honoured wherever it is used."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from phylon.families.t5 import t5_spec
from phylon.families.transformer2017 import transformer2017_spec
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.layers.heads.lm import LMHead
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mamba import Mamba
from phylon.layers.mixers.mla import MLA
from phylon.layers.norms import RMSNorm
from phylon.model import Block, ModelSpec, Stack, Tie, build, pre_norm
from phylon.model.passes import Lora, add_lora, merge_lora

IDS = torch.tensor([[3, 1, 3, 0, 5, 2], [6, 3, 1, 1, 2, 0]])


def model(*ops, tied: bool = True):
    block = Block(
        sublayers=tuple(pre_norm(op, RMSNorm()) for op in ops or (Attention(n_heads=2, n_kv_heads=2, head_dim=8),))
    )
    ties = (Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight"),) if tied else ()
    embed = TokenEmbed(vocab_size=11, n_types=2)
    stack = Stack(d_model=16, embed=embed, blocks=(block,), norm_final=RMSNorm())
    return build(ModelSpec(decoder=stack, heads={"lm": LMHead(vocab_size=11)}, ties=ties), seed=1, device="cpu")


def loss(made) -> Tensor:
    return made.train()(IDS, targets=IDS, logits="none").losses["lm"].mean


def gradients(made) -> dict[str, Tensor]:
    made.zero_grad()
    loss(made).backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", ["decoder.embed.tokens", "decoder.embed.types", "heads.lm.proj"])
def test_hooks_see_and_change_what_goes_through(path: str) -> None:
    made, seen = model(), []
    before = gradients(made)
    inner = made.get_submodule(path)
    inner.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    handle = inner.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
    inner.register_full_backward_hook(lambda module, given, out: seen.append("back"))
    same = gradients(made)
    assert seen == [1, 11 if path.startswith("heads") else 16, "back"], "a hook sees the ids or the states alone"
    assert before.keys() == same.keys()
    for name, grad in before.items():
        torch.testing.assert_close(same[name], grad, rtol=1e-5, atol=1e-7)
    handle.remove()
    plain = float(loss(made))
    inner.register_forward_hook(lambda module, args, out: out * 0)
    assert float(loss(made)) != plain


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("path", ["decoder.embed.tokens", "heads.lm.proj"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_parametrised_weight_is_the_one_that_counts(path: str, tied: bool) -> None:
    made, twice = model(tied=tied), model(tied=False)
    parametrize.register_parametrization(made.get_submodule(path), "weight", Doubled())
    with torch.no_grad():
        for name, weight in model(tied=tied).state_dict(keep_vars=True).items():
            twice.get_parameter(name).copy_(weight * (2 if name == f"{path}.weight" else 1))
    torch.testing.assert_close(loss(made), loss(twice))
    found, expected = gradients(made), gradients(twice)
    own = 2 * expected[f"{path}.weight"]
    shared = "heads.lm.proj.weight" if path.startswith("decoder") else "decoder.embed.tokens.weight"
    total = sum(grad for name, grad in found.items() if "original" in name or name == shared)
    torch.testing.assert_close(total, own + expected[shared], rtol=1e-4, atol=1e-6)


class Low(nn.Module):
    """An embedding with a low-rank difference, as other libraries put in an embedding's place."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.ones(inner.num_embeddings, 2))
        self.b = nn.Parameter(torch.ones(2, inner.embedding_dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) + self.a[ids] @ self.b


def test_a_module_in_the_place_of_an_inner_one_is_called() -> None:
    made = model(tied=False)
    plain = float(loss(made))
    made.decoder.embed.tokens = Low(made.decoder.embed.tokens)
    found = gradients(made)
    assert float(loss(made)) != plain
    assert found["decoder.embed.tokens.a"].abs().sum() > 0
    made = model()
    plain = float(loss(made))
    inner = made.decoder.embed.tokens
    inner.forward = lambda ids, read=inner.forward: 3 * read(ids)  # as libraries do that offload weights
    assert float(loss(made)) != plain
    made = model(tied=False)
    inner = made.heads.lm.proj
    made.heads.lm.proj = nn.Sequential(inner, nn.Tanh())
    scores = made(IDS).logits
    torch.testing.assert_close(loss(made), nn.functional.cross_entropy(scores.flatten(0, 1), IDS.flatten()))


def test_an_adapted_head_learns_and_is_merged_the_same() -> None:
    made = model(tied=False)
    add_lora(made, Lora(rank=2, paths=("heads.lm.proj",)))
    with torch.no_grad():
        made.heads.lm.proj.lora_B.fill_(0.1)
    adapted = loss(made)
    assert set(gradients(made)) == {"heads.lm.proj.lora_A", "heads.lm.proj.lora_B"}
    merge_lora(made)
    torch.testing.assert_close(loss(made), adapted, rtol=1e-5, atol=1e-6)


MLA_OP = MLA(n_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
ROUTED = MoE(n_experts=3, expert=GLU(d_ff=12), router=RenormalisedRouter())


@pytest.mark.parametrize(
    ("ops", "path"),
    [
        ((MLA_OP,), "decoder.blocks.0.attn.k_b_proj"),
        ((MLA_OP,), "decoder.blocks.0.attn.v_b_proj"),
        ((Mamba(d_state=4, dt_rank=3),), "decoder.blocks.0.mixer.x_proj"),
        ((Mamba(d_state=4, dt_rank=3),), "decoder.blocks.0.mixer.dt_proj"),
        ((Mamba(d_state=4, dt_rank=3),), "decoder.blocks.0.mixer.conv"),
        ((Attention(n_heads=2, n_kv_heads=2, head_dim=8), ROUTED), "decoder.blocks.0.ffn.router.proj"),
    ],
)
def test_hooks_are_called_in_a_step_of_decoding_too(ops, path: str) -> None:
    made, seen = model(*ops).eval(), []
    made.get_submodule(path).register_forward_hook(lambda *_: seen.append(path))
    whole, state = made(IDS).logits, made.new_state(2)
    made(IDS[:, :5], state=state)
    assert len(seen) == 2
    last = made(IDS[:, 5:], state=state).logits
    assert len(seen) == 3
    torch.testing.assert_close(last, whole[:, 5:], rtol=1e-4, atol=1e-5)


class Dense(TorchDispatchMode):
    """Counts the gradients of whole tables that embeddings make."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding_dense_backward.default and args[2] == 41:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [transformer2017_spec, t5_spec])
def test_one_table_of_source_target_and_head_has_one_gradient(family, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(family(d_model=16, n_layers=1, n_heads=2, d_ff=24, vocab_size=41, dropout=0.0), seed=2, device="cpu")
    given = {"source": IDS + 7, "tokens": IDS, "targets": IDS.flip(1), "logits": "none"}
    with Dense() as seen:
        next(iter(made(**given).losses.values())).sum.backward()
    assert seen.count == 0, "rows go into the head's gradient"
    found = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    plain = lambda ids, weight: (nn.functional.embedding(ids, weight), weight)
    monkeypatch.setattr("phylon.layers.part.embedding", plain)
    with Dense() as seen:
        next(iter(made(**given).losses.values())).sum.backward()
    assert seen.count == 2, "the positive control"
    for name, p in made.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6)

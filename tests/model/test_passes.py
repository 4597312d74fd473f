"""Passes on built models: LoRA, freezing, recomputation, compilation."""

import re

import pytest
import torch

from helpers import WIDTH, decoder, pre, wrapped
from phylon.hub import load_adapter, save, save_adapter
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.score_bias import T5Bias
from phylon.model import Block, Tie, build, pre_norm
from phylon.model.passes import (
    Lora,
    add_lora,
    compile_blocks,
    freeze,
    lora_tensors,
    merge_lora,
    recompute_blocks,
    train_only,
)
from phylon.spec import Shared, UserError

TOKENS = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
MOE = MoE(n_experts=3, expert=GLU(d_ff=12), router=RenormalisedRouter())


def made(spec=None, **options):
    return build(pre() if spec is None else spec, seed=1, device="cpu", **options)


def adapted(spec=None, **fields):
    """A model whose adapters say something."""
    model = made(spec)
    add_lora(model, Lora(**{"rank": 3, "alpha": 6.0, **fields}))
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            with torch.no_grad():
                parameter.normal_(std=0.2, generator=draw)
    return model.eval()


@pytest.mark.parametrize("paths", [("*.attn",), ("*.q_proj", "*.ffn"), ("heads.lm.proj",), ("decoder.blocks.1",)])
def test_lora_starts_as_the_model_and_merges_to_what_it_became(paths):
    plain = made().eval()
    expected = plain(TOKENS).logits
    fresh = made().eval()
    names = list(fresh.state_dict())
    add_lora(fresh, Lora(paths=paths))
    assert torch.equal(fresh(TOKENS).logits, expected)
    assert names == [name for name in fresh.state_dict() if "lora_" not in name]
    model = adapted(paths=paths)
    trained = model(TOKENS).logits
    assert (trained - expected).abs().max() > 1e-2 * expected.abs().max()
    assert (model(TOKENS, targets=TOKENS).losses["lm"].sum - _loss(trained)).abs() < 1e-4
    merge_lora(model)
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert (model(TOKENS).logits - trained).abs().max() <= 1e-5 * trained.abs().max()
    assert all(p.requires_grad for p in model.parameters())


def _loss(logits):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(), reduction="sum")


def test_only_the_adapters_take_gradients_and_they_are_the_papers():
    model = adapted(paths=("*.attn.q_proj",))
    module = model.decoder.blocks[0].attn.q_proj
    x = torch.randn(5, WIDTH)
    expected = x @ (module._parameters["weight"] + 6.0 / 3 * module.lora_B @ module.lora_A).T
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(x @ module.weight.T, expected)
    model(TOKENS, targets=TOKENS).losses["lm"].sum.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(lora_tensors(model))
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


def test_experts_take_adapters_too():
    model = adapted(pre(ffn=MOE), paths=("*.ffn.experts.*",))
    trained = model(TOKENS).logits
    assert not torch.allclose(trained, made(pre(ffn=MOE)).eval()(TOKENS).logits, atol=1e-3)
    merge_lora(model)
    assert (model(TOKENS).logits - trained).abs().max() <= 1e-5 * trained.abs().max()


def test_an_untouched_adapter_merges_bit_for_bit():
    model, plain = made(), made()
    add_lora(model, Lora(paths=("decoder",)))
    merge_lora(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_adapters_are_saved_and_loaded_alone(tmp_path):
    model = adapted(paths=("*.attn",))
    save_adapter(model, tmp_path / "adapter")
    assert sum(f.stat().st_size for f in (tmp_path / "adapter").iterdir()) < 40_000
    other = made().eval()
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(UserError, match="adapters already"):
        load_adapter(other, tmp_path / "adapter")
    for wrong in (pre(mixer=Attention(n_heads=4, n_kv_heads=4, head_dim=8)), decoder(*pre().decoder.blocks[:1])):
        model = made(wrong)
        with pytest.raises(UserError, match="another model"):
            load_adapter(model, tmp_path / "adapter")
        assert not lora_tensors(model)
    with pytest.raises(UserError, match="fold them in"):
        save(other, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(UserError, match="no adapter"):
        load_adapter(made(), tmp_path)
    with pytest.raises(UserError, match="no LoRA adapters"):
        save_adapter(made(), tmp_path / "none")
    (tmp_path / "adapter" / "adapter.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter\.json"):
        load_adapter(made(), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 0}, "lora.rank"),
        ({"rank": 33}, "lora.rank 33"),
        ({"alpha": 0.0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"paths": ()}, "lora.paths"),
        ({"paths": ("*.attn.q_prj",)}, "did you mean"),
        ({"paths": ("*.attn_norm",)}, "no linear map"),
    ],
)
def test_bad_adapters_are_one_line(fields, words):
    with pytest.raises(UserError) as caught:
        add_lora(made(), Lora(**fields))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_freezing_and_training_by_glob():
    model = made()
    every = trainable(model)
    assert train_only(model, ["heads", "decoder.blocks.1.attn.*"]) == sorted(trainable(model))
    assert {n.split(".")[0] for n in trainable(model)} == {"heads", "decoder"}
    model = made()
    frozen = freeze(model, ["*.attn"])
    assert trainable(model) == every - set(frozen)
    assert len(frozen) == 8
    with pytest.raises(UserError, match="did you mean"):
        freeze(model, ["decoder.blocks.*.atn"])
    with pytest.raises(UserError, match="no parameter"):
        train_only(model, ["decoder.blocks.7"])


@pytest.mark.parametrize(
    ("glob", "near"),
    [
        ("decodr", "decoder"),
        ("decodr.*", "decoder.*"),
        ("decoder.blocs", "decoder.blocks"),
        ("decoder.blok.*", "decoder.blocks.*"),
        ("decoder.blocks.7", "decoder.blocks.1"),
        ("decoder.blocks.*.atn", "decoder.blocks.*.attn"),
        ("*.atn", "*.attn"),
        ("*.embd", "*.embed"),
        ("*.atn.*_proj", "*.attn.v_proj"),
        ("haeds", "heads"),
    ],
)
@pytest.mark.parametrize("change", [freeze, train_only])
def test_a_glob_that_names_nothing_is_refused_with_the_nearest_that_does(change, glob, near):
    with pytest.raises(UserError, match=rf"did you mean '{re.escape(near)}'") as caught:
        change(made(), [glob])
    change(made(), [str(caught.value).split("mean '")[1].split("'")[0]])


@pytest.mark.parametrize("change", [freeze, train_only])
def test_a_tied_parameter_is_named_by_its_first_name(change):
    spec = pre()
    model = made(spec.replace(ties=(Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight"),)))
    with pytest.raises(UserError, match=r"'heads.lm.proj.weight' is tied to 'decoder.embed.tokens.weight'.*'heads'"):
        change(model, ["heads"])
    assert change(model, ["decoder.embed", "*.tokens.weight"]) == ["decoder.embed.tokens.weight"]
    assert "decoder.embed.tokens.weight" in change(model, ["*"])


def dropping(moe=False):
    attention = Attention(n_heads=4, n_kv_heads=2, head_dim=8, dropout=0.3)
    ffn = MOE if moe else MLP(d_ff=24, dropout=0.3)
    block = Block(sublayers=(pre_norm(attention, RMSNorm(), drop=0.2), pre_norm(ffn, RMSNorm(), drop=0.2)))
    return decoder(block, block)


def gradients(spec, change):
    model = made(spec).train()
    change(model)
    torch.manual_seed(7)
    out = model(TOKENS, targets=TOKENS, logits="none")
    loss = out.losses["lm"].sum + sum(0.01 * term.sum for term in out.aux.values())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, torch.rand(())


@pytest.mark.parametrize("moe", [False, True])
def test_recomputed_gradients_are_bit_for_bit_the_same(moe):
    spec = dropping(moe)
    plain, again = gradients(spec, lambda model: None), gradients(spec, recompute_blocks)
    assert plain[0] == again[0]
    assert plain[2] == again[2], "the random state after the step"
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])
    unlike = gradients(spec, lambda model: torch.manual_seed(8) and None)
    assert unlike[0] == plain[0], "the seed is set again before the pass"


def saved_bytes(model):
    seen: dict[int, int] = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(TOKENS, targets=TOKENS, logits="none")
    kept = sum(seen.values())
    del out
    return kept


def test_recomputation_keeps_less():
    model = made(dropping()).train()
    before = saved_bytes(model)
    assert recompute_blocks(model) == 2
    assert saved_bytes(model) < 0.6 * before
    assert model.eval()(TOKENS).logits.shape == (2, 9, 11)
    state = model.new_state(2)
    assert model(TOKENS, state=state).logits.shape == (2, 9, 11)


def test_a_shared_bias_is_recomputed_with_its_gradient():
    spec = wrapped(Shared, T5Bias(n_heads=4, n_buckets=8, max_distance=16, direction="past"))
    plain, again = gradients(spec, lambda model: None), gradients(spec, recompute_blocks)
    assert any("rel_bias" in name for name in plain[1])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_a_compiler_that_fails_is_given_up_with_its_reason(monkeypatch):
    def broken(function, **options):
        def run(*args):
            raise RuntimeError("no C++ compiler\nlong story")

        return run

    model = made().eval()
    expected = model(TOKENS).logits
    monkeypatch.setattr(torch, "compile", broken)
    assert compile_blocks(model, lambda: model(TOKENS)) == "RuntimeError: no C++ compiler"
    assert torch.equal(model(TOKENS).logits, expected)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_and_keep_their_names():
    model = made().train()
    names = list(model.state_dict())
    expected = model(TOKENS, targets=TOKENS).losses["lm"].sum
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    reason = compile_blocks(model, lambda: model(TOKENS, targets=TOKENS).losses["lm"].sum.backward())
    assert reason is None, reason
    assert list(model.state_dict()) == names
    model.zero_grad()
    loss = model(TOKENS, targets=TOKENS).losses["lm"].sum
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_a_weight_that_others_have_too_takes_no_adapter():
    """Folded in, the difference would change the embedding as well, and the merged model would say something else."""
    spec = pre().replace(ties=(Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight"),))
    model = made(spec)
    with pytest.raises(UserError, match=r"'heads.lm.proj', whose weight is also that of 'decoder.embed.tokens'"):
        add_lora(model, Lora(paths=("*",)))
    assert not lora_tensors(model)
    assert all(p.requires_grad for p in model.parameters())
    add_lora(model, Lora(paths=("*.blocks.*",)))

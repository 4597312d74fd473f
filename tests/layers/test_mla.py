"""Latent attention: the two forms are one, against ordinary attention, and what a state keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_close, draw, pre
from law import documents, values
from phylon.layers.context import Context
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mla import MLA
from phylon.model import record
from phylon.patterns import Records
from phylon.spec import UserError, build

D = 12
SPEC = MLA(n_heads=2, kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)


def module(spec: MLA):
    made = build(spec, D)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return made.eval()


@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_absorbed_is_expanded(heads: int, rank: int, nope: int, value: int, length: int) -> None:
    made = module(SPEC.replace(n_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope, v_head_dim=value)).double()
    g = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    query = drawn(2, length, heads, nope), drawn(2, length, heads, 2)
    keys = drawn(2, length + 3, 1, rank), drawn(2, length + 3, 1, 2)
    context = Context(records=Records(torch.arange(length)[None]), aligned=True)
    expanded = made.expanded(*query, *keys, None, None, context)
    torch.testing.assert_close(made.absorbed(*query, *keys, None, None), expanded)


def test_with_the_whole_input_as_latent_it_is_ordinary_attention() -> None:
    """No compression, no norm that acts, nothing that rotates: multi-head attention."""
    mla = module(SPEC.replace(kv_lora_rank=D))
    plain = build(Attention(n_heads=2, n_kv_heads=2, head_dim=6), D)
    x = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(1))
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        mla.kv_a_proj.weight.copy_(torch.eye(D))
        mla.kv_a_norm.weight.fill_(1)
        mla.k_rope_proj.weight.zero_()
        plain.q_proj.weight.copy_(mla.q_proj.weight)
        plain.k_proj.weight.zero_()
        for head in range(2):
            plain.k_proj.weight[6 * head : 6 * head + 4] = mla.k_b_proj.weight[4 * head : 4 * head + 4]
        plain.v_proj.weight.zero_()
        plain.o_proj.weight.zero_()
        for head in range(2):
            plain.v_proj.weight[6 * head : 6 * head + 4] = mla.v_b_proj.weight[4 * head : 4 * head + 4]
            plain.o_proj.weight[:, 6 * head : 6 * head + 4] = mla.o_proj.weight[:, 4 * head : 4 * head + 4]
        context = Context(records=Records(torch.arange(7)[None]), aligned=True)
        assert_close(mla(x, context), plain(x, context))


def test_both_forms_run_on_a_state_and_recording_sees_full_heads() -> None:
    model = draw(pre(mixer=SPEC.replace(kv_lora_rank=24)))
    tokens = torch.stack(documents(model, (9, 9)))
    whole = values(model, tokens)
    attn = model.decoder.blocks[0].attn
    used: list[str] = []
    for name in ("absorbed", "expanded"):
        plain = getattr(attn, name)
        setattr(attn, name, lambda *a, plain=plain, name=name: used.append(name) or plain(*a))
    state = model.new_state(2)
    parts = [values(model, t, state=state) for t in tokens.split([6, 1, 2], 1)]
    assert_close(torch.cat(parts, 1), whole)
    assert used == ["expanded", "absorbed", "absorbed"]
    with record(model, "decoder.blocks.0.attn.k") as taps:
        values(model, tokens[:, :1], state=state)
    assert taps["decoder.blocks.0.attn.k"].shape == (2, 10, 2, 6)


def test_a_state_of_latents_is_small() -> None:
    model = draw(pre(mixer=SPEC))
    state = model.new_state(3, max_len=11)
    assert state.n_bytes == 2 * 3 * 11 * (12 + 2) * 4


def test_autocast_and_bf16() -> None:
    model = draw(pre(mixer=SPEC))
    tokens = torch.stack(documents(model, (9,)))
    with torch.autocast("cpu", torch.bfloat16):
        whole, state = values(model, tokens), model.new_state(1)
        parts = torch.cat([values(model, t, state=state) for t in tokens.split([4, 1, 4], 1)], 1)
    assert_close(parts, whole, 0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_rope_head_dim": 3}, "rotary dim 3"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_mistakes_are_named(change: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SPEC.replace(**change)

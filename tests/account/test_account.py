"""Every figure of an account against what is measured on a real, tiny model."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phylon.account import account
from phylon.account.state import state_bytes
from phylon.families import families, preset
from phylon.families.llama import llama_spec
from phylon.layers.embeddings.patches import PatchEmbed
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE, MoEModule
from phylon.layers.state import State
from phylon.model import MTP, Model, ModelSpec, build
from phylon.model.mtp import AheadState
from phylon.ops import native
from phylon.ops.attention import dispatch
from phylon.patterns import Window
from phylon.spec.errors import UserError
from phylon.spec.override import override

CASES = [pytest.param(case, id=f"{f.name}-{i}") for f in families() for i, case in enumerate(f.cases())]
STREAMING = [case for case in CASES if case.values[0].encoder is None]


def filled_bytes(spec: ModelSpec, n_tokens: int, batch: int = 1) -> int:
    """Bytes of a real state after ``n_tokens`` tokens, made for exactly that many."""
    model = build(spec, device="cpu").eval()
    state = model.new_state(batch, max_len=n_tokens)
    with torch.inference_mode():
        model(torch.zeros(batch, n_tokens, dtype=torch.int64), state=state)
    return sum(t.untyped_storage().nbytes() for t in kept_in(state))


def kept_in(state: State) -> list[torch.Tensor]:
    """The tensors of all parts, those of a head's own state with them."""
    found: list[torch.Tensor] = []
    for part in state.parts.values():
        if isinstance(part, AheadState):
            found += [*part.last.tensors, *kept_in(part.inner)]
        else:
            found += getattr(part, "tensors", None) or (part.k, part.v)
    return found


def experts_of(head: MTP, d_model: int) -> int:
    """FLOPs of the experts that a token is sent to in the head's block."""
    moe = head.block.op("ffn")
    assert isinstance(moe, MoE)
    assert isinstance(moe.expert, GLU)
    return moe.router.top_k * 6 * d_model * moe.expert.d_ff


@pytest.mark.parametrize("spec", CASES)
def test_flops_are_those_that_the_flop_counter_sees(spec: ModelSpec) -> None:
    model = build(spec, device="cpu").eval()
    batch, length = 2, 12
    inputs, free = {"tokens": torch.zeros(batch, length, dtype=torch.int64)}, 0
    embed = spec.last_stack.embed
    if spec.encoder is not None and spec.decoder is not None:
        inputs["source"] = inputs["tokens"]
    elif isinstance(embed, PatchEmbed):
        height, width = (n * embed.patch_size for n in embed.grid)
        inputs = {"images": torch.zeros(batch, embed.n_channels, height, width)}
        length = embed.n_extra + embed.grid[0] * embed.grid[1]
        # Every token is charged its pixels, also the learned ones that have none.
        free = embed.n_extra * 2 * embed.n_channels * embed.patch_size**2 * spec.last_stack.d_model
    # The head for a second token sends the first token of a document to no expert.
    free += sum(experts_of(head, spec.last_stack.d_model) for head in spec.heads.values() if isinstance(head, MTP))
    counted_by = FlopCounterMode(display=False)
    with dispatch.force("reference"), native.without(), torch.inference_mode(), counted_by as counter:
        model(**inputs)
    figures = account(spec, seq_len=length)
    counted = figures.flops_forward_per_token * length + figures.flops_forward_per_document - free
    assert counted * batch == counter.get_total_flops() > 0
    assert figures.flops_training_per_token == 3 * figures.flops_forward_per_token


@pytest.mark.parametrize("spec", CASES)
def test_parameters_are_those_of_the_built_model(spec: ModelSpec) -> None:
    model = build(spec, device="cpu")
    figures = account(spec, dtype="float32")
    assert figures.params_total == sum(p.numel() for p in model.parameters()) == sum(figures.params_by_part.values())
    skipped = figures.params_total - figures.params_active
    assert skipped == (idle_parameters(model) if any(".experts." in n for n, _ in model.named_parameters()) else 0)
    stack = model.decoder or model.encoder
    assert stack is not None
    assert spec.encoder is None or spec.decoder is None or figures.params_embedding > 0
    if len(spec.stacks) == 1:
        assert figures.params_embedding == sum(p.numel() for p in stack.embed.parameters())
    assert figures.weights_bytes == sum(t.numel() * t.element_size() for t in {*model.parameters(), *model.buffers()})


def idle_parameters(model: Model) -> int:
    """Those of the experts that get no gradient from one token."""
    token = torch.ones(1, 1, dtype=torch.int64)
    out = model(token, **({"source": token} if model.encoder is not None and model.decoder is not None else {}))
    out.hidden.square().sum().backward()
    stacks = [p for name, p in model.named_parameters() if ".experts." in name and not name.startswith("heads.")]
    assert all(p.grad is not None for p in stacks)
    # To a head for a second token, a lone token is the first of its document, which it sends nowhere.
    heads = sum(m.inactive_parameters() for m in model.heads.modules() if isinstance(m, MoEModule))
    return heads + sum(p[0].numel() * int((~p.grad.flatten(1).any(1)).sum()) for p in stacks)


def test_training_bytes_are_those_of_adamw() -> None:
    model = build(preset("tinygpt"), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    moments = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *moments]
    assert account("tinygpt").training_bytes_fp32_adamw == sum(t.numel() * t.element_size() for t in kept)


@pytest.mark.parametrize("spec", STREAMING)
@pytest.mark.parametrize("n_tokens", [3, 32])
def test_state_bytes_are_those_measured(spec: ModelSpec, n_tokens: int) -> None:
    figures = account(spec, batch=2, seq_len=n_tokens, dtype="float32")
    assert figures.state_bytes_total == filled_bytes(spec, n_tokens, batch=2) > 0
    assert figures.state_bytes_per_token is not None
    assert figures.state_bytes_fixed is not None
    # Windows are longer than a short text: then less is kept than the long-run figures say.
    assert figures.state_bytes_total <= 2 * (figures.state_bytes_fixed + n_tokens * figures.state_bytes_per_token)


def test_a_hybrid_of_full_and_window_blocks_grows_by_its_full_blocks_alone() -> None:
    spec = llama_spec(d_model=24, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=10, vocab_size=37)
    spec = override(spec, {f"decoder.blocks.{i}.attn.pattern": Window(size=4 + i) for i in (0, 2, 4)})
    figures = account(spec, seq_len=30, dtype="float32")
    token = 2 * 2 * 10 * 4
    assert figures.state_bytes_per_token == 2 * token
    assert figures.state_bytes_fixed == (4 + 6 + 8) * token
    assert figures.state_bytes_total == filled_bytes(spec, 30) == figures.state_bytes_fixed + 30 * 2 * token
    assert filled_bytes(spec, 31) - filled_bytes(spec, 30) == 2 * token


def test_a_7b_sized_state() -> None:
    spec = llama_spec(d_model=4096, n_layers=32, n_heads=32, head_dim=128, d_ff=11_008, max_seq_len=4096)
    figures = account(spec, seq_len=4096, dtype="float16")
    assert figures.state_bytes_per_token == 524_288
    assert figures.state_bytes_total == 2 * 2**30
    assert account(spec, seq_len=4096, dtype="float32").state_bytes_total == 4 * 2**30
    assert account(spec, batch=3, seq_len=100).state_bytes_total == 3 * 100 * 524_288


def test_a_model_that_keeps_no_state_says_why() -> None:
    from phylon.patterns import Full

    spec = override(llama_spec(), {"decoder.blocks.*.attn.pattern": Full()})
    figures = account(spec)
    assert figures.state_bytes_total is None
    assert "Full" in str(figures.state_refused)


def test_published_sizes_exactly_in_little_time_and_memory() -> None:
    golden = {name: count for f in families() for name, count in f.golden.items()}
    assert {"gpt2", "llama-7b", "llama2-70b", "mistral-7b"} <= golden.keys()
    program = (
        "import re, sys, time; from phylon.account import account\n"
        "for name in sys.argv[1:]:\n"
        "    t = time.process_time(); n = account(name).params_total; t = time.process_time() - t\n"
        "    print(name, n, t, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    lines = subprocess.run([sys.executable, "-c", program, *golden], capture_output=True, text=True, check=True).stdout
    for line in lines.splitlines():
        name, count, seconds, kilobytes = line.split()
        assert int(count) == golden[name], name
        assert float(seconds) < 10, name
        assert int(kilobytes) * 1024 < 500e6, name
    assert len(lines.splitlines()) == len(golden)


def test_experts_that_a_token_skips_are_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    from phylon.layers.ffn.mlp import GLUModule

    monkeypatch.setattr(GLUModule, "inactive_parameters", lambda self: self.up_proj.weight.numel(), raising=False)
    figures = account(llama_spec(d_model=24, n_layers=3, d_ff=40))
    assert figures.params_total - figures.params_active == 3 * 24 * 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec_or_preset": "lama-7b"}, "did you mean 'llama-7b'"),
        ({"spec_or_preset": "gpt2", "seq_len": 2000}, "1024"),
        ({"spec_or_preset": "gpt2", "seq_len": 0}, "at least 1"),
        ({"spec_or_preset": "gpt2", "batch": 0}, "at least 1"),
        ({"spec_or_preset": "t5-small", "seq_len": 10**30}, "more than a tensor can have"),
        ({"spec_or_preset": "t5-small", "seq_len": 2**62}, "more than a tensor can have"),
        ({"spec_or_preset": "gpt2", "batch": 2.5}, "batch must be a whole number, got 2.5"),
        ({"spec_or_preset": "gpt2", "dtype": "fp8"}, "unknown dtype"),
    ],
)
def test_mistakes_are_named(arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        account(**arguments)
    assert "\n" not in str(caught.value)


def test_it_needs_no_memory_for_the_model() -> None:
    assert isinstance(build(preset("llama3.1-405b"), device="meta"), Model)
    assert account("llama3.1-405b").params_total == 405_853_388_800


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "mamba-130m"])
def test_no_batch_is_too_large_to_count(name: str) -> None:
    one, many = account(name), account(name, batch=10**30)
    assert many.state_bytes_total == 10**30 * one.state_bytes_total
    assert many.state_index_bytes_total == 10**30 * one.state_index_bytes_total


def test_rows_of_a_state_are_alike() -> None:
    """What the account multiplies by: three rows measured are three times one."""
    for family in families():
        for spec in family.cases():
            model = build(spec, device="meta")
            if isinstance(state_bytes(model, 1, 40), str):
                continue
            rows, counted = model.new_state(3, max_len=40), state_bytes(model, 3, 40)
            assert (rows.n_bytes, rows.index_bytes) == (counted.total, counted.index_total), family.name

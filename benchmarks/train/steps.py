"""Training steps of our models and of the peers, in the same configuration: what the other scripts time and profile.

``STEPS[name](size, bf16)`` builds a model and returns a function that makes one step: forward, backward, AdamW. Ours
are the steps of ``phylon train`` (with its gradient norm); the peers take PyTorch's fused AdamW and no norm.
"""

import ctypes
import gc
import platform
import sys
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

SIZES = {  # d_model, blocks, heads, tokens, vocabulary, rows, gated d_ff
    "s": (128, 4, 4, 256, 4096, 16, 352),
    "m": (384, 6, 6, 256, 4096, 8, 1024),
    "l": (768, 12, 12, 512, 50257, 2, 2048),
}
Step = Callable[[], object]


def raise_malloc_thresholds() -> None:
    """What ``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_`` do, for this process from now on."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def tokens(size: str, rows: int | None = None) -> tuple[Tensor, Tensor]:
    _, _, _, length, vocab, batch, _ = SIZES[size]
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (rows or batch, length + 1), generator=made)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _ours(style: str, size: str, bf16: bool) -> Step:
    from phylon.families import build
    from phylon.families.decoder import llama_spec
    from phylon.families.gpt2 import gpt2_spec
    from phylon.spec.registry import build as build_part
    from phylon.train.objectives import NextToken
    from phylon.train.optim import AdamW

    d, blocks, heads, length, vocab, _, gated = SIZES[size]
    common = {"d_model": d, "n_layers": blocks, "n_heads": heads, "vocab_size": vocab, "max_seq_len": length}
    spec = gpt2_spec(**common) if style == "gpt2" else llama_spec(**common, d_ff=gated, tied=True)
    model = build(spec).train()
    return our_step(model, build_part(AdamW(lr=3e-4), model.named_parameters()), NextToken(), tokens(size), bf16)


def our_step(model, optimizer, objective, data: tuple[Tensor, Tensor], bf16: bool) -> Step:
    from phylon.train.objectives.base import divisor

    ids, targets = data
    batch = {"tokens": ids, "segments": torch.ones_like(ids), "targets": targets}

    def step() -> float:
        counts = objective.counts(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = objective.losses(model, batch)
            total = objective.summed(losses, counts)
        total.backward()
        optimizer.collect()
        count = divisor(counts)
        optimizer.norm(count)
        optimizer.step(3e-4, 1 / count)
        return float(total.detach()) / count

    step.parameters = sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # as ``phylon train`` does
    return step


def _peer(
    model: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], size: str, bf16: bool, compiled: bool
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model
    ids, targets = tokens(size)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(run, ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    step.parameters = sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]
    return step


def _hf(style: str, size: str, bf16: bool, compiled: bool) -> Step:
    d, blocks, heads, length, vocab, _, gated = SIZES[size]
    if style == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocab, n_positions=length, n_embd=d, n_layer=blocks, n_head=heads, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: nn.Module = GPT2LMHeadModel(config)
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocab, hidden_size=d, intermediate_size=gated, num_hidden_layers=blocks,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length, use_cache=False,
            attn_implementation="sdpa", tie_word_embeddings=True,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    return _peer(model.train(), lambda m, x, y: m(input_ids=x, labels=x).loss, size, bf16, compiled)


def _xt(size: str, bf16: bool, compiled: bool) -> Step:
    from x_transformers import Decoder, TransformerWrapper

    d, blocks, heads, length, vocab, _, _ = SIZES[size]
    layers = Decoder(dim=d, depth=blocks, heads=heads, attn_dim_head=d // heads, attn_flash=True, ff_mult=4)
    model = TransformerWrapper(num_tokens=vocab, max_seq_len=length, tie_embedding=True, attn_layers=layers)
    return _peer(model.train(), _scores_loss, size, bf16, compiled)


def _scores_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


class PlainBlock(nn.Module):
    """The block of a plain decoder as everybody writes it: pre-norm, one product for q, k and v, SDPA, GELU by tanh."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Plain(nn.Module):
    """A plain PyTorch decoder with tied embeddings and learned positions, without dropout."""

    def __init__(self, size: str) -> None:
        super().__init__()
        d, blocks, heads, length, vocab, _, _ = SIZES[size]
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(PlainBlock(d, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _plain(size: str, bf16: bool, compiled: bool) -> Step:
    return _peer(Plain(size).train(), _scores_loss, size, bf16, compiled)


STEPS: dict[str, Callable[[str, bool], Step]] = {
    "ours": lambda size, bf16: _ours("gpt2", size, bf16),
    "ours-llama": lambda size, bf16: _ours("llama", size, bf16),
    "plain": lambda size, bf16: _plain(size, bf16, False),
    "plain-compiled": lambda size, bf16: _plain(size, bf16, True),
    "transformers": lambda size, bf16: _hf("gpt2", size, bf16, False),
    "transformers-compiled": lambda size, bf16: _hf("gpt2", size, bf16, True),
    "transformers-llama": lambda size, bf16: _hf("llama", size, bf16, False),
    "transformers-llama-compiled": lambda size, bf16: _hf("llama", size, bf16, True),
    "x-transformers": lambda size, bf16: _xt(size, bf16, False),
    "x-transformers-compiled": lambda size, bf16: _xt(size, bf16, True),
}


def machine() -> dict[str, str]:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    features = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in flags.split()]
    return {
        "cpu": f"{platform.machine()} {' '.join(features)}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

"""Training steps of a model with experts against our own dense model with the same active parameters."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from phylon.bench.case import Cell, Key, Planned, case
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.model import ModelSpec, build
from phylon.ops.experts import dispatch
from phylon.spec.override import override

WIDTH, BLOCKS, HEADS, VOCAB, ROWS, LENGTH = 256, 4, 4, 4096, 8, 256
EXPERTS, TOP, D_FF = 8, 2, 512


def _installed() -> str | None:
    return None if find_spec("transformers") else "transformers is not installed"


@case("experts", peers={"transformers": _installed})
def experts() -> Iterator[Planned]:
    """A training step (forward, backward, AdamW): d 256, 4 blocks, 8 experts, top-2, d_ff 512, 8 rows of 256 tokens."""
    for dtype in ("f32", "bf16"):
        key: Key = {"dtype": dtype}
        yield Planned(key, partial(_cell, dtype == "bf16"))


def dense_spec() -> ModelSpec:
    from phylon.families.decoder import llama_spec

    return llama_spec(
        d_model=WIDTH, n_layers=BLOCKS, n_heads=HEADS, vocab_size=VOCAB, max_seq_len=LENGTH, d_ff=TOP * D_FF
    )


def sparse_spec() -> ModelSpec:
    moe = MoE(n_experts=EXPERTS, expert=GLU(d_ff=D_FF), router=RenormalisedRouter(top_k=TOP))
    return override(dense_spec(), {"decoder.blocks.*.ffn": moe})


def _cell(bf16: bool, peers: frozenset[str]) -> Cell:
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=made)
    targets = torch.roll(ids, -1, 1)
    sides = {
        "dense": _step(build(dense_spec()).train(), ids, targets, bf16),
        "experts": _step(build(sparse_spec()).train(), ids, targets, bf16),
        "experts-reference": _step(build(sparse_spec()).train(), ids, targets, bf16, "reference"),
    }
    if "transformers" in peers:
        sides["transformers"] = _mixtral(ids, bf16)

    def oracle(side: str, loss: Tensor) -> str | None:
        return None if 0 < float(loss) < 9 else f"its loss is {float(loss):.3g}"

    return Cell(sides=sides, oracle=oracle, amounts={"tokens": ids.numel()})


def _step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    bf16: bool,
    backend: str | None = None,
) -> Callable[[], Tensor]:
    from phylon.train.optim import AdamW, AdamWOptimizer

    optimizer = AdamWOptimizer(AdamW(lr=3e-4), model.named_parameters())

    def step() -> Tensor:
        with contextlib.nullcontext() if backend is None else dispatch.force(backend):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = next(iter(model(ids, targets=targets, logits="none").losses.values()))
            loss.sum.backward()
        optimizer.collect()
        count = float(loss.count)
        optimizer.norm(count)
        optimizer.step(3e-4, 1 / count)
        return loss.sum.detach() / count

    return step


def _mixtral(ids: Tensor, bf16: bool) -> Callable[[], Tensor]:
    transformers = import_module("transformers")  # a peer, where it is installed: the library itself never needs it
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=D_FF,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step

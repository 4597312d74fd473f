"""Training steps of a model with experts against our own dense model with the same active parameters."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from phylon.bench.case import Cell, Key, Planned, case
from phylon.bench.oracle import off
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.model import Model, ModelSpec, build
from phylon.ops.experts import dispatch
from phylon.ops.native import ready
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
    sides: dict[str, Callable[[], Tensor]] = {
        "dense": _Steps(build(dense_spec()).train(), ids, targets, bf16),
        "experts": _Steps(build(sparse_spec()).train(), ids, targets, bf16),
        "experts-reference": _Steps(build(sparse_spec()).train(), ids, targets, bf16, "reference"),
    }
    if "transformers" in peers:
        sides["transformers"] = _mixtral(ids, bf16)

    def oracle(side: str, loss: Tensor) -> str | None:
        """After the first step: loss, moments (they are the gradients) and weights against PyTorch's operations."""
        if side == "transformers":  # it has weights of its own
            return None if 0 < float(loss) < 9 else f"its loss is {float(loss):.3g}"
        ours = sides[side]
        assert isinstance(ours, _Steps)
        with ready.without():
            exact = _Steps(build(ours.model.spec).train(), ids, targets, bf16, "reference")
            start = {name: p.detach().clone() for name, p in exact.model.named_parameters()}
            expected = exact()
        wrong = off(["the loss"], [loss], [expected], 1e-2 if bf16 else 1e-4)
        for name, before in start.items():
            moments = ([steps.optimizer.state[name]["exp_avg"]] for steps in (ours, exact))
            updates = ([dict(steps.model.named_parameters())[name] - before] for steps in (ours, exact))
            wrong = wrong or off([f"the gradient of {name}"], *moments, 0.3 if bf16 else 1e-2)
            # The first update is nearly a sign, which a gradient near zero may lose.
            wrong = wrong or off([f"the update of {name}"], *updates, 0.7 if bf16 else 0.2)
        return wrong

    return Cell(sides=sides, oracle=oracle, amounts={"tokens": ids.numel()})


class _Steps:
    """A model in training; a call is a step, and gives its loss."""

    def __init__(self, model: Model, ids: Tensor, targets: Tensor, bf16: bool, backend: str | None = None) -> None:
        from phylon.train.optim import AdamW, AdamWOptimizer

        self.model, self.ids, self.targets, self.bf16, self.backend = model, ids, targets, bf16, backend
        self.optimizer = AdamWOptimizer(AdamW(lr=3e-4), model.named_parameters())

    def __call__(self) -> Tensor:
        with contextlib.nullcontext() if self.backend is None else dispatch.force(self.backend):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = next(iter(self.model(self.ids, targets=self.targets, logits="none").losses.values()))
            loss.sum.backward()
        self.optimizer.collect()
        count = float(loss.count)
        self.optimizer.norm(count)
        self.optimizer.step(3e-4, 1 / count)
        return loss.sum.detach() / count


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

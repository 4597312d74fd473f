"""Linear map and cross-entropy at a vocabulary of 50,257: in chunks against the plain form."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.bench.case import Cell, Key, Planned, case
from phylon.bench.oracle import off
from phylon.ops.loss import linear_cross_entropy

VOCAB, WIDTH = 50257, 768


@case("loss")
def loss() -> Iterator[Planned]:
    """Linear + cross-entropy, forward and backward, width 768, vocabulary 50,257, by tokens and dtype."""
    for n, dtype in product((1024, 2048, 4096), ("f32", "bf16")):
        key: Key = {"n": n, "dtype": dtype}
        yield Planned(key, partial(_cell, n, dtype == "bf16"))


def _cell(n: int, bf16: bool, peers: frozenset[str]) -> Cell:
    made = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, WIDTH, generator=made).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, generator=made) / WIDTH**0.5).requires_grad_()
    targets = torch.randint(0, VOCAB, (n,), generator=made)

    def run(form: Callable[[], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            total = form()
        return [total.detach(), *torch.autograd.grad(total, (hidden, weight))]

    def chunks() -> Tensor:
        return linear_cross_entropy(hidden, weight, targets).sum

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    sides = {"chunks": partial(run, chunks), "plain": partial(run, plain)}

    exact: list[list[Tensor]] = []

    def oracle(side: str, result: list[Tensor]) -> str | None:
        if not exact:
            exact.append(_exact(hidden.detach(), weight.detach(), targets))
        names = ("the loss", "the gradient of the hidden states", "the gradient of the weights")
        return off(names, result, exact[0], 2e-2 if bf16 else 1e-4)

    return Cell(sides=sides, oracle=oracle, amounts={"tokens": n, "TFLOP": 6 * n * VOCAB * WIDTH / 1e12})


def _exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss and both gradients in fp32 as they are written, some tokens at a time."""
    total, of_hidden, of_weight = torch.zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
    for at in range(0, len(hidden), 256):
        rows = slice(at, at + 256)
        logs = F.linear(hidden[rows], weight).log_softmax(-1)
        own = targets[rows, None]
        total -= logs.gather(-1, own).sum()
        of_scores = logs.exp_().scatter_add_(-1, own, torch.full(own.shape, -1.0))
        of_hidden[rows] = of_scores @ weight
        of_weight.addmm_(of_scores.T, hidden[rows])
    return [total, of_hidden, of_weight]

"""Selective scans: the op by backend, and the training pass of a Mamba model beside its peers."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.bench.case import Cell, Key, Planned, case
from phylon.bench.oracle import off
from phylon.model import Model, build
from phylon.ops.native import ready
from phylon.ops.scan import conv_dispatch, dispatch, explain, selective_scan

WIDTH, BLOCKS, SIZE, VOCAB = 256, 4, 16, 4096
_FORMS = ("chunked", "shifted")
PIECE = 72
"""Tokens on which the readable recurrences are the judge: more than a chunk."""


def _missing(name: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(name) else f"{name} is not installed"


@case("scan")
def scan() -> Iterator[Planned]:
    """Selective scan, one row of 512 channels with 16 numbers of state, by steps and pass, every backend."""
    for n, backward in product((1, 2048, 8192), (False, True)):
        key: Key = {"n": n, "pass": "forward+backward" if backward else "forward"}
        yield Planned(key, partial(_scan_cell, n, backward))


def _scan_cell(n: int, backward: bool, peers: frozenset[str]) -> Cell:
    made = torch.Generator().manual_seed(n)
    inner = 2 * WIDTH

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    inputs = {
        "x": draw(1, n, inner),
        "dt": F.softplus(draw(1, n, inner) - 2),
        "A": -torch.exp(draw(inner, SIZE)),
        "B": draw(1, n, SIZE),
        "C": draw(1, n, SIZE),
        "D": draw(inner),
    }
    g = draw(1, n, inner)

    def run(backend: str, dtype: torch.dtype = torch.float32, piece: bool = False) -> list[Tensor]:
        cut = slice(0, PIECE if piece else n)
        leaves = {name: (t[:, cut] if t.ndim == 3 else t).to(dtype) for name, t in inputs.items()}
        leaves = {name: t.detach().requires_grad_(backward) for name, t in leaves.items()}
        y, _ = selective_scan(**leaves, backend=backend)
        return [y.detach(), *(torch.autograd.grad(y, list(leaves.values()), g[:, cut].to(dtype)) if backward else ())]

    exact = run("chunked", torch.float64)

    def oracle(side: str, result: list[Tensor]) -> str | None:
        """Against fp64, and that, on a piece of the work, against the readable recurrence."""
        names = ("y", *(f"the gradient of {name}" for name in inputs))[: len(exact)]
        pieces = (run(name, piece=True) for name in ("chunked", "reference"))
        return off(names, result, exact, 1e-5) or off(names, *pieces, 1e-5)

    found = {line.backend: line.reason for line in explain(**inputs) if line.backend != "reference"}
    sides = {name: partial(run, name) for name, reason in found.items() if reason is None}
    refused = {name: reason for name, reason in found.items() if reason is not None}
    return Cell(sides=sides, oracle=oracle, amounts={"tokens": n}, refused=refused)


@case("mamba", peers={"mambapy": _missing("mambapy"), "transformers": _missing("transformers")})
def mamba() -> Iterator[Planned]:
    """Mamba, forward and backward with the loss: d 256, 4 blocks, 16 numbers of state, vocabulary 4,096, by tokens."""
    for n in (1024, 2048, 8192):
        yield Planned({"n": n}, partial(_mamba_cell, n))


def _mamba_cell(n: int, peers: frozenset[str]) -> Cell:
    from phylon.families.mamba import mamba_spec

    ids = torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(n))
    model = build(mamba_spec(d_model=WIDTH, n_layers=BLOCKS, d_state=SIZE, vocab_size=VOCAB)).train()
    sides = {
        "phylon": partial(_pass, model, lambda: _loss(model, ids)),
        "chunked": partial(_pass, model, partial(_forced, model, ids)),
    }
    for name, make in (("mambapy", _mambapy), ("transformers", _transformers)):
        if name in peers:
            peer, loss = make()
            sides[name] = partial(_pass, peer, partial(loss, ids))

    names = ["the loss", *(f"the gradient of {name}" for name, _ in model.named_parameters())]

    @cache
    def exact() -> tuple[list[Tensor], str | None]:
        """Loss and gradients by PyTorch's operations, and whether those agree with the recurrences on a piece."""
        piece = ids[:, :PIECE]
        with ready.without():
            fast, slow = (
                _pass(model, partial(_forced, model, piece, *b)) for b in (_FORMS, ("reference", "reference"))
            )
            return _pass(model, partial(_forced, model, ids)), off(names, fast, slow, 1e-3)

    def oracle(side: str, result: list[Tensor]) -> str | None:
        if side not in ("phylon", "chunked"):  # a peer has weights of its own
            return None if 0 < float(result[0]) < 400 else f"its loss is {float(result[0]):.3g}"
        expected, wrong = exact()
        return wrong or off(names, result, expected, 1e-3)

    return Cell(sides=sides, oracle=oracle, amounts={"tokens": n})


def _loss(model: Model, ids: Tensor) -> Tensor:
    return model(ids, targets=ids, logits="none").losses["lm"].mean


def _forced(model: Model, ids: Tensor, scan: str = _FORMS[0], conv: str = _FORMS[1]) -> Tensor:
    with dispatch.force(scan), conv_dispatch.force(conv):
        return _loss(model, ids)


def _pass(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The loss, and the gradients of all parameters that have one."""
    model.zero_grad()
    value = loss()
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _mambapy() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    peer = import_module("mambapy.mamba")
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCAB, WIDTH),
            "mamba": peer.Mamba(peer.MambaConfig(d_model=WIDTH, n_layers=BLOCKS, d_state=SIZE)),
            "norm": peer.RMSNorm(WIDTH, 1e-5),
        }
    )

    def loss(ids: Tensor) -> Tensor:
        hidden = model["norm"](model["mamba"](model["embed"](ids)))
        return F.cross_entropy((hidden @ model["embed"].weight.T)[0], ids[0])

    return model, loss


def _transformers() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    peer = import_module("transformers")  # where it is installed: the library itself never needs it
    config = peer.MambaConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=BLOCKS, state_size=SIZE)
    model = peer.MambaForCausalLM(config)
    return model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss

"""Selective scans: the op by backend, and the training pass of a Mamba model beside its peers."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.bench.case import Cell, Key, Planned, case
from phylon.model import Model, build
from phylon.ops.scan import conv_dispatch, dispatch, explain, selective_scan

WIDTH, BLOCKS, SIZE, VOCAB = 256, 4, 16, 4096


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

    def run(backend: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = {name: t.to(dtype).detach().requires_grad_(backward) for name, t in inputs.items()}
        y, _ = selective_scan(**leaves, backend=backend)
        return [y.detach(), *(torch.autograd.grad(y, list(leaves.values()), g.to(dtype)) if backward else ())]

    exact = run("chunked", torch.float64)

    def oracle(side: str, result: list[Tensor]) -> str | None:
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result, exact, strict=True))
        return None if error <= 1e-5 else f"{error:.1e} from fp64"

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

    def oracle(side: str, loss: Tensor) -> str | None:
        return None if 0 < float(loss) < 400 else f"its loss is {float(loss):.3g}"

    return Cell(sides=sides, oracle=oracle, amounts={"tokens": n})


def _loss(model: Model, ids: Tensor) -> Tensor:
    return model(ids, targets=ids, logits="none").losses["lm"].mean


def _forced(model: Model, ids: Tensor) -> Tensor:
    with dispatch.force("chunked"), conv_dispatch.force("shifted"):
        return _loss(model, ids)


def _pass(model: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach()


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

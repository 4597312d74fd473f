"""LoRA: frozen weights and a trained low-rank difference. Hu et al. (arXiv:2106.09685)."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.layers.ffn.moe import Stacked
from phylon.layers.part import Linear, Part
from phylon.model.model import Model
from phylon.model.passes.select import matching
from phylon.spec.base import Spec
from phylon.spec.errors import UserError, check_rate, check_seed, check_size

NAMES = ("lora_A", "lora_B")


class Lora(Spec, frozen=True, kw_only=True):
    """``W x`` becomes ``W x + (alpha / rank) B A x``; ``A`` (rank, in) is drawn, ``B`` (out, rank) begins at 0.

    Hu et al. (arXiv:2106.09685), section 4.1. ``paths`` are globs of linear maps; the paper's choice is the queries and
    values of attention (section 4.2). ``dropout`` acts on ``x`` before ``A``. ``seed`` draws ``A``.
    """

    rank: int = 8
    alpha: float = 16.0
    paths: tuple[str, ...] = ("*.attn.q_proj", "*.attn.v_proj")
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_size("lora.rank", self.rank)
        check_rate("lora.dropout", self.dropout)
        check_seed("lora.seed", self.seed)
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UserError(f"lora.alpha must be above 0, got {self.alpha}")
        if not self.paths:
            raise UserError("lora.paths names no linear map; leave it out for the queries and values of attention")


class _Adapted(Part):
    """Mixed into a linear map: ``lora_A``, ``lora_B``, and ``weight`` as the sum, wherever it is read directly.

    ``state_dict`` and ``named_parameters`` still hold the frozen weight under its own name.
    """

    lora: Lora
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    @property
    def factor(self) -> float:
        return self.lora.alpha / self.lora.rank

    def delta(self) -> Tensor:
        """``(alpha / rank) B A``, in the dtype of ``A``."""
        return self.factor * (self.lora_B @ self.lora_A)


class LoraLinear(_Adapted, Linear):
    """A linear map with a trained difference. The low-rank path is computed beside the frozen product."""

    if not TYPE_CHECKING:

        @property
        def weight(self) -> Tensor:
            frozen = self._parameters["weight"]
            return frozen + self.delta().to(frozen.dtype)

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self._parameters["weight"], self.bias)  # type: ignore[arg-type]
        rate = self.lora.dropout if self.training else 0.0
        inner = F.linear(F.dropout(input, rate) if rate else input, self.lora_A.to(input.dtype))
        return out + F.linear(inner, self.lora_B.to(inner.dtype)) * self.factor


class LoraStacked(_Adapted, Stacked):
    """The linear maps of X experts, each with a difference of its own; dropout does not act here."""

    if not TYPE_CHECKING:

        @property
        def weight(self) -> Tensor:
            frozen = self._parameters["weight"]
            return frozen + self.delta().to(frozen.dtype)


ADAPTED: dict[type, type] = {Linear: LoraLinear, Stacked: LoraStacked}


def add_lora(model: Model, lora: Lora) -> list[str]:
    """Freeze the model and give the linear maps that ``lora.paths`` name a trained difference; their paths.

    Raises:
        UserError: a glob that names no linear map, or one whose weight another module has too; a model that has
            adapters already.
    """
    if any(True for _ in adapted(model)):
        raise UserError("this model has LoRA adapters already; merge them first")
    maps = {name: module for name, module in model.named_modules() if type(module) in ADAPTED}
    chosen = matching(maps, lora.paths, "linear map")
    _check_ties(model, {name: maps[name] for name in chosen})
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(lora.seed)
    for name in chosen:
        _adapt(maps[name], lora, generator)
    return chosen


def merge_lora(model: Model) -> list[str]:
    """Fold every difference into its weight: the plain model again, names and classes as before; the merged paths.

    The sum is formed in at least fp32 and rounded once to the weight's dtype. All parameters take gradients again.
    """
    found = dict(adapted(model))
    for module in found.values():
        weight = module._parameters["weight"]
        assert weight is not None
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            weight.copy_(weight.to(wide) + module.delta().to(wide))
        for name in NAMES:
            del module._parameters[name]
        del module.lora
        module.__class__ = next(plain for plain, made in ADAPTED.items() if type(module) is made)
    model.requires_grad_(True)
    return list(found)


def lora_tensors(model: Model) -> dict[str, Tensor]:
    """The adapters alone, by canonical name."""
    return {
        f"{path}.{name}": getattr(module, name).detach()
        for path, module in adapted(model)
        for name in NAMES
    }  # fmt: skip


def adapted(model: Model) -> Iterator[tuple[str, _Adapted]]:
    """Every linear map with an adapter, by path."""
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, _Adapted))


def _check_ties(model: Model, chosen: Mapping[str, nn.Module]) -> None:
    """Refuse a weight that another module has too: folded in, the difference would change that one as well."""
    for name, module in chosen.items():
        weight = module._parameters["weight"]
        for other, shares in model.named_modules():
            if shares is not module and any(p is weight for p in shares._parameters.values()):
                raise UserError(
                    f"lora.paths names '{name}', whose weight is also that of '{other}', which would change with it: "
                    'name others alone, such as "*.blocks.*"'
                )


def _adapt(module: nn.Module, lora: Lora, generator: torch.Generator) -> None:
    """Swap the class in place, so that whoever holds the module sees the adapter, and the weight keeps its name."""
    weight = module._parameters["weight"]
    assert weight is not None
    *lead, n_out, n_in = weight.shape
    if lora.rank > min(n_out, n_in):
        raise UserError(f"lora.rank {lora.rank} is more than a map of {n_out} x {n_in} has; choose a smaller one")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # The paper draws a Gaussian without giving its width; with this one, A x is about as large as x.
    a = torch.randn(*lead, lora.rank, n_in, generator=generator, dtype=dtype) / math.sqrt(n_in)
    module.register_parameter("lora_A", nn.Parameter(a.to(weight.device)))
    b = torch.zeros(*lead, n_out, lora.rank, dtype=dtype, device=weight.device)
    module.register_parameter("lora_B", nn.Parameter(b))
    module.__class__ = ADAPTED[type(module)]
    assert isinstance(module, _Adapted)
    module.lora = lora

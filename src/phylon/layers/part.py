"""Base of every module that owns parameters, and the linear map they are built from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.layers.context import Context
from phylon.layers.state import State
from phylon.ops.embedding import embedding
from phylon.ops.linear import is_few, linears
from phylon.spec.base import Init, Role


@dataclass(frozen=True)
class InitContext:
    """How to draw: the scheme, the generator (on the CPU, so that a seed means the same on every device), the depth.

    ``n_branches`` is the number of residual branches of the stack the module sits in (1 outside of stacks). ``drawn``
    holds the weights that are done: a tied weight is drawn once, by the first module of the tree that has it.
    """

    scheme: Init
    generator: torch.Generator
    n_branches: int
    drawn: set[int] = field(default_factory=set)

    def draw(self, weight: Tensor, role: Role) -> None:
        """Fill ``weight`` in place according to its role, unless another module has."""
        if id(weight) not in self.drawn:
            self.scheme.draw(weight, role, self.n_branches, self.generator)
            self.drawn.add(id(weight))


class Part(nn.Module):
    """A module of the library. ``path`` is its canonical name in the model, set when the model is built."""

    path: str = ""

    def init_parameters(self, init: InitContext) -> None:
        """Initialise the parameters and buffers this very module owns (not those of its children)."""

    def add_state(self, state: State, max_len: int | None) -> None:
        """Give ``state`` what this very module keeps between calls (``State.add_keys``, ``add``)."""

    def tap(self, ctx: Context, name: str, value: Tensor) -> Tensor:
        """Show ``value`` to the recorder, if there is one, under ``<path>.<name>``."""
        return value if ctx.taps is None else ctx.taps(f"{self.path}.{name}", value)

    def score_tap(self, ctx: Context) -> Callable[[str, Tensor], Tensor] | None:
        """What an attention op shows scores and weights to, if anybody wants them: only the reference can."""
        taps = ctx.taps
        if taps is None or not (taps.wants(f"{self.path}.scores") or taps.wants(f"{self.path}.weights")):
            return None
        return lambda name, value: self.tap(ctx, name, value)


class Linear(Part, nn.Linear):
    """``x W^T + b``, drawn by the model's scheme. ``role`` "out" marks the last map of a residual branch."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, role: Role = "in") -> None:
        self.role = role
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: parameters are drawn by ``init_parameters`` or loaded."""

    def init_parameters(self, init: InitContext) -> None:
        init.draw(self.weight, self.role)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        # A step of decoding does not ask: the answer would be PyTorch's product.
        return F.linear(input, weight, bias) if is_few(input) else linears(input, (weight,), (bias,))[0]


def parameter(module: nn.Module, name: str) -> Any:
    """``module.<name>`` for a parameter: looked up where it lies, which takes a fifth of the search by attribute."""
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


def child(module: nn.Module, name: str) -> Any:
    """``module.<name>`` for a module, likewise."""
    try:
        return module._modules[name]
    except KeyError:
        return getattr(module, name)


def is_plain(*modules: nn.Module | None) -> bool:
    """Whether these are linear maps as built, so that an op may use their weights: no wrapper, no hook."""
    return all(type(m) is Linear and not hooked(m) for m in modules if m is not None)


def is_map(module: nn.Module) -> bool:
    """Whether ``x W^T + b``, with the weight that it shows, is all a module does: as built, adapted, parametrised."""
    linear = isinstance(module, Linear) or type(module) is nn.Linear
    return linear and "forward" not in vars(module) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether somebody wants to know of the module's calls, so that its weights may not be used without one."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def project(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """``x`` through each of ``maps``, in one op where they are plain."""
    if is_few(x) or not is_plain(*maps):
        return tuple(m(x) for m in maps)
    return linears(x, tuple(m.weight for m in maps), tuple(m.bias for m in maps))  # type: ignore[misc]


class Embedding(Part, nn.Embedding):
    """A table of vectors, drawn by the model's scheme."""

    def reset_parameters(self) -> None:
        """Nothing: parameters are drawn by ``init_parameters`` or loaded."""

    def init_parameters(self, init: InitContext) -> None:
        init.draw(self.weight, "embed")

    def forward(self, input: Tensor, tables: dict[Tensor, Tensor] | None = None) -> Tensor:
        """The vectors (..., D) of ids. In ``tables``, the context's, the table is left for heads that share it."""
        if tables is None:
            return super().forward(input)
        weight = self.weight
        vectors, tables[weight] = embedding(input, tables.get(weight, weight))
        return vectors

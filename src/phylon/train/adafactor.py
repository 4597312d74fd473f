"""Adafactor: second moments of matrices kept as a row and a column."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.optim import NamedParameters, Optimizer
from phylon.train.updates import Updates


class Adafactor(Mechanism, Optimizer, frozen=True, kw_only=True):
    """``X <- X - alpha U / max(1, rms(U) / d)`` with ``U = G / sqrt(V)``.

    Shazeer and Stern (arXiv:1804.04235), algorithms 4 and 5. For a matrix (or a stack of them) ``V = R C / mean(R)``,
    with ``R`` (rows) and ``C`` (columns) running means of ``G^2 + eps1``; otherwise ``V`` is kept whole. Their decay at
    update t is ``1 - t^decay_power`` (section 7.2). The step is relative, ``alpha = lr max(eps2, rms(X))`` (section 8):
    ``lr`` is the paper's rho. No first moment. T5 (arXiv:1910.10683, section 3.1.2) uses this with inverse-square-root
    rates to pre-train and 1e-3 to fine-tune. ``weight_decay`` is decoupled, times ``lr``, for two dimensions or more.
    ``clip`` bounds the global gradient norm.
    """

    lr: float = 1e-2
    decay_power: float = -0.8
    eps1: float = 1e-30
    eps2: float = 1e-3
    d: float = 1.0
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "eps1", "eps2", "d"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, got {getattr(self, name)}")
        if not -1 <= self.decay_power < 0:
            raise UserError(f"decay_power must be at least -1 and below 0, got {self.decay_power}")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be above 0 (leave it out for no clipping), got {self.clip}")

    def state_bytes(self, parameters: Mapping[str, Tensor]) -> int:
        shapes = [shape for p in parameters.values() for shape in kept_shapes(p).values()]
        return 4 * sum(math.prod(shape) for shape in shapes)


def kept_shapes(parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What is kept of a parameter, with shapes."""
    shape = tuple(parameter.shape)
    if parameter.ndim < 2:
        return {"step": (), "sq": shape}
    return {"step": (), "row": shape[:-1], "col": (*shape[:-2], shape[-1])}


class AdafactorOptimizer(Updates):
    """Runs ``Adafactor``; the state of a matrix (n, m) is ``row`` (n), ``col`` (m) and ``step``, else ``sq``."""

    def __init__(self, spec: Adafactor, parameters: NamedParameters) -> None:
        super().__init__(parameters)
        self.spec = spec

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        return kept_shapes(parameter)

    def update(self, lr: float) -> None:
        spec = self.spec
        for name, p in self.trained.items():
            if p.grad is None:
                continue
            if name not in self.state:
                kept = {what: p.new_zeros(shape) for what, shape in self.state_shapes(p).items()}
                self.state[name] = kept | {"step": torch.zeros(())}
            state = self.state[name]
            state["step"] += 1
            keep = 1 - float(state["step"]) ** spec.decay_power
            update = p.grad * self._root(state, p.grad, keep)
            update /= max(1.0, float(_rms(update)) / spec.d)
            alpha = lr * max(spec.eps2, float(_rms(p)))
            if p.ndim >= 2 and spec.weight_decay:
                p.mul_(1 - lr * spec.weight_decay)
            p.sub_(update, alpha=alpha)

    def _root(self, state: dict[str, Tensor], grad: Tensor, keep: float) -> Tensor:
        """``1 / sqrt(V)`` after the running means have taken ``grad`` in."""
        squared = grad.square() + self.spec.eps1
        if grad.ndim < 2:
            state["sq"].lerp_(squared, 1 - keep)
            return state["sq"].rsqrt()
        row, col = state["row"], state["col"]
        row.lerp_(squared.mean(-1), 1 - keep)
        col.lerp_(squared.mean(-2), 1 - keep)
        # V = R C / mean(R), as two factors so that nothing of the size of V's square is formed.
        return (row / row.mean(-1, keepdim=True)).rsqrt()[..., None] * col.rsqrt()[..., None, :]


def _rms(x: Tensor) -> Tensor:
    return x.norm() / max(1, x.numel()) ** 0.5


register(
    Adafactor,
    module=AdafactorOptimizer,
    paper="arXiv:1804.04235 alg. 4, 5",
    cases=lambda: [Adafactor(), Adafactor(weight_decay=0.1, clip=1.0)],
)

"""Muon: the momentum of a hidden matrix, made orthogonal; everything else by AdamW."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.optim import AdamW, AdamWOptimizer, NamedParameters, Optimizer
from phylon.train.updates import GradientNorm, take


class Muon(Mechanism, Optimizer, frozen=True, kw_only=True):
    """``X <- (1 - lr wd) X - lr 0.2 sqrt(max(n, m)) orthogonal(momentum)``, PyTorch's ``torch.optim.Muon``.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), on the matrices (n, m) of the
    blocks: Newton-Schulz iteration, Nesterov momentum. The factor makes an update's size AdamW's, so that both share
    ``lr`` and ``weight_decay``: Liu et al. (arXiv:2502.16982), section 2.2, equation 4. Embeddings, heads, norms,
    biases and stacked experts are AdamW's, with ``betas`` and ``eps``. ``clip`` bounds the global gradient norm.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        self.rest()

    def check(self, parameters: NamedParameters) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"muon needs PyTorch 2.9 or newer, and this is {torch.__version__}; choose adamw")
        if not any(p.requires_grad and is_hidden(name, p) for name, p in parameters):
            raise UserError("muon trains the fp32 matrices of blocks, and this model trains none; choose adamw")

    def state_bytes(self, parameters: Mapping[str, Tensor]) -> int:
        hidden = sum(p.numel() for name, p in parameters.items() if is_hidden(name, p))
        return 8 * sum(p.numel() for p in parameters.values()) - 4 * hidden

    def rest(self) -> AdamW:
        """What the other parameters are trained with."""
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, clip=self.clip)


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is one of Muon's: the fp32 matrix of a linear map inside a block."""
    linear = ".blocks." in name and name.endswith("proj.weight")
    return linear and parameter.ndim == 2 and parameter.dtype == torch.float32


class MuonOptimizer:
    """Runs ``Muon``; the interface of ``AdamWOptimizer``, over both halves."""

    def __init__(self, spec: Muon, parameters: NamedParameters) -> None:
        named = [(name, p) for name, p in parameters if p.requires_grad]
        spec.check(named)
        hidden = {name for name, p in named if is_hidden(name, p)}
        self.matrices = {name: p for name, p in named if name in hidden}
        others = [(name, p) for name, p in named if name not in hidden]
        self._adamw = AdamWOptimizer(spec.rest(), others) if others else None
        self._torch = torch.optim.Muon(
            list(self.matrices.values()),
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = {} if self._adamw is None else self._adamw.trained
        self.trained: dict[str, Tensor] = {name: rest.get(name, p) for name, p in named}
        self.masters = {} if self._adamw is None else self._adamw.masters
        self.params = dict(named)

    def collect(self) -> None:
        if self._adamw is not None:
            self._adamw.collect()

    def norm(self, divisor: float) -> GradientNorm:
        named = [(name, p.grad) for name, p in self.matrices.items() if p.grad is not None]
        norms = [float(grad.norm()) for _, grad in named]
        bad = tuple(name for (name, _), value in zip(named, norms, strict=True) if not value < float("inf"))
        rest = GradientNorm(0.0, ()) if self._adamw is None else self._adamw.norm(divisor)
        total = (sum((value / divisor) ** 2 for value in norms) + rest.value**2) ** 0.5
        return GradientNorm(total, (*bad, *rest.not_finite))

    def step(self, lr: float, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.matrices.values() if p.grad is not None], scale)
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        if self._adamw is not None:
            self._adamw.step(lr, scale)

    def drop(self) -> None:
        self._torch.zero_grad(set_to_none=True)
        if self._adamw is not None:
            self._adamw.drop()

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's tensors, and ``momentum.<parameter>``."""
        found = {} if self._adamw is None else self._adamw.state_tensors()
        kept = {name: self._torch.state.get(p, {}).get("momentum_buffer") for name, p in self.matrices.items()}
        return found | {f"momentum.{name}": value for name, value in kept.items() if value is not None}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        momenta, rest = self._taken(tensors)
        for name, value in momenta.items():
            p = self.matrices[name]
            self._torch.state[p] = {"momentum_buffer": value.clone().to(p.device)}
        if self._adamw is not None:
            self._adamw.load_state_tensors(rest)

    def check_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Refuse what ``load_state_tensors`` would, and change nothing."""
        self._taken(tensors)

    def _taken(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The momentum of each matrix among stored tensors, and AdamW's part of them."""
        left = dict(tensors)
        momenta = {
            name: take(left, f"momentum.{name}", p.shape)
            for name, p in self.matrices.items()
            if f"momentum.{name}" in left
        }
        if self._adamw is not None:
            self._adamw.check_state_tensors(left)
        elif left:
            raise UserError(f"the optimizer state holds '{min(left)}', which this optimizer or model has no place for")
        return momenta, left


register(
    Muon,
    module=MuonOptimizer,
    paper="Jordan et al. 2024, arXiv:2502.16982 §2.2",
    cases=lambda: [Muon(), Muon(clip=1.0)],
)

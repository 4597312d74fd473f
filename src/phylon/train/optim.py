"""AdamW with decay groups by role, fp32 master weights, and a flat, named state."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from phylon.ops.rows import native as rows
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.train.updates import Updates

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Optimizer(Slot):
    """Slot of an optimizer."""

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        raise NotImplementedError

    @property
    def clip(self) -> float | None:
        """The largest global gradient norm; ``None`` for no clipping."""
        raise NotImplementedError

    def check(self, parameters: NamedParameters) -> None:
        """Refuse parameters, by name and of any device, that this optimizer cannot train."""

    def state_bytes(self, parameters: Mapping[str, Tensor]) -> int:
        """Bytes that the state of these trained parameters takes: two moments in fp32."""
        return 8 * sum(p.numel() for p in parameters.values())


class AdamW(Mechanism, Optimizer, frozen=True, kw_only=True, tag="adamw"):
    """Adam with decoupled weight decay. Loshchilov and Hutter (arXiv:1711.05101), algorithm 2.

    The decay goes to the weights of linear maps and to embedding tables (two dimensions or more), as in GPT-2's
    open training codes; norm gains and biases (one dimension) are left alone, and what ``undecayed`` names by path glob
    (Mamba's ``A_log``, as in its own code). ``clip`` bounds the global gradient norm.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    undecayed: tuple[str, ...] = ("*.A_log",)
    clip: float | None = None

    def decay_of(self, name: str, parameter: Tensor) -> float:
        """The weight decay of one parameter, by its role."""
        left_alone = parameter.ndim < 2 or any(fnmatchcase(name, glob) for glob in self.undecayed)
        return 0.0 if left_alone else self.weight_decay

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError(f"lr must be above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be at least 0 and below 1, got {list(self.betas)}")
        if not self.eps > 0:
            raise UserError(f"eps must be above 0, got {self.eps}")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be above 0 (leave it out for no clipping), got {self.clip}")


class AdamWOptimizer(Updates):
    """Runs ``AdamW`` over the parameters that take gradients, each once."""

    def __init__(self, spec: AdamW, parameters: NamedParameters) -> None:
        super().__init__(parameters)
        self.spec = spec
        self._dense = all(_is_dense(p) for p in self.params.values())

    def norms(self, grads: list[Tensor]) -> Tensor:
        """The norm of every gradient, (n,)."""
        if self._native() and all(_is_dense(grad) for grad in grads):
            return torch.tensor([rows.square_sum(grad) for grad in grads], dtype=torch.float64).sqrt()
        return super().norms(grads)

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """One update at rate ``lr`` with the collected gradients times ``scale``."""
        if self._native() and all(p.grad is None or _is_dense(p.grad) for p in self.trained.values()):
            for name, p in self.trained.items():
                if p.grad is not None:
                    self._update(name, p, lr, scale)
            return self.drop()
        super().step(lr, scale)

    def update(self, lr: float) -> None:
        """PyTorch's arithmetic, by groups of one decay."""
        by_decay: dict[float, list[str]] = {}
        for name, p in self.trained.items():
            if p.grad is not None:
                by_decay.setdefault(self.spec.decay_of(name, p), []).append(name)
        for decay, names in by_decay.items():
            self._fused(names, lr, decay)

    def _fused(self, names: list[str], lr: float, decay: float) -> None:
        """PyTorch's fused step, as a function: its optimizer class imports the compiler, which takes seconds."""
        spec, trained = self.spec, [self.trained[name] for name in names]
        states = [self._state(name) for name in names]
        adamw(
            trained,
            [p.grad for p in trained],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=trained[0].device.type in ("cpu", "cuda", "mps"),
            amsgrad=False,
            beta1=spec.betas[0],
            beta2=spec.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=spec.eps,
            maximize=False,
        )

    def _state(self, name: str) -> dict[str, Tensor]:
        """Update count and moments of a parameter, made at its first gradient."""
        if name not in self.state:
            p = self.trained[name]
            count = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[name] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return self.state[name]

    def _native(self) -> bool:
        """Whether the C++ kernel makes the updates: one pass over weight, gradient and moments."""
        return self._dense and rows.LIBRARY.reason() is None

    def _update(self, name: str, p: Tensor, lr: float, scale: float) -> None:
        """The same arithmetic as PyTorch's fused step, with ``scale`` and a master's rounded copy in the same pass."""
        spec, state = self.spec, self._state(name)
        state["step"] += 1
        count, decay = float(state["step"]), spec.decay_of(name, p)
        assert p.grad is not None
        param = self.params[name]
        copy = param.detach() if name in self.masters and param.dtype is torch.bfloat16 else None
        rows.adamw(
            p.detach(),
            copy,
            p.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            scale=scale,
            betas=spec.betas,
            eps=spec.eps,
            rate=lr / (1 - spec.betas[0] ** count),
            root=(1 - spec.betas[1] ** count) ** -0.5,
            keep=1 - lr * decay,
        )
        torch.autograd.graph.increment_version((p, state["exp_avg"], state["exp_avg_sq"]))
        if name in self.masters and copy is None:
            param.copy_(p)

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


def _is_dense(tensor: Tensor) -> bool:
    """Whether the kernel can walk over ``tensor`` as it lies in memory."""
    plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    held = tensor.dtype in (torch.float32, torch.bfloat16)
    return plain and held and tensor.device.type == "cpu" and tensor.is_contiguous()


register(AdamW, module=AdamWOptimizer, paper="arXiv:1711.05101 alg. 2", cases=lambda: [AdamW(), AdamW(clip=1.0)])

"""AdamW with decay groups by role, fp32 master weights, and a flat, named state."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from phylon.ops.rows import native as rows
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register

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
        if not self.eps > 0 or self.weight_decay < 0:
            raise UserError(f"eps must be above 0 and weight_decay at least 0, got {self.eps} and {self.weight_decay}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be above 0 (leave it out for no clipping), got {self.clip}")


class GradientNorm(NamedTuple):
    """The global norm, and the names of the tensors whose gradient is not finite (empty when all is well)."""

    value: float
    not_finite: tuple[str, ...]


class AdamWOptimizer:
    """Runs ``AdamW`` over the parameters that take gradients, each once.

    A parameter below fp32 gets a master copy in fp32, which collects the gradients and takes the steps; the parameter
    is the master rounded. Call ``collect`` after every backward pass, ``norm`` once, then ``step`` or ``drop``.
    """

    def __init__(self, spec: AdamW, parameters: NamedParameters) -> None:
        self.spec = spec
        self.params = {name: p for name, p in parameters if p.requires_grad}
        if not self.params:
            raise UserError("no parameter of the model takes a gradient; unfreeze some")
        self.masters = {
            name: p.detach().float().requires_grad_() for name, p in self.params.items() if p.element_size() < 4
        }
        self.trained: dict[str, Tensor] = {**self.params, **self.masters}
        self.state: dict[str, dict[str, Tensor]] = {}
        self._dense = all(_is_dense(p) for p in self.params.values())

    def collect(self) -> None:
        """Add the gradients of low-precision parameters to their masters', in fp32."""
        for name, master in self.masters.items():
            grad = self.params[name].grad
            if grad is None:
                continue
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
            self.params[name].grad = None

    def norm(self, divisor: float) -> GradientNorm:
        """The norm over all gradients divided by ``divisor`` (the number of targets they sum over)."""
        named = [(name, p.grad) for name, p in self.trained.items() if p.grad is not None]
        if not named:
            return GradientNorm(0.0, ())
        norms = self._norms([grad for _, grad in named])
        value = float(torch.linalg.vector_norm(norms)) / divisor
        if torch.isfinite(torch.tensor(value)):
            return GradientNorm(value, ())
        bad = tuple(name for (name, _), fine in zip(named, torch.isfinite(norms).tolist(), strict=True) if not fine)
        return GradientNorm(value, bad or tuple(name for name, _ in named))

    def _norms(self, grads: list[Tensor]) -> Tensor:
        """The norm of every gradient, (n,)."""
        if self._native() and all(_is_dense(grad) for grad in grads):
            return torch.tensor([rows.square_sum(grad) for grad in grads], dtype=torch.float64).sqrt()
        return torch.stack(torch._foreach_norm(grads))

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """One update at rate ``lr`` with the collected gradients times ``scale``."""
        if self._native() and all(p.grad is None or _is_dense(p.grad) for p in self.trained.values()):
            for name, p in self.trained.items():
                if p.grad is not None:
                    self._update(name, p, lr, scale)
            return self.drop()
        named = {name: p for name, p in self.trained.items() if p.grad is not None}
        grads = [p.grad for p in named.values() if p.grad is not None]
        if scale != 1.0 and grads:
            torch._foreach_mul_(grads, scale)
        by_decay: dict[float, list[str]] = {}
        for name, p in named.items():
            by_decay.setdefault(self.spec.decay_of(name, p), []).append(name)
        for decay, names in by_decay.items():
            self._fused(names, lr, decay)
        self.drop()
        for name, master in self.masters.items():
            self.params[name].copy_(master)

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

    def drop(self) -> None:
        """Forget the collected gradients; moments and weights stay."""
        for p in (*self.params.values(), *self.masters.values()):
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments, update counts and masters as ``<what>.<parameter>``."""
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name in self.trained:
            found |= {f"{what}.{name}": value for what, value in self.state.get(name, {}).items()}
        return found

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of ``state_tensors``; an entry too many or of the wrong shape is refused."""
        left = dict(tensors)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(_take(left, f"master.{name}", master))
        for name, p in self.trained.items():
            if f"step.{name}" not in left:
                continue  # a parameter that never had a gradient
            moments = {what: _take(left, f"{what}.{name}", p).to(p.device) for what in ("exp_avg", "exp_avg_sq")}
            self.state[name] = {"step": left.pop(f"step.{name}").to(p.device), **moments}
        if left:
            raise UserError(f"the optimizer state holds '{min(left)}', which this model has no place for")


def _is_dense(tensor: Tensor) -> bool:
    """Whether the kernel can walk over ``tensor`` as it lies in memory."""
    plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    held = tensor.dtype in (torch.float32, torch.bfloat16)
    return plain and held and tensor.device.type == "cpu" and tensor.is_contiguous()


def _take(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    value = tensors.pop(name, None)
    if value is None or value.shape != like.shape:
        found = "is missing" if value is None else f"has the shape {tuple(value.shape)}, not {tuple(like.shape)}"
        raise UserError(f"the optimizer state does not fit this model: '{name}' {found}")
    return value.clone()


register(AdamW, module=AdamWOptimizer, paper="arXiv:1711.05101 alg. 2", cases=lambda: [AdamW(), AdamW(clip=1.0)])

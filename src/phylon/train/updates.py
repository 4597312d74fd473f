"""What all optimizers share: fp32 masters, collected gradients, their norm, a named state."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phylon.spec.errors import UserError


class GradientNorm(NamedTuple):
    """The global norm, and the names of the tensors whose gradient is not finite (empty when all is well)."""

    value: float
    not_finite: tuple[str, ...]


class Updates:
    """What the trainer asks of an optimizer, around ``update(lr)``, which a subclass defines.

    A parameter below fp32 gets a master copy in fp32, which collects the gradients and takes the steps; the parameter
    is the master rounded. Call ``collect`` after every backward pass, ``norm`` once, then ``step`` or ``drop``.
    ``state`` maps a parameter's name to its named tensors.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.params = {name: p for name, p in parameters if p.requires_grad}
        if not self.params:
            raise UserError("no parameter of the model takes a gradient; unfreeze some")
        self.masters = {
            name: p.detach().float().requires_grad_() for name, p in self.params.items() if p.element_size() < 4
        }
        self.trained: dict[str, Tensor] = {**self.params, **self.masters}
        self.state: dict[str, dict[str, Tensor]] = {}

    def update(self, lr: float) -> None:
        """One update of every ``trained`` tensor that has a gradient, in place."""
        raise NotImplementedError

    def collect(self) -> None:
        """Add the gradients of low-precision parameters to their masters', in fp32."""
        for name, master in self.masters.items():
            grad = self.params[name].grad
            if grad is not None:
                master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
                self.params[name].grad = None

    def norm(self, divisor: float) -> GradientNorm:
        """The norm over all gradients divided by ``divisor``; the tensors whose gradient is not finite."""
        named = [(name, p.grad) for name, p in self.trained.items() if p.grad is not None]
        if not named:
            return GradientNorm(0.0, ())
        norms = self.norms([grad for _, grad in named])
        value = float(torch.linalg.vector_norm(norms)) / divisor
        if torch.isfinite(torch.tensor(value)):
            return GradientNorm(value, ())
        bad = tuple(name for (name, _), fine in zip(named, torch.isfinite(norms).tolist(), strict=True) if not fine)
        return GradientNorm(value, bad or tuple(name for name, _ in named))

    def norms(self, grads: list[Tensor]) -> Tensor:
        """The norm of every gradient, (n,)."""
        return torch.stack(torch._foreach_norm(grads))

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """One update at rate ``lr`` with the collected gradients times ``scale``."""
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        if scale != 1.0 and grads:
            torch._foreach_mul_(grads, scale)
        self.update(lr)
        self.drop()
        for name, master in self.masters.items():
            self.params[name].copy_(master)

    def drop(self) -> None:
        """Forget the collected gradients; the state and the weights stay."""
        for p in (*self.params.values(), *self.masters.values()):
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The state and the masters as ``<what>.<parameter>``."""
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, kept in self.state.items():
            found |= {f"{what}.{name}": value for what, value in kept.items()}
        return found

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of ``state_tensors``; an entry too many or of the wrong shape is refused."""
        masters, state = self._taken(tensors)
        with torch.no_grad():
            for name, value in masters.items():
                self.masters[name].copy_(value)
        self.state = {
            name: {what: value.clone().to(self.trained[name].device) for what, value in kept.items()}
            for name, kept in state.items()
        }

    def check_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Refuse what ``load_state_tensors`` would, and change nothing."""
        self._taken(tensors)

    def _taken(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """The masters and the state of each parameter among stored tensors."""
        left = dict(tensors)
        masters = {name: take(left, f"master.{name}", master.shape) for name, master in self.masters.items()}
        state = {}
        for name, p in self.trained.items():
            shapes = self.state_shapes(p)
            if any(f"{what}.{name}" in left for what in shapes):
                state[name] = {what: take(left, f"{what}.{name}", shape) for what, shape in shapes.items()}
        if left:
            raise UserError(f"the optimizer state holds '{min(left)}', which this optimizer or model has no place for")
        return masters, state

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """What is kept of a parameter, with shapes."""
        raise NotImplementedError


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Remove an entry of a stored state and return it, if it is there and fits."""
    value = tensors.pop(name, None)
    if value is None or tuple(value.shape) != tuple(shape):
        found = "is missing" if value is None else f"has the shape {tuple(value.shape)}, not {tuple(shape)}"
        raise UserError(f"the optimizer state does not fit this model: '{name}' {found}")
    return value

"""What calls of all ops ask of their tensors before a backend sees them: shapes and dtypes."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from phylon.spec.errors import UserError


def check_shapes(op: str, **wanted: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Refuse tensors that are not of the shapes wanted, by name; ``None`` fits."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise UserError(f"{op} shapes do not fit: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")


def check_floats(op: str, **tensors: Tensor | None) -> None:
    """Refuse integers, booleans and complex numbers, which backends would cut off in silence."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise UserError(f"{op} takes floating-point numbers, {name} is {str(tensor.dtype).removeprefix('torch.')}")


def check_rank(op: str, tensor: Tensor, rank: int, what: str) -> None:
    """Refuse a tensor of another number of dimensions, or with an empty one."""
    if tensor.ndim != rank or 0 in tensor.shape:
        raise UserError(f"{op} takes {what}, none of them 0, got {tuple(tensor.shape)}")


def check_map(op: str, name: str, maps: tuple[Tensor, Tensor | None], x: Tensor | None, width: int = 0) -> None:
    """Refuse a linear map, a weight (out, in) and a bias (out,), that does not fit ``x`` (..., in) or ``width``."""
    weight, bias = maps
    if x is not None:
        if x.ndim == 0 or not x.is_floating_point():
            raise UserError(f"{op} takes floating-point numbers (..., D), got {tuple(x.shape)} of {x.dtype}")
        width = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width:
        raise UserError(f"{op} shapes do not fit: {name} is {tuple(weight.shape)}, expected (any, {width})")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(
            f"{op} shapes do not fit: the bias of {name} is {tuple(bias.shape)}, expected ({weight.shape[0]},)"
        )


def check_int32(name: str, numbers: Tensor) -> None:
    """Refuse whole numbers beyond 32 bits, in which positions and documents are kept."""
    if numbers.dtype is torch.int64 and numbers.numel() and may_ask(numbers):
        least, most = (int(x) for x in numbers.aminmax())
        if least < -(2**31) or most >= 2**31:
            raise UserError(f"{name} must be below 2^31, got {most if most >= 2**31 else least}")


def may_ask(tensor: Tensor) -> bool:
    """Whether its values may be looked at: on a GPU that would cost a synchronisation, and tracers have none."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not transformed()


def transformed(*tensors: Tensor | None) -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work: they see into PyTorch's operations alone.

    Or a gradient among ``tensors`` is a batch of them (``torch.autograd.grad(is_grads_batched=True)``).
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return any(tensor is not None and not torch._C._has_storage(tensor) for tensor in tensors)

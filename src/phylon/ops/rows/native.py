"""The C++ kernels over rows (``native.cpp``) as functions of tensors. Callers see to it that the library is there."""

from ctypes import c_double, c_float, c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor, nn

from phylon.ops.native import Library, floats, pointer, strided

KINDS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "tanh": 4}
FEW = 8192
"""Below so many elements a call costs more than the kernel saves."""
_SHARES = 32
_HELD = (torch.float32, torch.bfloat16)
_P, _L, _F, _I = c_void_p, c_long, c_float, c_int


def refusal(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot take these tensors: the first is the large one."""
    x = tensors[0]
    assert x is not None
    if x.numel() < FEW:
        return "too few elements to gain anything"
    if x.device.type != "cpu":
        return f"it runs on the CPU, not on {x.device.type}"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return f"it takes plain tensors, not {type(tensor).__name__}"
        if tensor.dtype not in _HELD:
            return f"it takes float32 and bfloat16, not {str(tensor.dtype).removeprefix('torch.')}"
    return None


def forward_alone() -> str | None:
    """Why a pass without gradients is left to PyTorch: its bits then do not depend on how many tokens a call holds."""
    if FEW and not torch.is_grad_enabled():
        return "without gradients PyTorch's own serves calls of any size alike"
    return None


def wide(tensor: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it: dense fp32."""
    return None if tensor is None else tensor.detach().float().contiguous()


def norm_forward(
    x: Tensor, h: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``x + h`` (``x`` itself without ``h``), its norm, and (2, rows) the rows' means and inverse deviations."""
    n, d = x.numel(), x.shape[-1]
    total = x if h is None else torch.empty_like(x)
    y, statistics = torch.empty_like(x), floats(2, n // d)
    types = _low(x) + 2 * (0 if h is None else _low(h)) + 4 * _low(y)
    LIBRARY.rows_norm(
        types, _held(x, n), _held(h, n), pointer(weight, d), pointer(bias, d), total.data_ptr(), y.data_ptr(),
        statistics.data_ptr(), statistics.data_ptr() + 4 * (n // d), n // d, d, eps, centred,
    )  # fmt: skip
    return total, y, statistics


def norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    centred: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of what was normed (that of the total added), of the weight and of the bias, the latter in fp32."""
    n, d = x.numel(), x.shape[-1]
    grad_x, parts = torch.empty_like(x), floats(2 * _SHARES * d)
    grad_w = None if weight is None else floats(d)
    grad_b = floats(d) if with_bias else None
    LIBRARY.rows_norm_backward(
        _low(x) + 4 * _low(grad_y), _held(grad_y, n), pointer(grad_total, n, x.dtype), _held(x, n), pointer(weight, d),
        pointer(statistics, 2 * (n // d)), statistics[1].data_ptr(), grad_x.data_ptr(), parts.data_ptr(),
        pointer(grad_w, d), pointer(grad_b, d), n // d, d, centred,
    )  # fmt: skip
    return grad_x, grad_w, grad_b


def activation(
    kind: str, x: Tensor, bias: Tensor | None = None, up: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """``act(x + bias)``, times ``up + up_bias`` where there is one."""
    y, n, d = torch.empty_like(x), x.numel(), x.shape[-1]
    LIBRARY.rows_activation(
        KINDS[kind], _low(x), _held(x, n), pointer(bias, d), pointer(up, n, x.dtype), pointer(up_bias, d), y.data_ptr(),
        n // d, d,
    )  # fmt: skip
    return y


class ActivationGradients:
    """Gradients of ``activation``: ``x`` in ``grad_y``'s memory, ``up``, both biases (fp32), and ``y`` made again."""

    def __init__(
        self,
        kind: str,
        grad_y: Tensor,
        x: Tensor,
        bias: Tensor | None,
        up: Tensor | None,
        up_bias: Tensor | None,
        again: bool,
    ) -> None:
        n, d, dtype = x.numel(), x.shape[-1], x.dtype
        self.x = grad_y
        self.up = None if up is None else torch.empty_like(up)
        self.y = torch.empty_like(x) if again else None
        self.bias = None if bias is None else floats(d)
        self.up_bias = None if up_bias is None else floats(d)
        parts = None if bias is None and up_bias is None else floats(2 * _SHARES * d)
        LIBRARY.rows_activation_backward(
            KINDS[kind], _low(x), pointer(grad_y, n, dtype), _held(x, n), pointer(bias, d), pointer(up, n, dtype),
            pointer(up_bias, d), pointer(self.x, n, dtype), pointer(self.up, n, dtype), pointer(self.y, n, dtype),
            pointer(parts, 2 * _SHARES * d), pointer(self.bias, d), pointer(self.up_bias, d), n // d, d,
        )  # fmt: skip


def row_sum(x: Tensor) -> Tensor:
    """The sum over all dimensions but the last, in fp32, the same for any number of threads."""
    n, d = x.numel(), x.shape[-1]
    out, parts = floats(d), floats(_SHARES * d)
    LIBRARY.rows_sum(_low(x), _held(x, n), parts.data_ptr(), out.data_ptr(), n // d, d)
    return out


def scores_loss(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    grad: bool,
) -> Tensor:
    """Losses (C,) of fp32 ``scores`` (C, V), whose memory becomes their gradient where ``grad``."""
    (c, v), losses = scores.shape, floats(len(scores))
    LIBRARY.rows_cross_entropy(
        pointer(scores, c * v), pointer(bias, v), pointer(targets, c, torch.int64), pointer(weights, c),
        losses.data_ptr(), c, v, softcap or 0.0, smoothing, z_loss, grad,
    )  # fmt: skip
    return losses


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    """``x`` (B, T, H, E) with heads dense, turned by tables (B or 1, T, half); ``sign`` -1 turns back."""
    (batch, tokens, heads, width), (rows, _, half) = x.shape, cosine.shape
    assert rows in (1, batch)
    assert 2 * half <= width
    address, *strides = strided(x, x.shape, torch.bfloat16 if _low(x) else torch.float32)
    tables = (pointer(table, rows * tokens * half) for table in (cosine, sine))
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    LIBRARY.rows_rotary(
        _low(x), address, *tables, y.data_ptr(), batch, tokens, heads, width, half, *strides,
        0 if rows == 1 else cosine.stride(0), sign,
    )  # fmt: skip
    return y


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (M,) of ``x`` (N, D)."""
    y = torch.empty(len(index), x.shape[1], dtype=x.dtype, device="cpu")
    LIBRARY.rows_gather(_low(x), _held(x, x.numel()), pointer(index, len(y), torch.int64), y.data_ptr(), *y.shape)
    return y


def combine(x: Tensor, where: Tensor, gates: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``sum over j of gates[n, j] * x[where[n, j]]`` (N, D), summed in fp32; a place of -1 adds nothing."""
    y, places = torch.empty(len(where), x.shape[1], dtype=dtype, device="cpu"), where.numel()
    LIBRARY.rows_combine(
        _low(x) + 2 * _low(y), _held(x, x.numel()), pointer(where, places, torch.int64), pointer(gates, places),
        y.data_ptr(), *where.shape, x.shape[1],
    )  # fmt: skip
    return y


def combine_backward(grad_y: Tensor, x: Tensor, where: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``gates``; every row of ``x`` must have a place that leads to it."""
    grad_x, grad_gates, places = torch.empty_like(x), torch.empty_like(gates), where.numel()
    LIBRARY.rows_combine_backward(
        _low(x) + 2 * _low(grad_y), _held(grad_y, len(where) * x.shape[1]), _held(x, x.numel()),
        pointer(where, places, torch.int64), pointer(gates, places), grad_x.data_ptr(), grad_gates.data_ptr(),
        *where.shape, x.shape[1],
    )  # fmt: skip
    return grad_x, grad_gates


def square_sum(grad: Tensor) -> float:
    """The sum of squares, in fp64 beyond 2,048 elements."""
    return float(LIBRARY.rows_square_sum(_low(grad), _held(grad, grad.numel()), grad.numel()))


def adamw(
    weight: Tensor,
    copy: Tensor | None,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    scale: float,
    betas: tuple[float, float],
    eps: float,
    rate: float,
    root: float,
    keep: float,
) -> None:
    """One update of fp32 ``weight`` and its moments in place; ``copy`` takes the weight rounded to bf16."""
    n = weight.numel()
    LIBRARY.rows_adamw(
        _low(grad), pointer(weight, n), pointer(copy, n, torch.bfloat16), _held(grad, n), pointer(mean, n),
        pointer(square, n), n, scale, *betas, eps, rate, root, keep,
    )  # fmt: skip


def _held(tensor: Tensor | None, numbers: int) -> int | None:
    """The address of numbers in one of the two dtypes."""
    return pointer(tensor, numbers, torch.bfloat16 if tensor is not None and _low(tensor) else torch.float32)


def _low(tensor: Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)


def _check() -> str | None:
    from phylon.ops.rows.check import check

    return check()


LIBRARY = Library(
    __name__,
    [Path(__file__).with_name(name) for name in
     ("native.cpp", "vec.h", "norm.h", "activation.h", "loss.h", "adamw.h", "rotary.h", "experts.h",
      "check.py")],
    {
        "rows_norm": [_I, *[_P] * 8, _L, _L, _F, _I],
        "rows_norm_backward": [_I, *[_P] * 10, _L, _L, _I],
        "rows_activation": [_I, _I, *[_P] * 5, _L, _L],
        "rows_activation_backward": [_I, _I, *[_P] * 11, _L, _L],
        "rows_sum": [_I, _P, _P, _P, _L, _L],
        "rows_cross_entropy": [*[_P] * 5, _L, _L, _F, _F, _F, _I],
        "rows_adamw": [_I, *[_P] * 5, _L, *[_F] * 7],
        "rows_square_sum": [_I, _P, _L],
        "rows_gather": [_I, *[_P] * 3, _L, _L],
        "rows_combine": [_I, *[_P] * 4, _L, _L, _L],
        "rows_combine_backward": [_I, *[_P] * 6, _L, _L, _L],
        "rows_rotary": [_I, *[_P] * 4, *[_L] * 9, _F],
    },
    _check,
    returns={"rows_square_sum": c_double},
)  # fmt: skip

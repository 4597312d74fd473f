"""What the kernels over rows must get right before anybody uses them: every one, in every dtype, against its formula.

``CHECKS`` is the table: a kernel of the library without a line in it is not used.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from phylon.ops.activation import ACTIVATIONS
from phylon.ops.rows import native as rows

_LIMITS = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
_SIZES = ((5, 7), (67, 100))
"""Rows and their width: no multiples of a vector; fewer rows than shares of them, and more."""

Draw = Callable[..., Tensor]
Found = Iterator[tuple[str, Tensor, Tensor]]
"""What is compared: its name, what the kernel made, and what it should be, in fp64."""


def check() -> str | None:
    """``None``, or which kernel is wrong, or not known here."""
    unknown = rows.LIBRARY.functions.keys() - CHECKS.keys()
    if unknown:
        return f"nothing checks {min(unknown)}"
    for check_one, dtype, (n, d) in product(dict.fromkeys(CHECKS.values()), _LIMITS, _SIZES):
        draw = partial(_draw, torch.Generator().manual_seed(n), dtype)
        for what, got, wanted in check_one(draw, n, d):
            error = float((got.double() - wanted).abs().max() / wanted.abs().max())
            if not error <= _LIMITS[got.dtype]:
                return f"{what} in {str(dtype).removeprefix('torch.')} is off by {error:.1e}"
    return None


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int, wide: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=generator)
    return made if wide else made.to(dtype)


def _leaves(*given: Tensor | None) -> list[Any]:
    return [None if x is None else x.double().requires_grad_() for x in given]


def _gradients(of: str, outputs: list[Tensor], grads: list[Tensor], leaves: dict[str, Any], found: list[Any]) -> Found:
    """The gradients ``found`` against those of ``outputs``, of those leaves that there are."""
    there = {name: (leaf, got) for (name, leaf), got in zip(leaves.items(), found, strict=True) if leaf is not None}
    wanted = torch.autograd.grad(outputs, [leaf for leaf, _ in there.values()], [g.double() for g in grads])
    for (name, (_, got)), want in zip(there.items(), wanted, strict=True):
        yield f"the gradient of {name} of {of}", got, want


def _norms(draw: Draw, n: int, d: int) -> Found:
    x, low = draw(n, d), draw(n, d, wide=True).bfloat16()
    others = (None, low) if x.dtype is low.dtype else (None, draw(n, d), low)
    for added, centred, weighted in product(others, (False, True), (False, True)):
        w = draw(d, wide=True) if weighted else None
        b = draw(d, wide=True) if weighted and centred else None
        grad_y, grad_total = draw(n, d), draw(n, d)
        total, y, statistics = rows.norm_forward(x, added, w, b, 1e-5, centred)
        if added is not None:
            yield "a sum", total, x.double() + added.double()
        leaf, weight, bias = _leaves(total, w, b)
        shifted = leaf - leaf.mean(-1, keepdim=True) if centred else leaf
        normed = shifted * (shifted.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = normed if weight is None else normed * weight
        normed = normed if bias is None else normed + bias
        yield "a norm", y, normed.detach()
        found = rows.norm_backward(grad_y, grad_total, total, w, statistics, centred, b is not None)
        leaves = {"the input": leaf, "the weight": weight, "the bias": bias}
        yield from _gradients("a norm", [normed, leaf], [grad_y, grad_total], leaves, [*found])


def _activations(draw: Draw, n: int, d: int) -> Found:
    for kind, gated, biased in product(rows.KINDS, (False, True), (False, True)):
        x, up, grad = draw(n, d), draw(n, d) if gated else None, draw(n, d)
        bias = draw(d, wide=True) if biased else None
        up_bias = draw(d, wide=True) if biased and gated else None
        z, b, u, c = _leaves(x, bias, up, up_bias)
        y = ACTIVATIONS[kind](z if b is None else z + b)
        y = y if u is None else y * (u if c is None else u + c)
        yield kind, rows.activation(kind, x, bias, up, up_bias), y.detach()
        made = rows.ActivationGradients(kind, grad.clone(), x, bias, up, up_bias, again=True)
        assert made.y is not None
        yield f"{kind} made again", made.y, y.detach()
        leaves = {"the input": z, "the bias": b, "the other factor": u, "its bias": c}
        yield from _gradients(kind, [y], [grad], leaves, [made.x, made.bias, made.up, made.up_bias])


def _losses(draw: Draw, n: int, d: int) -> Found:
    targets = torch.arange(n) % d
    targets[n // 2] = -100
    given = ((None, None), (draw(d, wide=True), draw(n, wide=True).abs()))
    options = ((None, 0.0, 0.0), (3.0, 0.1, 0.2), (None, 0.1, 0.2))
    for (bias, weights), (cap, smoothing, z) in product(given, options):
        scores = 4 * draw(n, d, wide=True)
        leaf = scores.double().requires_grad_()
        s = leaf if bias is None else leaf + bias.double()
        s = s if cap is None else cap * torch.tanh(s / cap)
        log_z = s.logsumexp(-1)
        losses = log_z - (1 - smoothing) * s.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        losses = losses - smoothing * s.mean(-1) + z * log_z.square()
        losses = (losses if weights is None else losses * weights.double()).masked_fill(targets < 0, 0)
        for grad in (False, True):
            made = scores.clone()
            yield "a loss", rows.scores_loss(made, bias, targets, weights, cap, smoothing, z, grad), losses.detach()
        yield from _gradients("a loss", [losses], [torch.ones(n)], {"the scores": leaf}, [made])


def _sums(draw: Draw, n: int, d: int) -> Found:
    x = draw(n, d)
    yield "a sum over rows", rows.row_sum(x), x.double().sum(0)


def _squares(draw: Draw, n: int, d: int) -> Found:
    x = draw(n, d, 11)
    yield "a sum of squares", torch.tensor(rows.square_sum(x)), x.double().square().sum()


def _rotations(draw: Draw, n: int, d: int) -> Found:
    x = draw(2, n, 3, 2 * d)[..., :d]  # heads that do not lie side by side
    for batch, half, sign in product((1, 2), (d // 2, d // 3), (1.0, -1.0)):
        angles = draw(batch, n, half, wide=True)
        cosine, sine = angles.cos(), angles.sin()
        c, s = cosine.double()[:, :, None], sign * sine.double()[:, :, None]
        first, second, rest = x.double().split([half, half, d - 2 * half], -1)
        turned = torch.cat([first * c - second * s, second * c + first * s, rest], -1)
        yield "a rotation", rows.rotary(x, cosine, sine, sign), turned


def _gathers(draw: Draw, n: int, d: int) -> Found:
    x, index = draw(n, d), torch.arange(2 * n).flip(0) % n
    yield "rows gathered", rows.gather(x, index), x[index].double()


def _combinations(draw: Draw, n: int, d: int) -> Found:
    where = torch.arange(2 * n).flip(0).view(n, 2)
    where[where >= 2 * n - 2] = -1  # the first token's are not sent
    for wide in (False, True):
        x, grad = draw(2 * n - 2, d, wide=wide), draw(n, d)
        gates = draw(n, 2, wide=True)
        leaf, g = _leaves(x, gates)
        picked = leaf[where.clamp(min=0)].masked_fill((where < 0)[..., None], 0)
        yield "a plain sum of experts", rows.combine(x, where, None, grad.dtype), picked.detach().sum(1)
        y = (picked * g[..., None]).sum(1)
        yield "a sum of experts", rows.combine(x, where, gates, grad.dtype), y.detach()
        found = rows.combine_backward(grad, x, where, gates)
        yield from _gradients("a sum of experts", [y], [grad], {"the rows": leaf, "the gates": g}, [*found])


def _updates(draw: Draw, n: int, d: int) -> Found:
    for copied in (False, True):
        grad, weight, mean, square = draw(n, d), *(draw(n, d, wide=True) for _ in range(3))
        square.abs_()
        g = 0.5 * grad.double()
        m, v = 0.9 * mean.double() + 0.1 * g, 0.95 * square.double() + 0.05 * g * g
        w = 0.98 * weight.double() - 0.2 * m / (1.5 * v.sqrt() + 1e-3)
        copy = torch.empty_like(weight, dtype=torch.bfloat16) if copied else None
        rows.adamw(
            *(weight, copy, grad, mean, square),
            scale=0.5,
            betas=(0.9, 0.95),
            eps=1e-3,
            rate=0.2,
            root=1.5,
            keep=0.98,
        )
        for what, got, wanted in (("weight", weight, w), ("mean", mean, m), ("square", square, v)):
            yield f"AdamW's {what}", got, wanted
        if copy is not None:
            yield "AdamW's copy", copy, w


CHECKS: dict[str, Callable[[Draw, int, int], Found]] = {
    "rows_norm": _norms,
    "rows_norm_backward": _norms,
    "rows_activation": _activations,
    "rows_activation_backward": _activations,
    "rows_sum": _sums,
    "rows_cross_entropy": _losses,
    "rows_adamw": _updates,
    "rows_square_sum": _squares,
    "rows_gather": _gathers,
    "rows_combine": _combinations,
    "rows_combine_backward": _combinations,
    "rows_rotary": _rotations,
}

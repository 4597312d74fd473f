"""``torch.compile`` over the ops: the numbers of an eager call, forward and backward."""

import pytest
import torch
from torch import Tensor, nn

from phylon.ops import attention, norm, scan
from phylon.ops.experts import ExpertWeights, experts
from phylon.ops.loss import linear_cross_entropy
from phylon.patterns import Causal, Window

pytestmark = pytest.mark.slow


class Uses(nn.Module):
    """A module that calls one op, between operations of PyTorch's own."""

    def __init__(self, op: str, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.op = op
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) * 0.3 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        w = list(self.weights)
        x = x * 1.5
        if self.op in ("causal", "window"):
            q, k, v = (torch.nn.functional.linear(x, m).unflatten(-1, (4, -1)) for m in w)
            pattern = Causal() if self.op == "causal" else Window(size=9)
            made = attention.attention(q, k, v, pattern=pattern).flatten(2)
        elif self.op == "rms norm":
            made = norm.rms_norm(x, w[0], 1e-6)
        elif self.op == "layer norm":
            made = torch.cat(norm.add_layer_norm(x, x.sin(), w[0], w[1], 1e-6))
        elif self.op == "linear cross-entropy":
            targets = torch.arange(x[..., 0].numel()).view(x.shape[:2]) % len(w[0])
            made = linear_cross_entropy(x, w[0], targets, z_loss=0.1).mean
        elif self.op == "scan":
            dt, B, C = torch.nn.functional.softplus(x), x @ w[2], x @ w[3]
            made = scan.selective_scan(x, dt, -w[0].exp(), B, C, w[1])[0]
        else:
            flat = x.flatten(0, 1)
            gates, chosen = (flat @ w[0]).softmax(-1).topk(2)
            made = experts(flat, chosen, gates, ExpertWeights(up=w[1], gate=w[2], down=w[3]))
        return (made * 0.1).sin() * 2


CASES = {
    "causal": ((32, 32),) * 3,
    "window": ((32, 32),) * 3,
    "rms norm": ((32,),),
    "layer norm": ((32,), (32,)),
    "linear cross-entropy": ((50, 32),),
    "scan": ((32, 8), (32,), (32, 8), (32, 8)),
    "experts": ((32, 4), (4, 24, 32), (4, 24, 32), (4, 32, 24)),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", CASES)
def test_the_numbers_of_an_eager_call(op: str, backend: str) -> None:
    """In training and without gradients; a second call of another length is compiled again, or not at all."""
    torch.compiler.reset()
    module = Uses(op, *CASES[op])
    compiled = torch.compile(module, backend=backend)
    for length in (40, 23):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length)).requires_grad_()
        found = []
        for call in (compiled, module):
            out = call(x)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), [x, *module.parameters()])])
        with torch.no_grad():
            found[0].append(compiled(x))
            found[1].append(module(x))
        for i, (ours, wanted) in enumerate(zip(*found, strict=True)):
            error = float((ours - wanted).norm() / wanted.norm())
            assert error <= 1e-5, f"tensor {i} at length {length} is off by {error:.1e}"

"""What ``online`` needs beyond inputs, outputs and gradients: the copies of two heads' keys, values and gradients."""

import pytest
import torch
from torch import Tensor

from phylon.bench.memory import extra_bytes
from phylon.ops.attention import attention
from phylon.patterns import Causal, Pattern, Window

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "pattern"), [(16_384, Window(size=1024)), (8192, Causal())])
def test_memory_is_of_two_heads(n: int, pattern: Pattern, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, n, 8, 64, generator=made).to(dtype).requires_grad_() for _ in range(4))

    def call() -> tuple[Tensor, ...]:
        out = attention(q, k, v, pattern=pattern, backend="online")
        return out, *torch.autograd.grad(out, (q, k, v), g)

    call()  # libraries, and the plan
    found = [extra_bytes(call) for _ in range(3)]  # the least: what else the process holds comes and goes
    if None in found:
        pytest.skip("the system does not tell its memory")
    copies = 4 * 2 * n * 64 * 4
    assert min(x for x in found if x is not None) <= copies + 24 * 2**20

"""BigBird by the paper's words (arXiv:2007.14062, section 2 and appendix D), in plain loops, and attention over it."""

import math

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from phylon.ops.attention import attention, dispatch
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.plan import tile_plan
from phylon.patterns import BigBird, Records, aligned, measured

CASES = [
    (BigBird(block=4, n_heads=2, n_random=2), 61),
    (BigBird(block=8, n_heads=2, window=1, n_random=1, seed=5), 96),
    (BigBird(block=5, n_heads=2, window=5, ends=2, n_random=3), 140),
    (BigBird(block=3, n_heads=2, ends=0, n_random=2), 50),
    (BigBird(block=16, n_heads=2, n_random=0), 130),
    (BigBird(block=4, n_heads=2), 9),
]


def drawn(pattern: BigBird, n_blocks: int) -> list[list[list[int]]]:
    """The random blocks of every head and block, as the pattern has drawn them."""
    blocks = torch.arange(n_blocks)[None, None, :, None]
    picks = [pick.expand(1, pattern.n_heads, n_blocks, 1) for pick in pattern._picks(blocks, torch.tensor(n_blocks))]
    return [
        [[int(pick[0, h, q, 0]) for pick in picks if int(pick[0, h, q, 0]) >= 0] for q in range(n_blocks)]
        for h in range(pattern.n_heads)
    ]


def by_the_paper(pattern: BigBird, n: int) -> Tensor:
    """(H, n, n): query i sees key j where their blocks are neighbours, or one is global, or j's was drawn for i's."""
    n_blocks = math.ceil(n / pattern.block)
    random = drawn(pattern, n_blocks)
    global_blocks = {*range(pattern.ends), *range(n_blocks - pattern.ends, n_blocks)}
    seen = torch.zeros(pattern.n_heads, n, n, dtype=torch.bool)
    for h in range(pattern.n_heads):
        for i in range(n):
            for j in range(n):
                q, k = i // pattern.block, j // pattern.block
                seen[h, i, j] = (
                    abs(q - k) <= (pattern.window - 1) // 2
                    or q in global_blocks
                    or k in global_blocks
                    or k in random[h][q]
                )
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of every head and query over the keys it sees, one query at a time."""
    outs = []
    for h in range(q.shape[2]):
        rows = []
        for i in range(q.shape[1]):
            keys = seen[h, i].nonzero()[:, 0]
            scores = k[:, keys, h] @ q[0, i, h] / math.sqrt(q.shape[3])
            rows.append(scores.softmax(-1) @ v[0, keys, h])
        outs.append(torch.cat(rows))
    return torch.stack(outs, 1)[None]


@pytest.mark.parametrize(("pattern", "n"), CASES)
def test_the_mask_is_the_papers(pattern: BigBird, n: int) -> None:
    wanted = by_the_paper(pattern, n)
    query, key = measured(*aligned(n, n, torch.device("cpu")))
    assert torch.equal(pattern.allowed(query.as_queries(), key.as_keys())[0].expand_as(wanted), wanted)
    x = torch.zeros(1, n, 2, 4)
    for blocks in ((64, 64), (32, 16), (8, 8)):
        plan = tile_plan(AttentionCall(q=x, k=x, v=x, pattern=pattern), *blocks)
        assert torch.equal(plan.dense()[0].expand_as(wanted), wanted)
    packed = Records(torch.cat([torch.arange(n), torch.arange(7)])[None], torch.tensor([[1] * n + [2] * 7]))
    x = torch.zeros(1, n + 7, 2, 4)
    mask = AttentionCall(q=x, k=x, v=x, pattern=pattern, query=packed, key=packed).mask()
    assert mask is not None
    assert torch.equal(mask[0, :, :n, :n].expand_as(wanted), wanted), "a document's plan is its own"
    assert torch.equal(mask[0, :, n:, n:].expand(2, 7, 7), by_the_paper(pattern, 7))
    assert not mask[0, :, :n, n:].any()


@pytest.mark.parametrize("backend", ["reference", "online", "native"])
@pytest.mark.parametrize(("pattern", "n"), CASES)
def test_attention_over_it(pattern: BigBird, n: int, backend: str) -> None:
    if reason := dispatch.backends[backend].available():
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, n, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    pull = torch.randn(1, n, 2, 8, generator=generator)
    seen = by_the_paper(pattern, n)
    out, wanted = attention(q, k, v, pattern=pattern, backend=backend), dense(q, k, v, seen)
    assert_close(out, wanted)
    for ours, theirs in zip(*(torch.autograd.grad((y * pull).sum(), (q, k, v)) for y in (out, wanted)), strict=True):
        assert_close(ours, theirs, 2e-5)

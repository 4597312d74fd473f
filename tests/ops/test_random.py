"""The counter-based dropout mask: any tile on its own, the right share, nothing shared between seeds or heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.ops.random import keep_mask

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=4, max_size=4), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_tile_equals_its_part_of_the_whole(tile: list[tuple[int, int]], seed: int) -> None:
    whole = keep_mask(seed, (7, 7, 7, 7), 0.4, CPU)
    origin, shape = [first for first, _ in tile], [size for _, size in tile]
    part = whole[tuple(slice(first, first + size) for first, size in tile)]
    assert torch.equal(keep_mask(seed, shape, 0.4, CPU, origin=origin), part)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_share(rate: float) -> None:
    mask = keep_mask(3, (4, 4, 128, 128), rate, CPU).double()
    sigma = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - (1 - rate)) < 5 * sigma
    for dim in range(4):
        line = mask.mean([d for d in range(4) if d != dim])
        assert float((line - (1 - rate)).abs().max()) < 6 * (rate * (1 - rate) * len(line) / mask.numel()) ** 0.5


def test_independence() -> None:
    """Neighbouring seeds, rows, heads, queries and keys agree as often as coins do."""
    mask = keep_mask(0, (4, 4, 64, 64), 0.5, CPU)
    pairs = [(mask, keep_mask(seed, (4, 4, 64, 64), 0.5, CPU)) for seed in (1, 2, 2**31)]
    pairs += [(mask.narrow(d, 0, mask.shape[d] - 1), mask.narrow(d, 1, mask.shape[d] - 1)) for d in range(4)]
    pairs += [(mask, mask.transpose(0, 1)), (mask, mask.transpose(2, 3))]
    for i, (left, right) in enumerate(pairs):
        agree = float((left == right).double().mean())
        diagonal = 1 / left.shape[0] if i == len(pairs) - 2 else 1 / 64 if i == len(pairs) - 1 else 0
        assert abs(agree - (diagonal + (1 - diagonal) / 2)) < 5 * 0.5 / left.numel() ** 0.5 * 2**0.5, i
    assert torch.equal(mask, keep_mask(0, (4, 4, 64, 64), 0.5, CPU)), "a pure function"


def test_the_ends() -> None:
    assert keep_mask(0, (2, 2, 8, 8), 0.0, CPU).all()

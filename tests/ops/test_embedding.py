"""The rows' gradient goes into that of a tied head: equal to PyTorch's sum, in the head's own tensor, rounded once."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.ops.embedding import embedding
from phylon.ops.loss import linear_cross_entropy

IDS = torch.tensor([[3, 1, 3, 0], [6, 3, 1, 1]])


def pytorchs(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.embedding(ids, weight), weight


def gradient(look, dtype: torch.dtype, tied: bool) -> Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 5).to(dtype))
    x, table = look(IDS, weight)
    loss = linear_cross_entropy(x.tanh(), table, IDS).sum if tied else x.tanh().square().sum()
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_is_pytorchs(dtype: torch.dtype, tied: bool) -> None:
    ours, theirs = gradient(embedding, dtype, tied), gradient(pytorchs, dtype, tied)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours, gradient(embedding, dtype, tied)), "the order of sums is fixed"


class Head(torch.autograd.Function):
    """A head whose gradient of the table is zero, in memory that ``places`` records."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, places: list[int]) -> Tensor:
        ctx.shape, ctx.like, ctx.places = x.shape, weight.detach(), places
        return x.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        made = torch.zeros_like(ctx.like)
        ctx.places.append(made.data_ptr())
        return grad.expand(ctx.shape), made, None


def test_rows_go_into_the_heads_own_gradient() -> None:
    places: list[int] = []
    weight = nn.Parameter(torch.randn(7, 5))
    Head.apply(*embedding(IDS, weight), places).backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == places[0]
    assert weight.grad[:, 0].tolist() == [1, 3, 0, 3, 0, 0, 1]


def two_looks(look, weight: Tensor) -> Tensor:
    """A loss of an encoder-decoder whose one table is read twice and scores at the end."""
    source, table = look(IDS[:, :2], weight)
    x, table = look(IDS, table)
    if look is embedding and weight.device.type == "cpu":
        assert table is not weight
    return linear_cross_entropy(x.tanh() + source.sin().sum(1, keepdim=True), table, IDS).sum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_table_that_is_read_twice_has_one_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5).to(dtype)
    found = []
    for look in (embedding, pytorchs):
        leaf = nn.Parameter(weight.clone())
        two_looks(look, leaf).backward()
        found.append(leaf.grad)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    places: list[int] = []
    leaf = nn.Parameter(weight.clone())
    source, table = embedding(IDS[:1], leaf)
    x, table = embedding(IDS, table)
    (Head.apply(x, table, places) + source.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == places[0], "all rows are in the head's own gradient"
    assert leaf.grad[:, 0].tolist() == [2, 4, 0, 5, 0, 0, 1]


def test_parts_of_a_table_that_is_read_twice_may_be_missing() -> None:
    leaf = nn.Parameter(torch.randn(7, 5))
    source, table = embedding(IDS[:1], leaf)
    x, table = embedding(IDS, table)
    for loss, counts in ((source, [1, 1, 0, 2, 0, 0, 0]), (x, [1, 3, 0, 3, 0, 0, 1]), (source.sum() + x, None)):
        (grad,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
        if counts is not None:
            assert grad[:, 0].tolist() == counts
    (grad,) = torch.autograd.grad(table.sum(), leaf)
    assert torch.equal(grad, torch.ones_like(leaf))


def test_a_sum_in_bf16_is_rounded_once() -> None:
    weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    Head.apply(*embedding(torch.zeros(1000, dtype=torch.int64), weight), []).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1000.0], [0.0]], "ones added up in bf16 stop at 256"


def test_gradients_that_come_alone_twice_or_never() -> None:
    weight = nn.Parameter(torch.randn(7, 5))
    for _ in range(2):
        (embedding(IDS, weight)[0].sum() + embedding(IDS[:1], weight)[0].sum()).backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [4, 8, 0, 10, 0, 0, 2]
    x, table = embedding(IDS, weight)
    first, second = (torch.autograd.grad(Head.apply(x, table, []), weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (of_table,) = torch.autograd.grad(embedding(IDS, weight)[1].sum(), weight)
    assert torch.equal(of_table, torch.ones_like(weight))
    nothing = nn.Parameter(torch.randn(7, 5))
    Head.apply(*embedding(IDS[:0], nothing), []).backward()
    assert nothing.grad is not None
    assert not nothing.grad.any()
    assert torch.equal(copy.deepcopy(weight), weight)
    weight.requires_grad_(False)
    x, table = embedding(IDS, weight)
    assert table is weight
    assert not x.requires_grad


def test_second_derivatives_and_function_transforms_are_pytorchs() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5, dtype=torch.float64)

    def value(look, weight: Tensor) -> Tensor:
        x, table = look(IDS, weight)
        return (x @ table.T).pow(3).sum() + x.pow(3).sum()

    def second(look) -> Tensor:
        leaf = nn.Parameter(weight)
        (first,) = torch.autograd.grad(value(look, leaf), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch.testing.assert_close(second(embedding), second(pytorchs))

    def chained(look) -> Tensor:
        leaf = nn.Parameter(weight)
        source, table = look(IDS[:1], leaf)
        x, table = look(IDS, table)
        loss = (x @ table.T).pow(3).sum() + (source.pow(2).sum() * x).pow(2).sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch.testing.assert_close(chained(embedding), chained(pytorchs))
    looks = (embedding, pytorchs)
    ours, theirs = (torch.func.grad(lambda given, look=look: value(look, given))(weight) for look in looks)
    torch.testing.assert_close(ours, theirs)
    per_row = torch.func.vmap(torch.func.grad(lambda given, ids: embedding(ids, given)[0].sum()), in_dims=(None, 0))
    assert per_row(weight, IDS)[:, :, 0].tolist() == [[1, 1, 0, 2, 0, 0, 0], [0, 2, 0, 1, 0, 0, 1]]

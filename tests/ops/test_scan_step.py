"""One token through the middle of a Mamba block in one call: against the ops it is made of; where it steps aside."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from helpers import Made
from phylon.families.mamba import mamba_spec
from phylon.model import build
from phylon.ops.native import ready
from phylon.ops.scan import StepCall, mamba_step, native, step_dispatch
from phylon.spec import UserError

pytestmark = pytest.mark.skipif(native.LIBRARY.reason() is not None, reason=f"native: {native.LIBRARY.reason()}")


def call(
    batch: int, width: int, size: int, rank: int, reach: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> StepCall:
    g = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    return StepCall(
        x=draw(batch, 1, width),
        z=draw(batch, 1, width),
        conv_weight=draw(width, reach),
        conv_bias=draw(width) if bias else None,
        x_proj=draw(rank + 2 * size, width) / width**0.5,
        dt_proj=draw(width, rank),
        dt_bias=draw(width),
        A_log=draw(width, size),
        D=draw(width),
        tail=draw(batch, reach - 1, width),
        state=draw(batch, width, size).to(wide),
        new_tail=torch.empty(batch, reach - 1, width, dtype=dtype),
        new_state=torch.empty(batch, width, size, dtype=wide),
    )


@pytest.mark.parametrize("sizes", [(1, 64, 16, 4, 4), (3, 37, 5, 3, 2), (2, 16, 1, 1, 1), (1, 130, 64, 9, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_it_equals_its_ops(sizes: tuple[int, int, int, int, int], bias: bool) -> None:
    one, other = call(*sizes, bias=bias), call(*sizes, bias=bias)
    got = (mamba_step(one, "native"), one.new_state, one.new_tail)
    wanted = (mamba_step(other, "reference"), other.new_state, other.new_tail)
    for a, b in zip(got, wanted, strict=True):
        assert not a.numel() or (a - b).abs().max() <= 2e-6 * b.abs().max()


@pytest.mark.parametrize("sizes", [(1, 64, 16, 4, 4), (3, 37, 5, 3, 2), (1, 130, 64, 9, 4)], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
@torch.no_grad()
def test_sixteen_bits_outside(sizes: tuple[int, int, int, int, int], mixed: bool) -> None:
    """fp32 inside: the output is rounded once, the state not at all; parameters may be wide, as under autocast."""
    made, exact = call(*sizes, dtype=torch.bfloat16), call(*sizes, dtype=torch.bfloat16)
    if mixed:
        for name in ("conv_weight", "x_proj", "dt_proj", "A_log", "tail", "new_tail"):
            setattr(made, name, getattr(made, name).float())
    for field in fields(StepCall):
        setattr(exact, field.name, getattr(exact, field.name).double())
    assert step_dispatch.pick(made).name == "native"
    composed = mamba_step(made, "reference")
    y, wanted = mamba_step(made), mamba_step(exact, "reference")
    assert (composed.double() - wanted).abs().max() <= 2**-5 * wanted.abs().max()
    assert (y.dtype, made.new_state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    assert (made.new_state - exact.new_state).abs().max() <= 2e-6 * exact.new_state.abs().max()
    assert torch.equal(made.new_tail.double(), exact.new_tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_it_makes_its_output_and_nothing_else(dtype: torch.dtype) -> None:
    given = call(2, 64, 16, 4, 4, dtype=dtype)
    with Made() as made:
        y = mamba_step(given)
    assert made.sizes == [y.numel() * y.element_size()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_its_ops_make_nothing_of_the_states_size(dtype: torch.dtype) -> None:
    """Where the kernel steps aside, be it for a dtype, a device or a missing compiler."""
    given = call(1, 64, 64, 4, 4, dtype=dtype)
    with ready.without(), Made() as made:
        y = mamba_step(given, "reference")
    assert max(made.sizes) < given.state.untyped_storage().nbytes() / 4
    exact = call(1, 64, 64, 4, 4, dtype=dtype)
    for field in fields(StepCall):
        setattr(exact, field.name, getattr(exact, field.name).double())
    wanted = mamba_step(exact, "reference")
    torch.testing.assert_close(y.double(), wanted, rtol=0.1, atol=0.05 * float(wanted.abs().max()))


@torch.no_grad()
def test_what_it_cannot_do_is_named() -> None:
    made = call(1, 8, 2, 1, 4)
    made.x = made.x.half()
    assert step_dispatch.pick(made).name == "reference"
    with pytest.raises(UserError, match="contiguous float32"):
        mamba_step(made, "native")
    made = call(1, 8, 2, 1, 4)
    made.new_state = made.new_state.bfloat16()
    with pytest.raises(UserError, match="keeps the state in float32"):
        mamba_step(made, "native")
    made = call(1, 8, 2, 1, 4)
    made.x.requires_grad_()
    with torch.enable_grad(), pytest.raises(UserError, match="no backward pass"):
        mamba_step(made, "native")


def test_tokens_one_by_one_equal_the_whole_and_a_failed_pass_leaves_the_state() -> None:
    model = build(mamba_spec(d_model=48, n_layers=2, vocab_size=64, dt_min=0.2, dt_max=2.0), seed=0).eval()
    tokens = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0))
    whole, state = model(tokens).logits.detach(), model.new_state(3)
    steps = []
    for t in range(12):
        if t == 5:
            before = [x.clone() for part in state.parts.values() for x in part.tensors]
            hook = model.heads["lm"].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens[:, t : t + 1], state=state)
            hook.remove()
            after = [x for part in state.parts.values() for x in part.tensors]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        steps.append(model(tokens[:, t : t + 1], state=state).logits)
    assert (torch.cat(steps, 1) - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert (whole[:, -1] - model(tokens[:, -1:]).logits[:, -1]).abs().max() > 1e-2, "the past counts"

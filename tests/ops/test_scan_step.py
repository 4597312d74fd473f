"""One token through the middle of a Mamba block in one call: against the ops it is made of; where it steps aside."""

import pytest
import torch
from torch import Tensor

from phylon.families.mamba import mamba_spec
from phylon.model import build
from phylon.ops.scan import StepCall, mamba_step, native, step_dispatch
from phylon.spec import UserError

pytestmark = pytest.mark.skipif(native.LIBRARY.reason() is not None, reason=f"native: {native.LIBRARY.reason()}")


def call(batch: int, width: int, size: int, rank: int, reach: int, *, bias: bool = True) -> StepCall:
    g = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

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
        state=draw(batch, width, size),
        new_tail=torch.empty(batch, reach - 1, width),
        new_state=torch.empty(batch, width, size),
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


@torch.no_grad()
def test_what_it_cannot_do_is_named() -> None:
    made = call(1, 8, 2, 1, 4)
    made.x = made.x.bfloat16()
    assert step_dispatch.pick(made).name == "reference"
    with pytest.raises(UserError, match="contiguous float32"):
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

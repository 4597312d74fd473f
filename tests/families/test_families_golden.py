"""Golden logits: a seed means the same weights and the same scores in every family, release after release."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phylon.families import Family, families
from phylon.layers.inits import FanInInit
from phylon.model import Model, build

GOLDEN = Path(__file__).parents[1] / "golden" / "logits_families.json"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""In fp32, for products whose order of summation is the machine's; the logits are of the order of 1."""


def scores(model: Model) -> Tensor:
    """What the model says of a fixed input, last row: logits, else the first head's, else the hidden states."""
    stack, given = model.spec.last_stack, {}
    tokens = (7 * torch.arange(18).reshape(2, 9) + 3) % 17
    if model.encoder is not None and model.decoder is not None:
        given = {"source": (5 * torch.arange(14).reshape(2, 7) + 1) % 17}
    if not hasattr(stack.embed, "vocab_size"):
        tokens, height, width = None, *(stack.embed.patch_size * n for n in stack.embed.grid)
        shape = (2, stack.embed.n_channels, height, width)
        given = {"images": torch.linspace(-1, 1, shape[1] * height * width * 2).reshape(shape)}
    with torch.inference_mode():
        out = model(tokens, **given)
    first = next(iter(out.heads.values()), out.hidden)
    return (first if out.logits is None else out.logits).flatten(0, -2)[-1]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_golden_logits_of_every_family(family: Family, request: pytest.FixtureRequest) -> None:
    """The first five scores and the norm of all."""
    model = build(family.cases()[0].replace(init=FanInInit(gain=2.0)), seed=0, device="cpu").eval()
    row = scores(model)
    found = [*row[:5].tolist(), float(row.norm())]
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--update-golden"):
        kept[family.name] = [float(f"{value:.7g}") for value in found]
        lines = ",\n".join(f'  "{name}": {json.dumps(kept[name])}' for name in sorted(kept))
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(kept[family.name]), **TOLERANCE)


def test_no_golden_is_left_over() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == sorted(family.name for family in families())

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


COUNTS = {
    "bert-base": 109_482_240,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-11b": 11_307_321_344,
    "vit-b16": 86_567_656,
    "vit-h14": 632_045_800,
    "switch-base-8": 619_339_008,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "mamba-130m": 129_135_360,
    "mamba-2.8b": 2_768_345_600,
    "gpt3-175b": 174_604_259_328,
    "smollm2-135m": 134_515_008,
}


def test_every_preset_has_a_golden_count() -> None:
    """Published ones above; that all of them are those of the built models is tested with the accounting."""
    golden = {name: count for f in families() for name, count in f.golden.items()}
    assert golden.items() >= COUNTS.items()
    assert set(golden) == {name for f in families() for name in f.presets}

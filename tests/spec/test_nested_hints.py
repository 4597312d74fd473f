"""An unknown field is answered with the nearest field of the very spec it stands in."""

import copy
from typing import Any

import pytest

from phylon.families import preset
from phylon.model import ModelSpec
from phylon.spec import UserError, from_data, to_data

PLACES = [
    ((), "encodr", "encoder", ""),
    (("decoder",), "d_modle", "d_model", "`$.decoder`"),
    (("decoder", "blocks", 0, "of", "sublayers", 1), "norm_ot", "norm_out", "`$.decoder.blocks[0].sublayers[1]`"),
    (("ties", 0), "nam", "name", "`$.ties[0]`"),
    (("decoder", "embed", "positions"), "max_len", "max_seq_len", "`$.decoder.embed.positions`"),
]


@pytest.mark.parametrize(("path", "wrong", "right", "where"), PLACES)
def test_nearest_field(path: tuple[Any, ...], wrong: str, right: str, where: str) -> None:
    data = copy.deepcopy(to_data(preset("gpt2")))
    node: Any = data
    for step in path:
        node = node[step]
    node[wrong] = 1
    with pytest.raises(UserError) as caught:
        from_data(ModelSpec, data)
    assert f"unknown field '{wrong}' (did you mean '{right}'?)" in str(caught.value)
    assert where in str(caught.value)


def test_nested_repeats_cannot_explode() -> None:
    data: Any = {"kind": "causal"}
    for _ in range(4):
        data = [{"repeat": 10_000, "of": data}]
    with pytest.raises(UserError, match="more than 1000000 parts"):
        from_data(ModelSpec, {"decoder": data})

"""Golden loss curves: ten steps of two tiny recipes, which change only on purpose."""

import json
from pathlib import Path

import pytest

from phylon.train import read_metrics, recipe_from_toml, train

GOLDEN = Path(__file__).parents[1] / "golden" / "loss_curves.json"
TOLERANCE = 1e-4
"""Relative, in fp32: the order of summation of a product is the machine's."""

RECIPE = """
schema = 1
[model]
family = "{family}"
d_model = 16
n_layers = 2
n_heads = 2
max_seq_len = 16
[data]
source = {{ kind = "texts", texts = ["the cat sat on the mat. ", "a dog ran in the fog. "], repeat = 20 }}
tokenizer = {{ kind = "char" }}
seq_len = 16
held_out = 0.2
[optim]
lr = 1e-2
clip = 1.0
[run]
steps = 10
batch_size = 2
threads = 1
"""


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_golden_loss_curve(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = train(recipe_from_toml(RECIPE.format(family=family)), out=tmp_path / "run", device="cpu").out
    found = [record["loss"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "step"]
    assert len(found) == 10
    assert found[-1] < found[0]
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--update-golden"):
        kept[family] = [float(f"{loss:.7g}") for loss in found]
        lines = ",\n".join(f'  "{name}": {json.dumps(kept[name])}' for name in sorted(kept))
        GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    assert found == pytest.approx(kept[family], rel=TOLERANCE)

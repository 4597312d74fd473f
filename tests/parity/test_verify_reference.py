"""`verify` against `transformers`, every family: sound models agree everywhere, and a fault's component is named."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from phylon.checkpoint.verify import Cell, against
from phylon.cli.main import app
from phylon.families import families, family
from phylon.hub import load, save
from phylon.hub.reference import transformers_reference
from phylon.spec.errors import UserError

from .harness import drawn, edit_config

# What a format of the family cannot say, and what no reference computes.
NOT_SAID = {"mpt-2", "transformer2017-2", "vit-2"}
EXTRA = {"heads.mtp.logits"}
CASES = {
    f"{f.name}-{k}": spec
    for f in families()
    if f.hf is not None
    for k, spec in enumerate(f.cases())
    if f"{f.name}-{k}" not in NOT_SAID
}
HEADS = {
    "bert-nsp": family("bert").builder(d_model=24, n_layers=2, n_heads=3, vocab_size=37, heads=("nsp",)),
    "bert-choice": family("bert").builder(d_model=24, n_layers=2, n_heads=3, vocab_size=37, heads=("choice",)),
    "bert-bare": family("bert").builder(d_model=24, n_layers=2, n_heads=3, vocab_size=37),
    "vit-bare": family("vit").builder(d_model=24, n_layers=2, heads=("pooled",)),
}


NAMES = [
    name if name.endswith("-0") or name in HEADS else pytest.param(name, marks=pytest.mark.slow)
    for name in [*CASES, *HEADS]
]


def run(folder: Path, *args: str):
    done = CliRunner().invoke(app, ["verify", str(folder), "--json", *args])
    return done, json.loads(done.stdout)


def first(cells: list[Cell]) -> str:
    """The component that the leading cell names."""
    assert cells[0].name == "reference"
    return cells[0].reason.removeprefix("the first component that diverges is ")


@pytest.mark.parametrize("name", NAMES)
def test_every_component_agrees_and_a_fault_is_named(name, tmp_path):
    spec = CASES.get(name) or HEADS[name]
    save(drawn(spec), tmp_path / "a", format="hf")
    model, reference = load(tmp_path / "a", device="cpu"), transformers_reference(tmp_path / "a")
    cells = against(model, reference)
    assert all(cell.passed for cell in cells), cells
    compared = [c.name.removeprefix("reference:") for c in cells]
    wanted = [f"heads.{head}.logits" for head in spec.heads]
    for at, stack in model.spec.stacks.items():
        wanted += [f"{at}.embed.out", f"{at}.out"]
        for i, block in enumerate(stack.blocks):
            wanted += [f"{at}.blocks.{i}.resid_post", *(f"{at}.blocks.{i}.{op}.out" for op in block.ops())]
    assert sorted(compared) == sorted(set(wanted) - EXTRA)

    # One number of the last mixer or feed-forward network of the last stack.
    at, stack = list(model.spec.stacks.items())[-1]
    i = len(stack.blocks) - 1
    op = list(stack.blocks[i].ops())[-1]
    part = getattr(model.get_submodule(f"{at}.blocks.{i}"), op)
    with torch.no_grad():
        next(p for n, p in part.named_parameters() if "down_proj" in n or "out_proj" in n).view(-1)[:50] += 0.5
    assert first(against(model, reference)) == f"{at}.blocks.{i}.{op}.out"


FAULTS = {
    "an embedding": ("bert", "encoder.embed.tokens.weight", "encoder.embed.out"),
    "an encoder's mixer": ("t5", "encoder.blocks.1.attn.q_proj.weight", "encoder.blocks.1.attn.out"),
    "an encoder's ffn": ("t5", "encoder.blocks.0.ffn.up_proj.weight", "encoder.blocks.0.ffn.out"),
    "a final norm": ("vit", "encoder.norm_final.weight", "encoder.out"),
    "a shared bias": ("switch", "decoder.shared.rel_bias.weight", "decoder.blocks.0.attn.out"),
    "a cross mixer": (
        "transformer2017",
        "decoder.blocks.0.cross_attn.v_proj.weight",
        "decoder.blocks.0.cross_attn.out",
    ),
    "a norm behind the sum": ("roberta", "encoder.blocks.0.ffn_norm_out.weight", "encoder.blocks.0.resid_post"),
    "a state space": ("mamba", "decoder.blocks.1.mixer.A_log", "decoder.blocks.1.mixer.out"),
    "an expert": ("mixtral", "decoder.blocks.1.ffn.experts.up_proj.weight", "decoder.blocks.1.ffn.out"),
    "a head": ("distilbert", "heads.mlm.dense.weight", "heads.mlm.logits"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_weight_that_is_not_the_stored_one(name, tmp_path):
    kind, weight, component = FAULTS[name]
    save(drawn(family(kind).cases()[0]), tmp_path / "a", format="hf")
    model = load(tmp_path / "a", device="cpu")
    with torch.no_grad():
        model.get_parameter(weight).mul_(1.3)
    cells = against(model, transformers_reference(tmp_path / "a"))
    assert first(cells) == component


@pytest.mark.slow
def test_a_model_that_magnifies_rounding(tmp_path):
    """64 blocks of Mamba-2 drawn like this give logits that are off by a tenth in fp32, theirs as ours: no component
    is blamed for that, and one that is wrong still is."""
    case = family("mamba2").cases()[0]
    deep = case.replace(decoder=case.decoder.replace(blocks=case.decoder.blocks[:1] * 64))
    save(drawn(deep), tmp_path / "a", format="hf")
    model, reference = load(tmp_path / "a", device="cpu"), transformers_reference(tmp_path / "a")
    cells = against(model, reference)
    assert all(cell.passed for cell in cells), [cell for cell in cells if not cell.passed]
    assert len(cells) == 64 * 2 + 3
    rounded = [cell for cell in cells if cell.reason is not None]
    assert rounded[-1].name == "reference:heads.lm.logits"
    with torch.no_grad():
        model.get_parameter("decoder.blocks.20.mixer.A_log").mul_(1.3)
    cells = against(model, reference)
    assert first(cells) == "decoder.blocks.20.mixer.out"


CHANGED = {
    "eps": ("bert", {"layer_norm_eps": 0.5}, "encoder.embed.out"),
    "activation": ("roformer", {"hidden_act": "relu"}, "encoder.blocks.0.ffn.out"),
    "t5's activation": ("t5", {"feed_forward_proj": "gelu"}, "encoder.blocks.0.ffn.out"),
    "top-k": ("mixtral", {"num_experts_per_tok": 1}, "decoder.blocks.0.ffn.out"),
    "theta": ("llama", {"rope_theta": 77.0, "rope_parameters": None}, "decoder.blocks.0.attn.out"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_number_of_the_configuration(name, tmp_path):
    """Ours is loaded from one configuration, the reference from another."""
    kind, change, component = CHANGED[name]
    save(drawn(family(kind).cases()[0]), tmp_path / "a", format="hf")
    model = load(tmp_path / "a", device="cpu")
    edit_config(tmp_path / "a", change)
    assert first(against(model, transformers_reference(tmp_path / "a"))) == component


def test_the_command_compares_by_itself(tmp_path):
    folder = save(drawn(family("bert").cases()[0]), tmp_path / "a", format="hf")
    done, data = run(folder)
    assert done.exit_code == 0, data
    assert {c["name"] for c in data["cells"] if c["passed"]} >= {"batching", "reference:encoder.blocks.1.ffn.out"}
    done, data = run(folder, "--reference", "none")
    assert done.exit_code == 0
    assert not any(c["name"].startswith("reference") for c in data["cells"])


def test_a_value_that_differs_exits_with_1(tmp_path):
    """A file of the user's that calls the loaded model's own code, with one weight changed."""
    folder = save(drawn(family("vit").cases()[0]), tmp_path / "a", format="hf")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import phylon, torch\n"
        "def reference(folder):\n"
        "    model = phylon.load(folder, device='cpu')\n"
        "    with torch.no_grad():\n"
        "        model.heads['class'].proj.bias += 1\n"
        "    return lambda images: {'heads.class.logits': model(images=images).logits}\n"
    )
    done, data = run(folder, "--reference", str(mine))
    assert done.exit_code == 1
    failing = [c["name"] for c in data["cells"] if c["passed"] is False]
    assert failing == [
        "reference",
        "reference:heads.class.logits",
        "reference_other_size",
        "reference_other_size:heads.class.logits",
    ]


def test_without_the_test_extra(tmp_path, monkeypatch):
    """One line where it is asked for by name, one cell that does not apply where it is not."""
    folder = save(drawn(family("gpt2").cases()[0]), tmp_path / "a", format="hf")
    monkeypatch.setattr("phylon.hub.reference.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["verify", str(folder), "--reference", "transformers"])
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == (
        "the package transformers is not installed; it comes with the test extra: pip install phylon[test]"
    )
    done, data = run(folder)
    assert done.exit_code == 0
    said = [(c["passed"], c["reason"]) for c in data["cells"] if c["name"] == "reference"]
    assert [passed for passed, _ in said] == [None]
    assert "pip install phylon[test]" in said[0][1]


def test_what_the_reference_cannot_tell(tmp_path):
    native = save(drawn(family("gpt2").cases()[0]), tmp_path / "native")
    with pytest.raises(UserError, match="is none"):
        transformers_reference(native)
    mpt = save(drawn(family("mpt").builder(d_model=24, n_heads=3, alibi_bias_max=16)), tmp_path / "mpt", format="hf")
    with pytest.raises(UserError, match="alibi_bias_max"):
        transformers_reference(mpt)
    (save(drawn(family("gpt2").cases()[0]), tmp_path / "b", format="hf") / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError):
        transformers_reference(tmp_path / "b")

"""Files of several dtypes load without rounding anything, and are given back as they were."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phylon.families import family
from phylon.hub import load, save, save_gguf
from phylon.model import build

from .hub_data import made


def test_norms_of_a_half_precision_gguf_stay_exact(tmp_path):
    """Matrices F16, vectors F32, as GGUF writers leave them: fp32 holds both."""
    model = made()
    save_gguf(model, tmp_path / "half.gguf", quant="F16")
    back = load(tmp_path / "half.gguf", device="cpu")
    assert back.dtype == torch.float32
    for name, parameter in model.named_parameters():
        expected = parameter.half().float() if parameter.ndim > 1 else parameter
        assert torch.equal(dict(back.named_parameters())[name], expected), name


MIXED = {
    "t5: fp32 wo in an fp16 file": ("t5", torch.float16, ("wo.weight",), "float16"),
    "mamba: fp32 A and D": ("mamba", torch.bfloat16, ("A_log", "mixer.D"), "bfloat16"),
    "falcon: fp32 fused maps": ("falcon", torch.float16, ("query_key_value",), "float16"),
    # The stack as a whole is in the wider one.
    "mixtral: one expert": ("mixtral", torch.bfloat16, ("experts.1.",), "float32"),
    "deepseek: a routing bias beside bf16": ("deepseek", torch.bfloat16, ("e_score_correction_bias",), "bfloat16"),
    "roformer: a computed table too": ("roformer", torch.bfloat16, ("LayerNorm",), "bfloat16"),
    "bert: one dtype": ("bert", torch.bfloat16, (), "bfloat16"),
}


def stored(name: str, folder: Path) -> Path:
    """A folder of a family whose tensors are of ``low``, those named aside."""
    kind, low, wide, _ = MIXED[name]
    save(build(family(kind).cases()[0], device="cpu"), folder, format="hf")
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t if any(part in n for part in wide) else t.to(low) for n, t in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def same(a: Path, b: Path) -> None:
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", MIXED)
def test_every_tensor_is_given_back_as_it_was_stored(name, tmp_path):
    model = load(stored(name, tmp_path / "a"), device="cpu")
    save(model, tmp_path / "b", format="hf")
    same(tmp_path / "a", tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == MIXED[name][3]
    # Case 13: what the checkpoint holds and what the parameters are stay two things, both true.
    again = load(tmp_path / "b", device="cpu")
    assert (again.stored_dtype, again.dtype) == (model.stored_dtype, model.dtype)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", [name for name in MIXED if "expert" not in name and "table" not in name])
def test_through_the_native_format(name, tmp_path):
    """Names of the family are lost there, so what is stored apart only in part comes back in the wider dtype."""
    save(load(stored(name, tmp_path / "a"), device="cpu"), tmp_path / "native")
    save(load(tmp_path / "native", device="cpu"), tmp_path / "b", format="hf")
    same(tmp_path / "a", tmp_path / "b")


def test_what_was_cast_or_changed_since_stays_as_it_is(tmp_path):
    name = "t5: fp32 wo in an fp16 file"
    folder = stored(name, tmp_path / "a")
    save(load(folder, device="cpu", dtype="float32"), tmp_path / "asked", format="hf")
    assert {t.dtype for t in load_file(tmp_path / "asked/model.safetensors").values()} == {torch.float32}
    save(load(folder, device="cpu").to(torch.bfloat16), tmp_path / "cast", format="hf")
    assert {t.dtype for t in load_file(tmp_path / "cast/model.safetensors").values()} == {torch.bfloat16}
    model = load(folder, device="cpu")
    with torch.no_grad():
        model.encoder.blocks[0].attn.q_proj.weight[0, 0] += 2**-20
    save(model, tmp_path / "trained", format="hf")
    kinds = {n: t.dtype for n, t in load_file(tmp_path / "trained/model.safetensors").items()}
    changed = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert kinds[changed] == torch.float32
    assert kinds[changed.replace("q.w", "k.w")] == torch.float16
    assert torch.equal(
        load(tmp_path / "trained", device="cpu").encoder.blocks[0].attn.q_proj.weight,
        model.encoder.blocks[0].attn.q_proj.weight,
    )

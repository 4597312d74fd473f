"""Saving and loading in every format: bit for bit, whole or not at all."""

import json
import resource
import shutil
import sys

import gguf
import pytest
import torch

from phylon.checkpoint import open_gguf, open_safetensors
from phylon.families import families
from phylon.families.decoder import llama_spec
from phylon.hub import load, save
from phylon.hub.save import save_gguf
from phylon.layers.mixers.attention import Attention
from phylon.layers.positions.rotary import (
    DynamicNTKScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    YarnScaling,
)
from phylon.patterns import Window
from phylon.spec.errors import UserError
from phylon.text import load_tokenizer

from .hub_data import GPT2, TINY, bits, logits, made, one_line, shared

SPECS = {f"{f.name}-{i}": spec for f in families() for i, spec in enumerate(f.cases())}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native(name, dtype, tmp_path):
    """Case 13: stored, parameter and compute dtype are what the file says, until asked otherwise."""
    model = made(SPECS[name], dtype)
    save(model, tmp_path / "a")
    back = load(tmp_path / "a", device="cpu")
    assert back.spec == model.spec
    assert back.generation == model.generation
    assert bits(back) == bits(model)
    assert torch.equal(logits(back), logits(model))
    assert not back.training
    stored = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    fp32_beside = f"{stored}+F32"  # a router's selection bias
    assert back.stored_dtype in (stored, fp32_beside)
    cast = load(tmp_path / "a", dtype="float16", device="cpu")
    assert (cast.stored_dtype, cast.dtype) == (back.stored_dtype, torch.float16)
    if name.startswith("mamba-"):
        # Its residual reaches 75,000 with these weights (case 7: refused, not clamped).
        with pytest.raises(UserError, match="overflow float16"):
            logits(cast)
    else:
        assert logits(cast).dtype == torch.float16
    # What is fp32 whatever the model's dtype (a router's selection bias) is a buffer, and is not cast.
    learned, whole = dict(model.named_parameters()), bits(cast)
    assert {n: b for n, b in whole.items() if n in learned} == {
        n: b for n, b in bits(model.half()).items() if n in learned
    }


def test_tokenizer_and_defaults_travel(tmp_path, real_tokenizer):
    text = "Hello, world!  déjà 12345 <|im_start|>"
    model = made(llama_spec(d_model=16, n_layers=1, n_heads=2, vocab_size=49152, d_ff=16, max_seq_len=64))
    model.tokenizer = real_tokenizer
    ids = real_tokenizer.encode(text)
    save(model, tmp_path / "native")
    save(model, tmp_path / "hf", format="hf")
    save_gguf(model, tmp_path / "a.gguf")
    for path in ("native", "hf", "a.gguf"):
        back = load(tmp_path / path, device="cpu")
        assert back.tokenizer.encode(text) == ids
        assert back.tokenizer.decode(ids) == real_tokenizer.decode(ids)
        assert bits(back) == bits(model)
    assert load(tmp_path / "native").generation == load(tmp_path / "hf").generation == model.generation


@pytest.fixture(scope="module")
def real_tokenizer(tmp_path_factory):
    import gzip

    packed = shared("tokenizers/smollm2-tokenizer.json.gz")
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["hf", "native"])
def test_shards(kind, tmp_path, monkeypatch):
    model = made()
    save(model, tmp_path / "one", format=kind)
    monkeypatch.setattr(sys.modules[save.__module__], "_SHARD_BYTES", 20_000)
    save(model, tmp_path / "many", format=kind)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    assert bits(load(tmp_path / "many")) == bits(load(tmp_path / "one")) == bits(model)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == open_safetensors(tmp_path / "one").tensors.keys()


def test_older_tokenizer_files(tmp_path):
    """GPT-2's two files, a SentencePiece model and BERT's list beside the weights."""
    import gzip

    model = made()
    save(model, tmp_path / "a", format="hf")
    shutil.copy(shared("tokenizers/mistral-v1-spm.model"), tmp_path / "a" / "tokenizer.model")
    assert load(tmp_path / "a").tokenizer.decode(load(tmp_path / "a").tokenizer.encode("é hello")).strip() == "é hello"
    save(made(GPT2), tmp_path / "b", format="hf")
    for name, plain in (("gpt2-encoder.json.gz", "vocab.json"), ("gpt2-vocab.bpe.gz", "merges.txt")):
        (tmp_path / "b" / plain).write_bytes(gzip.decompress(shared(f"tokenizers/{name}").read_bytes()))
    assert load(tmp_path / "b").tokenizer.encode("hello world") == [31373, 995]


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_both_ways(quant, tmp_path):
    model = made()
    save_gguf(model, tmp_path / "a.gguf", quant=quant)
    back = load(tmp_path / "a.gguf", device="cpu", dtype="float32")
    assert back.spec.replace(init=TINY.init) == TINY
    bound = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}.get(quant, 0.3)
    mine, theirs = model.state_dict(), back.state_dict()
    for name, tensor in mine.items():
        assert float((theirs[name] - tensor).abs().max()) <= bound * float(tensor.abs().max()), name
    # A written file loads equal: once quantised, a second trip changes nothing that the first did not.
    save_gguf(back, tmp_path / "b.gguf", quant="F32")
    assert bits(load(tmp_path / "b.gguf", device="cpu")) == bits(back)
    assert torch.equal(logits(load(tmp_path / "b.gguf", device="cpu")), logits(back))
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.get_field("general.architecture").contents() == "llama"
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert stored["blk.0.attn_q.weight"].tensor_type.name == quant
    up = gguf.dequantize(stored["blk.1.ffn_up.weight"].data, stored["blk.1.ffn_up.weight"].tensor_type)
    assert torch.equal(torch.tensor(up), theirs["decoder.blocks.1.ffn.up_proj.weight"])
    # q is permuted in the file: neighbouring rows are a rotary pair.
    q = gguf.dequantize(stored["blk.0.attn_q.weight"].data, stored["blk.0.attn_q.weight"].tensor_type)
    ours = theirs["decoder.blocks.0.attn.q_proj.weight"]
    assert torch.equal(torch.tensor(q[1]), ours[4])


SCALINGS = {
    "none": None,
    "linear": LinearScaling(factor=2.5),
    "yarn": YarnScaling(factor=4.0, original_max_seq_len=16),
    "llama3": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32),
    "factors": FrequencyFactors(factors=(1.0, 1.5, 2.0, 8.0)),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dim", [None, 8])
def test_gguf_rope(name, dim, tmp_path):
    if dim is not None and name == "factors":
        dim = 8
    rotary = Rotary(theta=1e4, scaling=SCALINGS[name], dim=dim)
    spec = llama_spec(
        d_model=32, n_layers=1, n_heads=2, head_dim=8 if dim is None else 12, vocab_size=40, d_ff=32, rotary=rotary
    )
    model = made(spec)
    save_gguf(model, tmp_path / "a.gguf")
    back = load(tmp_path / "a.gguf", device="cpu")
    assert ("rope_freqs.weight" in open_gguf(tmp_path / "a.gguf").tensors) == (name in ("llama3", "factors"))
    mine, theirs = (m.spec.last_stack.blocks[0].op("attn") for m in (model, back))
    assert isinstance(mine, Attention)
    assert isinstance(theirs, Attention)
    (a, factor), (b, other) = mine.rotary.frequencies(mine.head_dim), theirs.rotary.frequencies(theirs.head_dim)
    assert torch.allclose(a, b, rtol=1e-6)
    assert factor == other
    x, y = logits(model), logits(back)
    assert float((x - y).abs().max()) <= 1e-5 * float(x.abs().max())
    plain, _ = rotary.replace(scaling=None).frequencies(mine.head_dim)
    assert name == "none" or not torch.allclose(a, plain), "control: the scaling changes the frequencies"


UNSAYABLE = {
    "window": llama_spec(d_model=32, n_layers=1, n_heads=4, vocab_size=40, pattern=Window(size=4)),
    "gelu": llama_spec(d_model=32, n_layers=1, n_heads=4, vocab_size=40, activation="gelu"),
    "dynamic": llama_spec(
        d_model=32,
        n_layers=1,
        n_heads=4,
        vocab_size=40,
        rotary=Rotary(scaling=DynamicNTKScaling(factor=2.0, original_max_seq_len=16, seq_len=32)),
    ),
    "yarn constants": llama_spec(
        d_model=32,
        n_layers=1,
        n_heads=4,
        vocab_size=40,
        rotary=Rotary(scaling=YarnScaling(factor=2.0, original_max_seq_len=16, beta_fast=8.0)),
    ),
    "gpt2": GPT2,
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_gguf_cannot_say_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="gguf format says this model") as error:
        save_gguf(made(UNSAYABLE[name]), tmp_path / "a.gguf")
    one_line(error)
    assert not list(tmp_path.iterdir())


def _different_blocks():
    first = TINY.last_stack.blocks[0]
    attention = first.op("attn")
    assert isinstance(attention, Attention)
    changed = first.replace(
        sublayers=(
            first.sublayers[0].replace(
                branches=(first.sublayers[0].branches[0].replace(op=attention.replace(softcap=3.0)),)
            ),
            first.sublayers[1],
        )
    )
    return TINY.replace(decoder=TINY.decoder.replace(blocks=(first, changed)))


def test_what_no_family_says_is_refused(tmp_path):
    """A spec that a configuration would lose is never written; the native format says everything."""
    odd = _different_blocks()
    for attempt in (
        lambda: save(made(odd), tmp_path / "a", format="hf"),
        lambda: save_gguf(made(odd), tmp_path / "a.gguf"),
    ):
        with pytest.raises(UserError, match="save it as native") as error:
            attempt()
        one_line(error)
    save(made(odd), tmp_path / "native")
    assert load(tmp_path / "native").spec == odd
    with pytest.raises(UserError, match="unknown format 'safetensors'"):
        save(made(), tmp_path / "b", format="safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["native"]


def test_an_existing_target_is_kept(tmp_path):
    save(made(), tmp_path / "a")
    before = bits(load(tmp_path / "a"))
    with pytest.raises(UserError, match="exists and is not empty"):
        save(made(GPT2), tmp_path / "a")
    assert bits(load(tmp_path / "a")) == before
    save(made(GPT2), tmp_path / "a", replace=True)
    assert load(tmp_path / "a").spec == GPT2
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="exists"):
        save(made(), tmp_path / "file")
    with pytest.raises(UserError, match="exists"):
        save_gguf(made(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    save(made(), tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "file"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("kind", ["native", "hf", "gguf"])
def test_a_full_disk_leaves_nothing_and_keeps_the_old(kind, tmp_path):
    def attempt(replace):
        target = tmp_path / ("a.gguf" if kind == "gguf" else "a")
        if kind == "gguf":
            return save_gguf(made(), target, replace=replace)
        return save(made(), target, format=kind, replace=replace)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for replace in (False, True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        try:
            with pytest.raises(UserError, match=r"File too large|file too large|disk is full") as error:
                attempt(replace)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ".tmp" not in one_line(error)
        if not replace:
            assert not list(tmp_path.iterdir())
            attempt(False)
    assert len(list(tmp_path.iterdir())) == 1
    assert bits(load(next(tmp_path.iterdir()))) == bits(made())


def test_a_rename_that_fails_keeps_the_old(tmp_path, monkeypatch):
    from pathlib import Path

    save(made(), tmp_path / "a")
    plain = Path.rename

    def refuses(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(13, "Permission denied")
        return plain(self, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(UserError, match="permission denied"):
        save(made(GPT2), tmp_path / "a", replace=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load(tmp_path / "a").spec == TINY


def test_no_permission(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save to"):
        save(made(), tmp_path / "file" / "below")

"""What is wrong with a checkpoint is said in one line, before anything is allocated, run or half-read."""

import json
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch

import phylon
from phylon.checkpoint import open_gguf, open_safetensors, write_gguf, write_safetensors
from phylon.cli.main import main
from phylon.families import families
from phylon.families.bert import bert_spec
from phylon.hub import load, save
from phylon.hub.save import save_gguf
from phylon.layers.heads.classify import Classify
from phylon.layers.heads.pools import First, Mean
from phylon.model import build
from phylon.spec.errors import UserError
from phylon.spec.serial import parse_toml

from .hub_data import GPT2, bits, hf_folder, logits, made, one_line


def refused(path, match: str) -> str:
    with pytest.raises(UserError, match=match) as error:
        load(path, device="cpu")
    return one_line(error)


def rewrite(folder: Path, change) -> Path:
    """The folder's tensors after ``change``, a function of a dict of them."""
    source = open_safetensors(folder)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    write_safetensors(folder / "model.safetensors", change(tensors) or tensors)
    return folder


@pytest.fixture
def folder(tmp_path):
    return hf_folder(tmp_path / "a")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_case_10_a_prefix_is_named(folder, prefix):
    rewrite(folder, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    assert f"every key is prefixed '{prefix}'" in refused(folder, "prefix")


def test_case_10_names_that_do_not_fit(folder):
    rewrite(folder, lambda t: {**t, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    refused(folder, r"1 unexpected \('model.layers.0.self_attn.q_norm.weight'\)")
    rewrite(folder, lambda t: {n: x for n, x in t.items() if "q_norm" not in n and "layers.1.mlp.up_proj" not in n})
    refused(folder, r"1 missing \('model.layers.1.mlp.up_proj.weight'\)")
    hf_folder(folder, intermediate_size=48)
    refused(folder, "of another shape")


def test_case_10_an_index_that_omits_tensors(folder, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules[save.__module__], "_SHARD_BYTES", 20_000)
    save(made(), folder, format="hf", replace=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    refused(folder, "omits 1 of")


def test_case_11_tied_weights(folder):
    """Either name is enough; both must be the same; two different tensors under a tied configuration are an error."""
    model, embedding = load(folder), "model.embed_tokens.weight"
    rewrite(folder, lambda t: {("lm_head.weight" if n == embedding else n): x for n, x in t.items()})
    assert bits(load(folder)) == bits(model)
    rewrite(folder, lambda t: {**t, embedding: t["lm_head.weight"].clone()})
    assert bits(load(folder)) == bits(model)
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + 1})
    refused(folder, "differ, but the model ties them")
    hf_folder(folder, tie_word_embeddings=False)
    untied = load(folder)
    assert not torch.equal(logits(untied), logits(model))
    assert untied.heads["lm"].proj.weight is not untied.decoder.embed.tokens.weight
    rewrite(folder, lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"})
    refused(folder, "1 missing .'lm_head.weight'")


def test_case_17_left_padding(tmp_path):
    model = load(hf_folder(tmp_path / "gpt2", GPT2))
    with torch.no_grad():
        alone = model(torch.tensor([[5, 6, 7]])).logits
        padded = model(torch.tensor([[9, 9, 5, 6, 7]]), segments=torch.tensor([[0, 0, 1, 1, 1]])).logits
    assert float((padded[:, 2:] - alone).abs().max()) <= 1e-5 * float(alone.abs().max())


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_case_36_pickles_are_not_opened(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    refused(folder, "is a pickle")
    refused(folder / name, "not a .gguf file")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    refused(folder, "not a safetensors file|truncated")
    assert not (tmp_path / "ran").exists()


def test_case_36_truncated_files(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules[save.__module__], "_SHARD_BYTES", 20_000)
    save(made(), tmp_path / "a", format="hf")
    shard = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(tmp_path / "a", f"{shard.name} is truncated")
    save_gguf(made(), tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:-1000])
    refused(tmp_path / "a.gguf", "truncated")


FOREIGN = {
    "auto_map": ({"auto_map": {"AutoModel": "evil.Model"}}, "code of its own"),
    "auto_map of strings": ({"auto_map": "evil.Model"}, "code of its own"),
    "quantization": ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
    "quantization of no kind": ({"quantization_config": "x"}, "quantised by 'unknown'"),
    "model_type": ({"model_type": "lama"}, "unknown model_type 'lama' .did you mean 'llama'"),
    "no model_type": ({"model_type": ...}, "names no model_type"),
    "model_type of no kind": ({"model_type": ["llama"]}, "names no model_type"),
    "unknown key": ({"residual_multiplier": 2.0}, "may change the maths: 'residual_multiplier'"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved"),
    "activation": ({"hidden_act": "sillu"}, "unknown activation 'sillu' .did you mean 'silu'"),
    "rope type": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "'rope_type' is 'longrope', which is not supported",
    ),
    "rope key": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 2}}, "'mscale'"),
    "huge": ({"hidden_size": 2**60}, "hidden_size"),
    "huge product": (
        {"hidden_size": 2**28, "num_attention_heads": 2**28, "head_dim": 2**28, "num_key_value_heads": 2**28},
        "cannot be built|impossible sizes|does not hold",
    ),
    "large": ({"vocab_size": 2**28, "hidden_size": 2**27}, "does not hold"),
    "many blocks": ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_configurations(folder, name):
    changes, match = FOREIGN[name]
    hf_folder(folder, **changes)
    refused(folder, match)


def test_a_large_gpt2_is_refused_before_its_row_tables(tmp_path):
    refused(hf_folder(tmp_path / "a", GPT2, n_embd=2**28, n_head=1, n_inner=8), "does not hold")


def test_family_of_another(folder, tmp_path):
    """A checkpoint of one family under another's configuration: both are named."""
    (folder / "config.json").write_text((hf_folder(tmp_path / "b", GPT2) / "config.json").read_text())
    refused(folder, "is of family 'gpt2', but its tensors are those of family 'llama'")


VALUES = (
    None,
    -1,
    0,
    1.5,
    3,
    "x",
    "",
    [],
    [1],
    {},
    True,
    2**40,
    2**70,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "…" * 5000,
)


def attempt(folder):
    """The model, or ``None`` where one line says why not."""
    text = ""
    try:
        return load(folder, device="cpu")
    except UserError as error:
        text = str(error)
    assert "\n" not in text
    assert len(text) < 1000, text[:200]
    return None


FAMILIES = {f.name: f for f in families() if f.hf is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_any_key(name, tmp_path):
    """Every key of a configuration with every kind of wrong value: a model, or one line."""
    spec = FAMILIES[name].cases()[0]
    folder = hf_folder(tmp_path / "a", spec)
    good = json.loads((folder / "config.json").read_text())
    loaded = 0
    for key in good:
        for value in VALUES:
            (folder / "config.json").write_text(json.dumps(good | {key: value}))
            loaded += attempt(folder) is not None
    assert loaded > len(good)


TABLES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "attention_factor": 1.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", TABLES)
def test_any_value_of_any_rope_key(kind, folder):
    """A table that loads also computes: no NaN, no division by zero in the first forward pass."""
    for key in ("rope_type", *TABLES[kind]):
        for value in VALUES:
            hf_folder(folder, rope_scaling={"rope_type": kind} | TABLES[kind] | {key: value})
            model = attempt(folder)
            assert model is None or torch.isfinite(logits(model)).all(), (kind, key, value)


@pytest.mark.parametrize("name", ["llama", "jamba", "deepseek"])
def test_more_blocks_than_tensors_are_refused_before_they_are_built(name, tmp_path, monkeypatch):
    folder = hf_folder(tmp_path / "a", FAMILIES[name].cases()[0], num_hidden_layers=4096)
    monkeypatch.setattr(sys.modules[load.__module__], "build_meta", lambda spec: pytest.fail("built"))
    refused(folder, "does not hold what its configuration says: 4096 blocks")


GENERATION = {
    "temperature": (math.nan, -1, math.inf, "x"),
    "top_p": (math.nan, 2),
    "top_k": (1.5, -3),
    "repetition_penalty": (math.nan, 0, "x"),
    "eos_token_id": (10**30, "x", [[1]], 1.5),
    "decoder_start_token_id": (10**30, [None]),
}


@pytest.mark.parametrize("key", GENERATION)
def test_senseless_generation_defaults(folder, key):
    """Whichever file says them; native folders keep the same defaults."""
    for value in GENERATION[key]:
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, key: value}))
        assert str(folder) in refused(folder, key.replace("_token_id", ""))
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": -1, "temperature": 0}))
    assert load(folder, device="cpu").generation.temperature is None
    save(made(), folder.with_name("native"))
    path = folder.with_name("native") / "phylon.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"generation": {"temperature": math.nan}}))
    refused(path.parent, "temperature")


HIDDEN = {
    "temperature": ("hot", True, -1, [1]),
    "top_k": (-3, True, 1.5, "x"),
    "top_p": (True, "x", 2),
    "min_p": (True, -0.5),
    "repetition_penalty": (True, "x"),
    "do_sample": ("yes", 1),
    "bos_token_id": (True, "x", {}),
    "eos_token_id": (True, "x", [1, "x"]),
    "pad_token_id": (True, 0.5),
    "decoder_start_token_id": (300,),
}


@pytest.mark.parametrize("key", HIDDEN)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_generation_defaults_are_refused_also_where_nothing_samples(folder, name, key):
    """By the file and the key, also where a later file says something else."""
    (folder / "generation_config.json").write_text(json.dumps({key: 1} if name == "config.json" else {}))
    good = json.loads((folder / name).read_text())
    assert good.get("vocab_size", 300) == 300
    for value in HIDDEN[key]:
        (folder / name).write_text(json.dumps(good | {key: value}))
        assert str(folder / name) in refused(folder, f"'{key}'")


def test_ids_that_say_that_there_is_none(folder):
    """Ids beyond the vocabulary: LLaMA 2's tokenizer pads with one, and small GPT-2s have the large ones' defaults."""
    said = {"pad_token_id": 300, "bos_token_id": -1, "eos_token_id": [1, -1, 300], "top_k": 0, "temperature": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(said))
    found = load(folder, device="cpu").generation
    assert (found.pad_id, found.bos_id, found.eos_ids, found.top_k) == (None, None, (1,), None)


def test_a_decoder_does_not_start_from_a_token_beyond_the_vocabulary(tmp_path):
    spec = FAMILIES["t5"].cases()[0]
    folder = hf_folder(tmp_path / "a", spec, pad_token_id=spec.last_stack.embed.vocab_size, decoder_start_token_id=...)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert str(folder / "config.json") in refused(folder, "'pad_token_id' is .* no token of a vocabulary")


def test_a_builders_refusal_names_the_file(tmp_path):
    folder = hf_folder(tmp_path / "a", FAMILIES["mixtral"].cases()[0], num_experts_per_tok=99)
    assert refused(folder, "top_k").startswith(str(folder / "config.json"))


def test_a_refusal_on_building_names_the_key(folder, monkeypatch):
    """What only the parts notice when they are put together names the file's key beside our argument."""

    def build_meta(spec):
        raise UserError("d_model 32 is no width for this")

    monkeypatch.setattr(sys.modules[load.__module__], "build_meta", build_meta)
    said = refused(folder, "from 'hidden_size'")
    assert said.startswith(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "phylon.json"])
def test_numbers_longer_than_python_reads(folder, name):
    """And not only in a configuration: wherever JSON is read."""
    (folder / name).write_text('{"version": ' + "1" * 5_000 + "}")
    assert refused(folder, "not JSON|not valid").count("digits") >= (name != "phylon.json")


def test_headers_with_numbers_longer_than_python_reads(folder):
    header = b'{"a": ' + b"1" * 5_000 + b"}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "the header is not valid JSON")
    with pytest.raises(UserError, match="not TOML"):
        parse_toml("schema = " + "1" * 5_000)


def test_config_files(folder, tmp_path):
    for text, match in (
        ("[" * 100_000, "not JSON"),
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("\udcff", "not JSON"),
        ('{"model_type": ' + '{"a":' * 5_000 + "1" + "}" * 5_001, "not JSON|names no model_type"),
    ):
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(folder, match)
    (folder / "config.json").unlink()
    refused(folder, "neither phylon.json nor config.json")
    refused(tmp_path / "nothing", "no model at")
    refused("smolm2", ".did you mean 'smollm2'")
    refused("gpt2", "preset without weights")
    (tmp_path / "x.gguf").write_bytes(b"")
    refused(tmp_path / "x.gguf", "empty")


def test_native_configurations(tmp_path):
    save(made(), tmp_path / "a")
    path = tmp_path / "a" / "phylon.json"
    good = json.loads(path.read_text())

    def changed(change) -> None:
        data = json.loads(json.dumps(good))
        change(data)
        path.write_text(json.dumps(data))

    changed(lambda data: data.update(schema=99))
    refused(tmp_path / "a", "schema")
    changed(lambda data: data["model"]["decoder"].update(d_modell=3))
    refused(tmp_path / "a", "d_modell")
    changed(lambda data: data["model"]["decoder"].update(d_model=-3))
    refused(tmp_path / "a", "d_model")
    changed(lambda data: data["model"]["decoder"].update(d_model=2**62))
    refused(tmp_path / "a", "cannot be built|impossible|does not hold")
    changed(lambda data: data.pop("model"))
    refused(tmp_path / "a", "phylon.json")
    changed(lambda data: data.update(model=[]))
    refused(tmp_path / "a", "phylon.json")
    changed(lambda data: data.update(extra=1))
    refused(tmp_path / "a", "extra")
    path.write_text("[" * 100_000)
    refused(tmp_path / "a", "not JSON")


GGUF_CHANGES = {
    "heads": (
        {f"llama.attention.{key}": 2**28 for key in ("head_count", "key_length", "value_length")},
        "cannot be built|impossible|does not hold",
    ),
    "no heads": ({"llama.attention.head_count": 0}, "head_count"),
    "text": ({"llama.embedding_length": "big"}, "embedding_length"),
    "blocks": ({"llama.block_count": 5_000_000}, "block_count"),
    "rotary": ({"llama.rope.dimension_count": 7}, "rotary dim"),
    "experts": ({"llama.expert_count": 8}, "expert_count"),
    "unknown": ({"llama.logit_scale": 3.0}, "logit_scale"),
    "architecture": ({"general.architecture": "lama"}, "unknown GGUF architecture 'lama' .did you mean 'llama'"),
    "vocabulary": ({"llama.vocab_size": 77}, "another shape"),
    "tokens": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "a"]},
        r"b\.gguf: GGUF vocabulary: a token stands there twice",
    ),
    "two scalings": ({"llama.rope.scaling.type": "longrope"}, "unknown rope scaling"),
}


@pytest.mark.parametrize("name", GGUF_CHANGES)
def test_gguf_metadata(name, tmp_path):
    save_gguf(made(), tmp_path / "a.gguf")
    source = open_gguf(tmp_path / "a.gguf")
    changes, match = GGUF_CHANGES[name]
    tensors = {key: source.read(key) for key in source.tensors}
    write_gguf(tmp_path / "b.gguf", dict(source.metadata) | changes, tensors)
    refused(tmp_path / "b.gguf", match)
    assert phylon.load(tmp_path / "a.gguf").spec.last_stack.d_model == 32


def test_what_is_not_applied_in_generation_is_told(folder, capfd):
    asked = {"num_beams": 4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]], "typical_p": 0.5, "min_length": 0}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model = load(folder, device="cpu")
    assert model.generation.not_applied == ("num_beams", "no_repeat_ngram_size", "bad_words_ids"), "nothing samples"
    assert main(["generate", str(folder), "--prompt-ids", "1 2", "--max-new-tokens", "2"]) == 0
    told = "note: num_beams, no_repeat_ngram_size, bad_words_ids of the model's own generation settings are not applied"
    assert told in capfd.readouterr().err
    assert load(save(model, folder.with_name("n")), device="cpu").generation == model.generation
    written = save(model, folder.with_name("again"), format="hf") / "generation_config.json"
    assert json.loads(written.read_text()) == asked
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load(folder, device="cpu").generation.not_applied == ()
    for key, value in {"bad_words_ids": 3, "suppress_tokens": "x", "num_beams": 0, "min_length": -1}.items():
        (folder / "generation_config.json").write_text(json.dumps({key: value}))
        assert "generation_config.json" in refused(folder, f"'{key}' must be")


def test_a_generation_file_alone_says_how_to_sample(folder):
    """As in the reference; special ids of the configuration hold where that file has none."""
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"eos_token_id": 3, "repetition_penalty": 2.0}))
    (folder / "generation_config.json").unlink()
    assert load(folder, device="cpu").generation.repetition_penalty == 2.0
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    found = load(folder, device="cpu").generation
    assert (found.repetition_penalty, found.eos_ids, found.bos_id) == (None, (3,), 1)


def test_a_head_that_their_format_lacks_is_refused_with_the_one_it_has(tmp_path):
    """Pooled by the mean, as text-classes and text-scores make it; with the head of the message it can be saved."""
    for n in (1, 3):
        spec = bert_spec(d_model=16, n_layers=1, n_heads=2, vocab_size=20, max_seq_len=8, heads=("class",), n_classes=n)
        model = build(spec.replace(heads={"class": Classify(n_classes=n, pool=Mean(), dropout=0.1)}), device="cpu")
        model.family = "bert"
        with pytest.raises(UserError) as error:
            save(model, tmp_path / "refused", format="hf")
        text = one_line(error)
        assert "bert's hf format has no place for heads.class.pool Mean: save it as native, or train it with" in text
        theirs = eval(text.partition("class = ")[2], {"Classify": Classify, "First": First})
        other = build(spec.replace(heads={"class": theirs}), device="cpu")
        other.family = "bert"
        assert load(save(other, tmp_path / str(n), format="hf"), device="cpu").spec.heads == {"class": theirs}

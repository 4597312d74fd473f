"""A checkpoint under another family's configuration, or under one that no family says."""

import json
import time

import pytest
import torch

from phylon.families import families
from phylon.families.base import hf_format
from phylon.families.lacking import _BY_NAME, lacking
from phylon.hub import load
from phylon.spec.errors import UserError

from .hub_data import GPT2, hf_folder, one_line

CASES = {f.name: f.cases()[0] for f in families() if f.hf is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder and ``config.json`` of every family's first case."""
    root = tmp_path_factory.mktemp("families")
    made = {name: hf_folder(root / name, spec) for name, spec in CASES.items()}
    return {name: (folder, (folder / "config.json").read_text()) for name, folder in made.items()}


@pytest.mark.parametrize("stored", CASES)
def test_tensors_of_one_family_under_the_configuration_of_another(stored, folders):
    """Both families are named, or the two say the same model."""
    folder, own = folders[stored]
    silent = []
    for said in CASES:
        if said == stored:
            continue
        (folder / "config.json").write_text(folders[said][1])
        try:
            load(folder, device="cpu")
        except UserError as error:
            text = str(error)
            assert "\n" not in text
            assert len(text) < 1000, text
            if "the model ties them" in text and (stored, said) in SAME_MODEL:
                continue
            if f"of family '{said}'" not in text or f"'{stored}'" not in text.split("of family")[-1]:
                silent.append((said, text))
        else:
            assert (stored, said) in SAME_MODEL, (stored, said)
    (folder / "config.json").write_text(own)
    load(folder, device="cpu")
    assert not silent


SAME_MODEL = {("llama", "mistral"), ("mistral", "llama")}


@pytest.mark.parametrize(
    ("model_type", "says"),
    {
        "qwen3_moe": "did you mean 'qwen3'.*norm_topk_prob",
        "rwkv": "its recurrence",
        "whisper": "audio frames",
        "llava": "images",
        "gpt_oss": "a learned sink",
        "phi3": "'longrope' scaling is no mechanism",
        "gemma2": "soft-capped scores",
        "clip": "two towers",
        "xlnet": "two streams",
        "qwen2": "did you mean 'qwen3'.*biases on q, k and v",
        "nobody_made_this": "no family file says it yet",
    }.items(),
)
def test_an_unknown_model_type(model_type, says, tmp_path):
    """What is known is listed, and what is missing is named where that is known."""
    hf_folder(tmp_path / "a", GPT2, model_type=model_type)
    with pytest.raises(UserError, match=f"unknown model_type '{model_type}'.*{says}") as error:
        load(tmp_path / "a", device="cpu")
    listed = one_line(error).split("(known: ")[1].rstrip(")").split(", ")
    assert listed == sorted({m for f in families() if f.hf is not None for m in f.hf.model_types})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vision_config": {"a": 1}}, "no family file says it yet; 'vision_config' means text beside images"),
        ({"pos_att_type": ["c2p"]}, "'pos_att_type' means disentangled attention, which is no mechanism here"),
        ({"embedding_size": 8, "hidden_size": 16}, "an embedding of another width"),
    ],
)
def test_keys_beside_an_unknown_model_type_say_what_is_missing(config, says):
    with pytest.raises(UserError, match=says):
        hf_format("nobody_made_this", config)
    assert lacking("nobody_made_this", {"vision_config": None, "embedding_size": 16, "hidden_size": 16}).endswith("yet")


def test_a_bare_bert_is_never_called_a_roformer(tmp_path):
    """Whose layout has no place for learned positions; bare, BERT and RoBERTa have the same names."""
    chosen = {f.name: f for f in families()}
    spec = next(case for case in chosen["bert"].cases() if not case.heads)
    hf_folder(tmp_path / "bert", spec)
    for name in ("roberta", "distilbert", "vit", "llama"):
        other = hf_folder(tmp_path / name, chosen[name].cases()[0])
        (other / "model.safetensors").write_bytes((tmp_path / "bert" / "model.safetensors").read_bytes())
        with pytest.raises(UserError, match=f"family '{name}', but its tensors.*'bert'") as error:
            load(other, device="cpu")
        assert "'roformer'" not in one_line(error)
    other = hf_folder(tmp_path / "roformer", chosen["roformer"].cases()[0])
    (other / "model.safetensors").write_bytes((tmp_path / "bert" / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"1 unexpected \('embeddings.position_embeddings.weight'\)"):
        load(other, device="cpu")


def test_a_family_under_another_name_is_read_as_its_refusal_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.XLMRobertaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    theirs = transformers.XLMRobertaForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="with model_type 'roberta' and a Roberta architecture it is read"):
        load(tmp_path, device="cpu")
    said = json.loads((tmp_path / "config.json").read_text())
    said |= {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    tokens = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = theirs(input_ids=tokens).logits, load(tmp_path, device="cpu")(tokens).logits
    assert float((got - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_what_is_said_to_be_missing_is_not_there():
    """The words for a model_type go when a family reads it."""
    known = {m for f in families() if f.hf is not None for m in f.hf.model_types}
    assert not known & set(_BY_NAME)
    with pytest.raises(UserError, match="…'"):
        hf_format("x" * 5000)


@pytest.mark.parametrize("name", ["jamba", "llama", "deepseek"])
def test_more_blocks_than_tensors_is_refused_at_once(name, tmp_path):
    folder = hf_folder(tmp_path / "a", CASES[name], num_hidden_layers=4096)
    start = time.process_time()
    with pytest.raises(UserError, match=r"4096 blocks, and it has [0-9]+ tensors") as error:
        load(folder, device="cpu")
    one_line(error)
    assert time.process_time() - start < 5

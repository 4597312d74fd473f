"""What a file says of heads it lacks is saved again; a refusal names the file, and the other family before any fix."""

import json
import re
from pathlib import Path

import pytest
import torch

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.families import family
from phylon.families.bert import bert_spec
from phylon.families.distilbert import distilbert_spec
from phylon.families.roberta import roberta_spec
from phylon.families.transformer2017 import transformer2017_spec
from phylon.families.vit import vit_spec
from phylon.hub import load, save
from phylon.layers.heads.classify import Classify
from phylon.layers.heads.pools import Last
from phylon.spec.errors import UserError

from .hub_data import TINY, hf_folder, made, one_line

SIZES = {"d_model": 24, "n_layers": 1, "n_heads": 3, "vocab_size": 37}
TIED = {"gpt2": "GPT2", "bloom": "Bloom", "falcon": "Falcon", "mpt": "Mpt", "gpt_neo": "GPTNeo", "gemma3": "Gemma3Text"}


def said(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "stem"), [*TIED.items(), ("llama", "Llama")])
def test_a_model_without_head_keeps_what_it_says_of_the_head(name: str, stem: str, tied: bool, tmp_path: Path) -> None:
    hf = family(name).hf
    assert hf is not None
    config = hf.write(family(name).cases()[0]) | {"architectures": [f"{stem}Model"], "tie_word_embeddings": tied}
    folder = hf_folder(tmp_path / "a", family(name).cases()[0].replace(heads={}, ties=()))
    assert "tie_word_embeddings" not in said(folder)  # nothing to tie, nothing said
    (folder / "config.json").write_text(json.dumps(config))
    save(load(folder, device="cpu"), tmp_path / "b", format="hf")
    assert said(tmp_path / "b")["tie_word_embeddings"] is tied
    assert load(tmp_path / "b", device="cpu").spec == load(folder, device="cpu").spec


@pytest.mark.parametrize("head", ["mlm", "class", "token", "span"])
def test_rates_of_distilbert(head: str, tmp_path: Path) -> None:
    rates = {"qa_dropout": 0.3, "seq_classif_dropout": 0.4}
    spec = distilbert_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37, dropout=0.1, heads=(head,))
    spec = (
        spec
        if head != "token"
        else distilbert_spec(
            d_model=24, n_layers=1, n_heads=3, vocab_size=37, dropout=0.1, heads=(head,), head_dropout=0.1
        )
    )
    folder = hf_folder(tmp_path / "a", spec)
    assert not rates.keys() & said(folder).keys() - {"class": {"seq_classif_dropout"}, "span": {"qa_dropout"}}.get(
        head, set()
    )
    (folder / "config.json").write_text(json.dumps(said(folder) | rates))
    save(load(folder, device="cpu"), tmp_path / "b", format="hf")
    assert rates.items() <= said(tmp_path / "b").items()


@pytest.mark.parametrize("name", ["T5EncoderModel", "T5Model"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_headless_t5_says_one_thing_of_its_head(name: str, tied: bool, tmp_path: Path) -> None:
    whole = family("t5").cases()[0]
    spec = whole.replace(heads={}, ties=tuple(tie for tie in whole.ties if not tie.name.startswith("heads.")))
    spec = spec.replace(decoder=None, ties=()) if name == "T5EncoderModel" else spec
    folder = hf_folder(tmp_path / "a", spec)
    silent = said(folder)
    assert not {"tie_word_embeddings", "scale_decoder_outputs"} & silent.keys()
    for told in ({"tie_word_embeddings": tied}, {"tie_word_embeddings": True, "scale_decoder_outputs": tied}):
        (folder / "config.json").write_text(json.dumps(silent | told))
        model = load(folder, device="cpu")
        assert model.spec.heads == {}
        again = said(save(model, tmp_path / "b", format="hf", replace=True))
        assert {key: again[key] for key in again if key in ("tie_word_embeddings", "scale_decoder_outputs")} == told


def test_kept_keys_pass_through_a_native_folder(tmp_path: Path) -> None:
    kept = {"tie_word_embeddings": False, "problem_type": "multi_label_classification"}
    folder = hf_folder(tmp_path / "a", TINY.replace(heads={}, ties=()))
    (folder / "config.json").write_text(json.dumps(said(folder) | kept))
    native = save(load(folder, device="cpu"), tmp_path / "b")
    model = load(native, device="cpu")
    assert model.kept == said(folder)
    assert kept.items() <= said(save(model, tmp_path / "c", format="hf")).items()
    data = json.loads((native / "phylon.json").read_text())
    for wrong, match in (
        ([], "'kept' must be the table"),
        ({"model_type": 1}, "'kept' must be .* a model_type in it a name"),
    ):
        (native / "phylon.json").write_text(json.dumps(data | {"kept": wrong}))
        with pytest.raises(UserError, match=match) as caught:
            load(native, device="cpu")
        assert "phylon.json" in one_line(caught)
    # As an early version wrote it: the keys alone that the format has no place for.
    (native / "phylon.json").write_text(json.dumps(data | {"kept": kept}))
    again = said(save(load(native, device="cpu"), tmp_path / "d", format="hf"))
    assert kept.items() <= again.items()
    assert again["model_type"] == "llama"


@pytest.mark.parametrize("shape", [(36, 24), (1, 24)])
def test_an_untied_marian_with_a_shared_table_of_another_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    size = {"d_model": 24, "n_layers": 1, "n_heads": 3, "vocab_size": 37, "max_seq_len": 16}
    spec = transformer2017_spec(**size, tied=False, sinusoids="halves", head_bias=True)
    folder = hf_folder(tmp_path / "a", spec)
    source = open_safetensors(folder)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    shared = next(name for name in tensors if "shared" in name)
    write_safetensors(folder / "model.safetensors", tensors | {shared: torch.zeros(shape)})
    with pytest.raises(UserError, match=re.escape(f"'{shared}' is {shape}, the model needs (37, 24)")) as caught:
        load(folder, device="cpu")
    one_line(caught)


@pytest.mark.parametrize("make", [bert_spec, roberta_spec])
def test_a_bias_of_masked_words_is_unexpected_where_no_head_has_it(make, tmp_path: Path) -> None:
    name = {bert_spec: "cls.predictions.bias", roberta_spec: "lm_head.bias"}[make]
    folder = hf_folder(tmp_path / "a", make(d_model=24, n_layers=1, n_heads=3, vocab_size=37, heads=("class",)))
    source = open_safetensors(folder)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    write_safetensors(folder / "model.safetensors", tensors | {name: torch.zeros(37)})
    with pytest.raises(UserError, match=name):
        load(folder, device="cpu")


def test_what_no_longer_fits_is_not_kept(tmp_path: Path) -> None:
    model = load(hf_folder(tmp_path / "a", TINY), device="cpu")
    for wrong in ({"tie_word_embeddings": False, "rms_norm_eps": 0.5}, {"no_such_key": 1}, {"model_type": "bert"}):
        model.kept = said(tmp_path / "a") | {"hidden_act": "swish"} | wrong
        again = said(save(model, tmp_path / "b", format="hf", replace=True))
        assert {key: again[key] for key in said(tmp_path / "a")} == said(tmp_path / "a") | (
            {"hidden_act": again["hidden_act"]}
        )
        assert again["hidden_act"] == ("silu" if "model_type" in wrong else "swish")
        assert "no_such_key" not in again


def test_a_changed_model_keeps_the_words_that_are_still_true(tmp_path: Path) -> None:
    """Another head and a longer text: the other keys stay as they were spelled."""
    words = {"hidden_act": "swish", "rope_theta": 10000, "_name_or_path": "x", "max_window": ..., "head_dim": ...}
    folder = hf_folder(tmp_path / "a", TINY, **words)
    model = load(folder, device="cpu")
    new = made(TINY.replace(heads={"class": Classify(n_classes=3, pool=Last(), bias=False)}, ties=(), max_seq_len=99))
    new.kept, new.family = model.kept, model.family
    again = said(save(new, tmp_path / "b", format="hf"))
    changed = {key: again[key] for key in again if again[key] != said(folder).get(key)}
    assert changed == {
        "architectures": ["LlamaForSequenceClassification"],
        "max_position_embeddings": 99,
        "id2label": {str(i): f"LABEL_{i}" for i in range(3)},
        "label2id": {f"LABEL_{i}": i for i in range(3)},
    }
    assert load(tmp_path / "b", device="cpu").spec == new.spec
    assert again.keys() >= said(folder).keys() - {"tie_word_embeddings"}


def test_names_of_classes_that_only_the_file_has(tmp_path: Path) -> None:
    """A choice among texts has no classes to be named, yet its table stays; the model's own names come first."""
    tables = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    folder = hf_folder(tmp_path / "a", bert_spec(**SIZES, heads=("choice",)), **tables)
    assert said(save(load(folder, device="cpu"), tmp_path / "b", format="hf"))["id2label"] == tables["id2label"]
    model = load(hf_folder(tmp_path / "c", bert_spec(**SIZES, heads=("class",)), **tables), device="cpu")
    assert model.labels == {"class": ("no", "yes")}
    for labels, names in (({"class": ("a", "b")}, ["a", "b"]), ({}, ["LABEL_0", "LABEL_1"])):
        model.labels = labels
        again = said(save(model, tmp_path / "d", format="hf", replace=True))
        assert list(again["id2label"].values()) == list(again["label2id"]) == names


@pytest.mark.parametrize(
    ("spec", "other", "names"),
    [
        (roberta_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37, heads=("mlm",)),
         bert_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37, heads=()), ("bert", "roberta")),
        (roberta_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37, heads=("mlm",)),
         bert_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37, heads=("mlm",)), ("bert", "roberta")),
        (vit_spec(d_model=24, n_layers=1, n_heads=3, image_size=(8, 8), patch_size=4, n_extra=2, heads=("distilled",)),
         vit_spec(d_model=24, n_layers=1, n_heads=3, image_size=(8, 8), patch_size=4, heads=()), ("vit", "deit")),
    ],
)  # fmt: skip
def test_the_other_family_comes_before_a_prefix(spec, other, names: tuple[str, str], tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a", spec)
    hf_folder(tmp_path / "b", other)
    (folder / "config.json").write_text((tmp_path / "b/config.json").read_text())
    with pytest.raises(UserError, match=f"^the configuration of '{folder}' is of family '{names[0]}'") as caught:
        load(folder, device="cpu")
    assert f"'{names[1]}'" in one_line(caught)
    assert "strip" not in str(caught.value)


def test_refusals_name_the_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a", TINY)
    config = said(folder)
    source = open_safetensors(folder)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    weights = folder / "model.safetensors"
    for changed, match in (
        (tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, "differ, but the model ties them"),
        (tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int64)}, "stored as I64 .* store it as F32"),
    ):
        write_safetensors(weights, changed)
        with pytest.raises(UserError, match=f"^{folder}: .*{match}"):
            load(folder, device="cpu")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "x"}))
    with pytest.raises(UserError, match=f"^{folder}/config.json: unknown model_type 'x'"):
        load(folder, device="cpu")
    with pytest.raises(UserError, match="the name of the model is empty"):
        load("")

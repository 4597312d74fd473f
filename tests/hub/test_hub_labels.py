"""Names of classes: kept from a Hugging Face config and back, in the native format, refused where they do not fit."""

import json

import pytest

from phylon.families.bert import bert_spec
from phylon.families.llama import llama_spec
from phylon.families.vit import vit_spec
from phylon.hub import load, save
from phylon.layers.heads.classify import Classify
from phylon.layers.heads.pools import Last
from phylon.model import build
from phylon.spec import UserError

NAMES = ("no", "maybe", "ja wohl")
SIZES = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24}


def llama():
    spec = llama_spec(**SIZES, n_kv_heads=1, vocab_size=20, max_seq_len=16)
    return spec.replace(heads={"class": Classify(n_classes=3, pool=Last(), bias=False)}, ties=())


SPECS = {
    "bert": lambda: bert_spec(**SIZES, vocab_size=20, max_seq_len=16, heads=("class",), n_classes=3),
    "words": lambda: bert_spec(**SIZES, vocab_size=20, max_seq_len=16, heads=("token",), n_classes=3),
    "vit": lambda: vit_spec(**SIZES, image_size=(8, 8), patch_size=4, n_classes=3),
    "llama": llama,
}


@pytest.mark.parametrize("name", SPECS)
def test_names_of_a_config_are_kept_both_ways(name, tmp_path):
    plain = save(build(SPECS[name](), device="cpu"), tmp_path / "plain", format="hf")
    config = json.loads((plain / "config.json").read_text("utf-8"))
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert load(plain, device="cpu").labels == {}
    config["id2label"] = {"2": NAMES[2], "0": NAMES[0], "1": NAMES[1]}
    config["label2id"] = {label: i for i, label in enumerate(NAMES)}
    (plain / "config.json").write_text(json.dumps(config), "utf-8")
    model = load(plain, device="cpu")
    head = next(iter(model.spec.heads))
    assert model.labels == {head: NAMES}
    native = load(save(model, tmp_path / "native"), device="cpu")
    assert native.labels == {head: NAMES}
    again = save(native, tmp_path / "again", format="hf")
    written = json.loads((again / "config.json").read_text("utf-8"))
    assert written["id2label"] == {str(i): label for i, label in enumerate(NAMES)}
    assert written["label2id"] == {label: i for i, label in enumerate(NAMES)}
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoConfig.from_pretrained(again).id2label == dict(enumerate(NAMES))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"class": ["a", "b"]}, r"labels.class has 2 names, and the head 3 classes"),
        ({"klass": ["a", "b", "c"]}, r"the head 'klass', which has no classes"),
        ({"class": ["a", 1, "c"]}, r"labels.class must be a list of names"),
        (["a"], r"'labels' must be a table"),
    ],
)
def test_names_that_do_not_fit_are_refused(labels, message, tmp_path):
    folder = save(build(SPECS["bert"](), device="cpu"), tmp_path / "model")
    data = json.loads((folder / "phylon.json").read_text("utf-8"))
    (folder / "phylon.json").write_text(json.dumps(data | {"labels": labels}), "utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load(folder, device="cpu")
    assert "phylon.json" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"0": 0, "1": 1, "2": 2.5}, ("0", "1", "2.5")),
        ({"1": "a", "2": "b", "3": "c"}, None),
        ({"0": "a", "1": "b", "7": "c"}, None),
        ({"0": "a", "1": None, "2": "c"}, None),
    ],
)
def test_numbers_are_names_and_a_table_with_holes_is_only_counted(table, names, tmp_path):
    folder = save(build(SPECS["bert"](), device="cpu"), tmp_path / "model", format="hf")
    config = json.loads((folder / "config.json").read_text("utf-8")) | {"id2label": table}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    model = load(folder, device="cpu")
    assert model.labels == ({} if names is None else {"class": names})
    assert model.spec == SPECS["bert"]()

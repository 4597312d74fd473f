"""BERT, RoBERTa and DistilBERT against the reference: every task, padded batches, both directions; a real cut."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from phylon.families import family
from phylon.families.bert import bert_spec
from phylon.hub import load, save
from phylon.layers.positions.absolute import LearnedPositions
from phylon.spec import UserError

from .encoders import check, golden, ours_saved, refuses
from .harness import REMOVED, draw

LOGITS = lambda out: out.logits
POOLED = {"pooled": lambda out: out.pooler_output}
SPAN = {"span": lambda out: torch.stack([out.start_logits, out.end_logits], dim=-1)}
PRETRAINING = {"mlm": lambda out: out.prediction_logits, "nsp": lambda out: out.seq_relationship_logits}
SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 35, "max_position_embeddings": 40}
BERT = {
    "bare": (hf.BertModel, POOLED, {}),
    "pretraining": (hf.BertForPreTraining, PRETRAINING, {"layer_norm_eps": 1e-5}),
    "mlm": (hf.BertForMaskedLM, {"mlm": LOGITS}, {"hidden_act": "relu"}),
    "nsp": (hf.BertForNextSentencePrediction, {"nsp": LOGITS}, {}),
    "class": (hf.BertForSequenceClassification, {"class": LOGITS}, {"num_labels": 5, "type_vocab_size": 3}),
    "token": (hf.BertForTokenClassification, {"token": LOGITS}, {"num_labels": 3, "classifier_dropout": 0.2}),
    "span": (hf.BertForQuestionAnswering, SPAN, {"hidden_act": "gelu_new"}),
}
ROBERTA = {
    "bare": (hf.RobertaModel, POOLED, {"type_vocab_size": 1}),
    "mlm": (hf.RobertaForMaskedLM, {"mlm": LOGITS}, {"hidden_act": "relu"}),
    "class": (hf.RobertaForSequenceClassification, {"class": LOGITS}, {"num_labels": 5, "pad_token_id": 0}),
    "token": (hf.RobertaForTokenClassification, {"token": LOGITS}, {"num_labels": 3}),
    "span": (hf.RobertaForQuestionAnswering, SPAN, {"pad_token_id": 4}),
}
DISTIL = {
    "bare": (hf.DistilBertModel, {}, {"sinusoidal_pos_embds": True}),
    "mlm": (hf.DistilBertForMaskedLM, {"mlm": LOGITS}, {"activation": "relu"}),
    "class": (hf.DistilBertForSequenceClassification, {"class": LOGITS}, {"num_labels": 5}),
    "token": (hf.DistilBertForTokenClassification, {"token": LOGITS}, {"num_labels": 3}),
    "span": (hf.DistilBertForQuestionAnswering, SPAN, {}),
}


@pytest.mark.parametrize("name", BERT)
def test_bert(name: str, tmp_path: Path) -> None:
    cls, outputs, changes = BERT[name]
    check(cls, hf.BertConfig(**(SIZES | changes)), tmp_path, outputs)


def test_bert_without_pooler(tmp_path: Path) -> None:
    """What no config says and the tensors do."""
    reference = hf.BertModel(hf.BertConfig(**SIZES), add_pooling_layer=False)
    draw(reference)
    reference.save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", device="cpu")
    assert not model.heads
    save(model, tmp_path / "b", format="hf")
    assert load(tmp_path / "b", device="cpu").spec == model.spec
    stored, resaved = load_file(tmp_path / "a/model.safetensors"), load_file(tmp_path / "b/model.safetensors")
    assert stored.keys() == resaved.keys()


@pytest.mark.parametrize("name", ROBERTA)
def test_roberta(name: str, tmp_path: Path) -> None:
    cls, outputs, changes = ROBERTA[name]
    config = hf.RobertaConfig(**(SIZES | changes))
    model = check(cls, config, tmp_path, outputs, avoid=config.pad_token_id)
    positions = model.spec.encoder.embed.positions
    assert positions == LearnedPositions(max_seq_len=39 - config.pad_token_id, offset=config.pad_token_id + 1)


@pytest.mark.parametrize("name", DISTIL)
def test_distilbert(name: str, tmp_path: Path) -> None:
    cls, outputs, changes = DISTIL[name]
    sizes = {"vocab_size": 41, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 35, "max_position_embeddings": 40}
    check(cls, hf.DistilBertConfig(**(sizes | changes)), tmp_path, outputs, edit={"tie_weights_": True})


@pytest.mark.parametrize("prefix", ["Bert", "Roberta", "DistilBert"])
def test_multiple_choice(prefix: str, tmp_path: Path) -> None:
    """The choices are rows of our batch and one row of the reference's."""
    config = (
        getattr(hf, prefix + "Config")(**SIZES)
        if prefix != "DistilBert"
        else hf.DistilBertConfig(vocab_size=41, dim=24, n_layers=2, n_heads=3, hidden_dim=35)
    )
    reference = getattr(hf, prefix + "ForMultipleChoice")(config).eval()
    draw(reference)
    reference.save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", device="cpu")
    tokens = torch.randint(2, 41, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = reference(input_ids=tokens).logits
        ours = model(tokens.flatten(0, 1)).heads["choice"].view(2, 3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    save(model, tmp_path / "b", format="hf")
    assert load(tmp_path / "b", device="cpu").spec == model.spec


SAVED = {
    "bert": [hf.BertForPreTraining, hf.BertForSequenceClassification, hf.BertForTokenClassification],
    "roberta": [hf.RobertaForMaskedLM, hf.RobertaForSequenceClassification],
    "distilbert": [hf.DistilBertForMaskedLM, hf.DistilBertForSequenceClassification],
}


@pytest.mark.parametrize("name", SAVED)
def test_ours_to_reference(name: str, tmp_path: Path) -> None:
    for i, (spec, cls) in enumerate(zip(family(name).cases(), SAVED[name], strict=False)):
        outputs = PRETRAINING if len(spec.heads) == 2 else dict.fromkeys(spec.heads, LOGITS)
        offset = spec.encoder.embed.positions.offset
        ours_saved(spec, cls, tmp_path / str(i), outputs, avoid=max(offset - 1, 0))


@pytest.mark.parametrize("name", SAVED)
def test_golden_counts(name: str) -> None:
    golden(name)


def test_old_files(tmp_path: Path) -> None:
    """gamma and beta, a pretraining file under the masked-LM name, stored positions, a pooler nobody reads."""
    reference = hf.BertForPreTraining(hf.BertConfig(**SIZES)).eval()
    draw(reference)
    reference.save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", device="cpu")
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(tensors, tmp_path / "a/model.safetensors")
    config = json.loads((tmp_path / "a/config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    old = load(tmp_path / "a", device="cpu")
    assert old.spec == model.spec
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), model.parameters(), strict=True))


def test_refusals(tmp_path: Path) -> None:
    config = hf.BertConfig(**SIZES, architectures=["BertForMaskedLM"])
    refuses(tmp_path / "a", config, {"is_decoder": True}, "'is_decoder' is True.*encoder")
    refuses(tmp_path / "b", config, {"position_embedding_type": "relative_key"}, "position_embedding_type")
    refuses(tmp_path / "c", config, {"architectures": ["BertForMasked"]}, "did you mean 'BertForMaskedLM'")
    refuses(tmp_path / "e", config, {"new_key": 1}, "not understood.*'new_key'")
    refuses(tmp_path / "f", config, {"num_attention_heads": 5}, "no multiple")
    refuses(tmp_path / "g", config, {"hidden_size": REMOVED}, "lacks 'hidden_size'")
    roberta = hf.RobertaConfig(**SIZES, architectures=["RobertaForMaskedLM"])
    refuses(tmp_path / "h", roberta, {"pad_token_id": 40}, "leaves no positions")
    with pytest.raises(UserError, match="unknown head 'classes'"):
        bert_spec(heads=("classes",))


DATA = Path(__file__).parents[2] / "../shared/data/models/minilm-1layer-5120"


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
def test_real_cut() -> None:
    gold = json.loads((DATA / "gold.json").read_text())
    model = load(DATA, device="cpu", dtype="float32")
    assert (model.stored_dtype, len(model.heads)) == ("F16", 0)
    tokens = torch.zeros(3, 12, dtype=torch.int64)
    segments = torch.zeros_like(tokens)
    for i, ids in enumerate(gold["ids"]):
        tokens[i, : len(ids)], segments[i, : len(ids)] = torch.tensor(ids), 1
    with torch.no_grad():
        hidden = model(tokens, segments=segments).hidden
    expected = torch.tensor(gold["hidden_first6_of_cls"])
    torch.testing.assert_close(hidden[:, 0, :6], expected, rtol=0, atol=1e-5)
    assert [model.tokenizer.encode(text) for text in gold["texts"]] == gold["ids"]

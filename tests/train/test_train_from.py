"""Going on from a trained model: ``[model] from``, new heads, ``[tune]``."""

import pytest
import torch

from phylon import hub
from phylon.families.llama import llama_spec
from phylon.layers.heads.pools import Mean
from phylon.model import build
from phylon.spec import UserError
from phylon.text import char_tokenizer
from phylon.train import load_recipe, read_metrics, recipe_from_toml, train
from phylon.train.pretrained import load_start, started_spec

TEXT = "the cat sat on the mat. a dog ran in the fog. "
RECIPE = """
schema = 1
[data]
source = { kind = "texts", texts = ["the cat sat on the mat. a dog ran in the fog. "], repeat = 20 }
seq_len = 16
held_out = 0.2
[optim]
lr = 1e-2
[run]
steps = 6
batch_size = 2
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tokenizer = char_tokenizer("".join(sorted(set(TEXT))))
    model = build(
        llama_spec(d_model=16, n_layers=2, n_heads=2, d_ff=24, vocab_size=tokenizer.vocab_size, max_seq_len=16),
        seed=4,
        device="cpu",
    )
    model.tokenizer = tokenizer
    return hub.save(model, tmp_path_factory.mktemp("base") / "model")


def written(tmp_path, text=RECIPE):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def losses(out):
    return {r["step"]: r["loss"] for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "step"}


def test_a_recipe_without_a_model_takes_it_from_the_command(tmp_path, base):
    result = train(written(tmp_path), overrides={"model.from": str(base)}, out=tmp_path / "run", device="cpu")
    before, after = hub.load(base, device="cpu"), hub.load(result.out / "model", device="cpu")
    assert result.tokenizer.encode(TEXT) == before.tokenizer.encode(TEXT)
    assert after.spec == before.spec
    assert not torch.equal(before.decoder.blocks[0].attn.q_proj.weight, after.decoder.blocks[0].attn.q_proj.weight)
    tokens = torch.tensor([before.tokenizer.encode("the cat")])
    assert [r["step"] for r in read_metrics(result.out / "metrics.jsonl") if r["kind"] == "eval"] == [0, 6]
    first = losses(result.out)[0]
    assert first < 3.5, "the run begins where the model is, not at a drawn one"
    assert torch.equal(after(tokens).logits, result.model(tokens).logits)
    with pytest.raises(UserError, match="--from MODEL"):
        load_recipe(written(tmp_path))


def test_lora_trains_the_adapters_alone_resumes_and_saves_both(tmp_path, base):
    changes = {"model.from": str(base), "tune.lora": {"rank": 2, "alpha": 8.0, "dropout": 0.1}}
    whole = train(written(tmp_path), overrides=changes, out=tmp_path / "whole", device="cpu")
    plain, merged = hub.load(base, device="cpu"), hub.load(whole.out / "model", device="cpu")
    moved = {name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, merged.state_dict()[name])}
    assert moved == {f"decoder.blocks.{i}.attn.{p}_proj.weight" for i in range(2) for p in "qv"}
    hub.load_adapter(plain, whole.out / "adapter")
    tokens = torch.tensor([plain.tokenizer.encode("the cat")])
    torch.testing.assert_close(plain(tokens).logits, merged(tokens).logits, rtol=1e-5, atol=1e-6)
    averaged = train(written(tmp_path), overrides=changes | {"run.ema": 0.5}, out=tmp_path / "ema", device="cpu")
    mean = hub.load(averaged.out / "model_ema", device="cpu")
    assert mean.spec == merged.spec
    assert not torch.equal(mean(tokens).logits, merged(tokens).logits)
    assert torch.equal(averaged.model(tokens).logits, merged(tokens).logits), "the mean is beside the run"
    again = train(whole.out.parent / "recipe.toml", overrides=changes, out=whole.out, resume=True, device="cpu")
    assert losses(again.out) == losses(whole.out)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_partial_training_moves_what_is_named(tmp_path, base):
    changes = {"model.from": str(base), "tune.train": ["decoder.blocks.1"], "tune.freeze": ["*.ffn"]}
    result = train(written(tmp_path), overrides=changes, out=tmp_path / "run", device="cpu")
    before = hub.load(base, device="cpu").state_dict()
    moved = {name for name, tensor in result.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {
        *(f"decoder.blocks.1.attn.{p}_proj.weight" for p in "qkvo"),
        "decoder.blocks.1.attn_norm.weight",
        "decoder.blocks.1.ffn_norm.weight",
    }


def test_heads_of_a_recipe_stay_when_the_command_names_the_model(tmp_path, base):
    heads = 'heads = { class = { kind = "classify", n_classes = 3, pool = { kind = "mean" } } }\n'
    path = written(tmp_path, RECIPE + "[model]\n" + heads)
    for text in (RECIPE + "[model]\n" + heads, RECIPE + "[model]\nfrom = 'minilm'\n" + heads):
        path.write_text(text)
        assert load_recipe(path, {"model.from": str(base)}).model.keys() == {"heads", "from"}
    assert load_recipe(path, {"model.preset": "gpt2"}).model == {"preset": "gpt2"}


def test_new_heads_are_drawn_and_the_rest_is_the_models(base):
    table = {"from": str(base), "heads": {"class": {"kind": "classify", "n_classes": 3, "pool": {"kind": "mean"}}}}
    spec = started_spec(table)
    assert list(spec.heads) == ["class"]
    assert spec.heads["class"].pool == Mean()
    model, plain = load_start(table, spec, 1, "cpu"), hub.load(base, device="cpu")
    assert torch.equal(model.decoder.embed.tokens.weight, plain.decoder.embed.tokens.weight)
    assert model(torch.tensor([[1, 2]])).heads["class"].shape[-1] == 3
    assert torch.equal(model.heads["class"].proj.weight, load_start(table, spec, 1, "cpu").heads["class"].proj.weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.from": "smolm2"}, "did you mean 'smollm2'"),
        ({"model.from": 3}, "names a model"),
        ({"model.heads": {"class": {"kind": "clasify"}}}, "did you mean 'classify'"),
        ({"model.heads": 3}, "a table by name"),
        ({"model.decoder.blocks.*.ffn.d_ff": 32}, "and '"),
        ({"model.decoder.blocks.*.ffn.dff": 32}, "did you mean 'd_ff'"),
        ({"tune.lora": {"paths": ["*.q_prj"]}}, "no linear map"),
        ({"tune.lora": {"rnk": 3}}, "rnk"),
        ({"tune.train": ["decoder.blocks.9"]}, "no parameter"),
        ({"tune.freeze": ["*"]}, "no parameter to train"),
        ({"data.seq_len": 17}, "max_seq_len 16"),
    ],
)
def test_bad_starts_are_one_line_and_leave_nothing(tmp_path, base, changes, words):
    with pytest.raises(UserError) as caught:
        train(
            recipe_from_toml(RECIPE + f'[model]\nfrom = "{base}"\n'),
            overrides=changes,
            out=tmp_path / "run",
            device="cpu",
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_says_how_to_name_one(tmp_path, base):
    model = hub.load(base, device="cpu")
    model.tokenizer = None
    bare = hub.save(model, tmp_path / "bare")
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        train(written(tmp_path), overrides={"model.from": str(bare)}, out=tmp_path / "run", device="cpu")
    hub.load(base, device="cpu").tokenizer.save(tmp_path / "tok")
    named = {"model.from": str(bare), "data.tokenizer": {"kind": "load", "path": str(tmp_path / "tok")}}
    train(written(tmp_path), overrides=named, out=tmp_path / "run", device="cpu")


def test_what_the_model_kept_stays_but_for_the_kind_of_classes(tmp_path, base):
    model = hub.load(base, device="cpu")
    kept = {"model_type": "llama", "tie_word_embeddings": True}
    model.kept = kept | {"problem_type": "multi_label_classification"}
    model.unread = {"some.table": torch.arange(3.0)}
    start = hub.save(model, tmp_path / "start")
    table = {"from": str(start), "heads": {"class": {"kind": "classify", "n_classes": 3, "pool": {"kind": "mean"}}}}
    for spec in (model.spec, started_spec(table)):
        started = load_start(table, spec, 1, "cpu")
        assert started.kept == kept
        assert torch.equal(started.unread["some.table"], torch.arange(3.0))
    changes = {"model.from": str(start), "run.ema": 0.5, "run.steps": 1}
    out = train(written(tmp_path), overrides=changes, out=tmp_path / "run", device="cpu").out
    saved = [path.parent for path in out.glob("*/phylon.json")]
    assert len(saved) == 2
    for folder in saved:
        back = hub.load(folder, device="cpu")
        assert back.kept == kept
        assert torch.equal(back.unread["some.table"], torch.arange(3.0))


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ({"model.set": {"decoder.blocks.*.ffn.d_ff": 32}}, True),
        ({"model.dtype": "bfloat16"}, True),
        ({"model.set": {"decoder.blocks.*.attn.dropout": 0.1}}, False),
    ],
)
def test_what_a_resumed_run_is_offered_of_a_model_it_began_from(tmp_path, base, changes, fixed):
    start = {"model.from": str(base), "run.steps": 1}
    train(written(tmp_path), overrides=start, out=tmp_path / "run", device="cpu")
    for allow in (False, True) if fixed else (False,):
        with pytest.raises(UserError, match="--allow-changes neither" if fixed else "or with --allow-changes"):
            train(written(tmp_path), overrides=start | changes, out=tmp_path / "run", resume=True, allow_changes=allow,
                  device="cpu")  # fmt: skip

"""``phylon score`` of pairs of texts says what the trainer measured of them."""

import json

import pytest
import torch
from objective_toys import TINY
from task_toys import PAIRS, bert, data

from phylon.cli.main import main
from phylon.data.split import split_records
from phylon.generate import classify, rate
from phylon.hub import load
from phylon.spec import UserError
from phylon.train import load_recipe, read_metrics
from phylon.train.measures import accuracy, macro_f1, mean_squared_error, pearson, spearman

ROWS = [(x, y) for x, _ in PAIRS for _, y in PAIRS[:5]]
CLASSES = (
    bert('["class"]', 3)
    + data([{"a": x, "b": y, "c": "xyz"[i % 3]} for i, (x, y) in enumerate(ROWS)])
    + '[objective]\nkind = "text_classes"\ntext = "a"\npair = "b"\nlabel = "c"\n'
)
SCORES = (
    bert('["class"]', 1)
    + data([{"a": x, "b": y, "c": (len(x) - len(y)) / 10} for x, y in ROWS])
    + '[objective]\nkind = "text_scores"\ntext = "a"\npair = "b"\nlabel = "c"\n'
)
RUN = "[optim]\nlr = 1e-2\n[run]\nsteps = 6\nthreads = 1\n"


def trained(folder, tables, length):
    """The command line's model of pairs, its last evaluation and the held-out records."""
    text = f"schema = 1\n{tables}{RUN}".replace("= 24", f"= {length}")
    folder.joinpath("recipe.toml").write_text(text.replace(f"d_ff = {length}", "d_ff = 24"), "utf-8")
    assert main(["train", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--device", "cpu"]) == 0
    measured = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if r["kind"] == "eval"][-1]["metrics"]
    held = split_records(load_recipe(folder / "recipe.toml").data.source, 0.3, ("a", "b"))[1]
    rows = [record.fields for record in held.records()]
    assert len(rows) > 9
    return folder / "run" / "model", measured, rows


def said(model, rows, capfd, kind):
    asked = [word for row in rows for word in ("--text", row["a"], "--pair", row["b"])]
    capfd.readouterr()
    assert main(["score", str(model), *asked, "--json", "--device", "cpu"]) == 0
    found = json.loads(capfd.readouterr().out)[kind]
    assert [(row["text"], row["pair"]) for row in found] == [(row["a"], row["b"]) for row in rows]
    return found


def test_classes_of_pairs(tmp_path, capfd):
    model, measured, rows = trained(tmp_path, CLASSES, 64)
    assert f"try: phylon score {model} --text 'some text' --pair 'another text'" in capfd.readouterr().err
    labels = [row["label"] for row in said(model, rows, capfd, "classes")]
    right = [row["c"] for row in rows]
    assert accuracy(labels, right) == pytest.approx(measured["accuracy"])
    assert macro_f1(labels, right, sorted(set(right))) == pytest.approx(measured["f1"])
    assert main(["score", str(model), "--text", "the cat", "--pair", "die katze"]) == 0
    assert "the cat | die katze" in capfd.readouterr().out
    loaded = load(model, device="cpu")
    one, other = (classify(loaded, ["the cat"], pair)[0]["probabilities"] for pair in (["die katze"], None))
    assert one != other, "the positive control"


@pytest.mark.parametrize("length", [64, 24])
def test_numbers_of_pairs_cut_as_in_training(tmp_path, capfd, length):
    model, measured, rows = trained(tmp_path, SCORES, length)
    if length == 64:
        scores = [row["score"] for row in said(model, rows, capfd, "scores")]
    else:
        pairs = [row["b"] for row in rows]
        scores = [row["score"] for row in rate(load(model, device="cpu"), [r["a"] for r in rows], pairs, max_tokens=24)]
    right = [row["c"] for row in rows]
    for name, measure in (("mse", mean_squared_error), ("pearson", pearson), ("spearman", spearman)):
        assert measure(scores, right) == pytest.approx(measured[name], rel=1e-3), name  # of nearly equal scores


def test_classes_of_a_batch_of_cut_pairs_are_those_of_each_alone(tmp_path):
    model = load(trained(tmp_path, CLASSES, 24)[0], device="cpu")
    texts, pairs = ([pair[side] * (1 + i % 3) for i, pair in enumerate(PAIRS)] for side in (0, 1))
    together = classify(model, texts, pairs, max_tokens=24)
    for i, found in enumerate(together):
        joint = model.tokenizer.encode_joint(texts[i], pairs[i]).shortened(24)
        out = model(torch.tensor([joint.ids]), types=torch.tensor([joint.types])).heads["class"][0]
        assert list(found["probabilities"].values()) == pytest.approx(out.softmax(-1).tolist(), rel=1e-4)
    with pytest.raises(UserError, match="12 texts and 1 to read with them; give one for each"):
        classify(model, texts, pairs[:1])
    with pytest.raises(UserError, match="2 tokens leave no room"):
        classify(model, texts, pairs, max_tokens=2)


def test_pairs_where_there_are_none_are_refused_in_one_line(tmp_path, capfd):
    model, _, _ = trained(tmp_path, SCORES, 24)
    capfd.readouterr()
    assert main(["score", str(model), "--text", "a", "--text", "b", "--pair", "c"]) == 2
    assert "--text is given 2 times and --pair 1; give one --pair for each --text" in capfd.readouterr().err
    for kind, said in (("word_classes", "reads the words of one text"), ("next_token", "reads no pairs")):
        recipe = tmp_path / f"{kind}.toml"
        recipe.write_text(f"schema = 1\n{TINY[kind][0]}{RUN}", "utf-8")
        assert main(["train", str(recipe), "--out", str(tmp_path / kind), "--device", "cpu"]) == 0
        assert main(["score", str(tmp_path / kind / "model"), "--text", "the cat", "--pair", "sat"]) == 2
        assert said in capfd.readouterr().err

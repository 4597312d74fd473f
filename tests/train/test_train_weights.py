"""Weights of documents, of their parts and of records, from the file to the loss of every token."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from objective_toys import DECODER, RUN, tiny

from phylon.data import JsonLines, Loader, Mixture, PackedRows, Records, Table, Texts, tokenise
from phylon.data.documents import Record
from phylon.data.labelled import read_texts
from phylon.data.mixture import Task
from phylon.data.weighed import weight_of
from phylon.ops.loss import IGNORE
from phylon.spec import UserError
from phylon.train import NextToken, recipe_from_toml, train
from phylon.train.objectives.tokens import token_stores

WORDS = "abcdefghij"


class Characters:
    """One id a letter, and the last one ends a document."""

    vocab_size, eos_ids, bos_id = 11, (10,), None

    def encode_batch(self, texts, *, special):
        return [[WORDS.index(letter) for letter in text] for text in texts]

    def fingerprint(self):
        return "letters"


def lines(tmp_path, rows):
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonLines(path=str(path), weight="w")


ROWS = [
    {"text": "abc", "w": 2},
    {"text": [{"text": "de", "weight": 0}, "fgh", {"text": "ij", "weight": 0.5}], "w": 1},
    {"text": "jih", "w": 1},
]
# By hand: every token with its weight; "." ends a document and counts as what it follows.
TOKENS = "abc.defghij.jih."
WEIGHTS = [2, 2, 2, 2, 0, 0, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("kept", [False, True])
def test_tokens_keep_the_weights_of_their_parts(tmp_path, kept):
    source = lines(tmp_path, ROWS)
    for _ in range(2):  # built, and opened again
        store = tokenise(source, Characters(), tmp_path / "kept" if kept else None)
        assert "".join((WORDS + ".")[i] for i in store.tokens) == TOKENS
        assert store.weights.of(0, 16).tolist() == WEIGHTS
        for start, stop in ((1, 16), (4, 9), (5, 6), (0, 3)):
            assert store.slice(start, stop).weights.of(0, stop - start).tolist() == WEIGHTS[start:stop]
    plain = tokenise(Texts(("abc", "defghij", "jih")), Characters(), None)
    assert plain.weights is None
    assert (plain.tokens == store.tokens).all()
    assert plain.fingerprint != store.fingerprint


def test_a_row_has_the_weights_of_its_targets(tmp_path):
    rows = PackedRows(tokenise(lines(tmp_path, ROWS), Characters(), None), 8)
    for index in range(2):
        row = rows.example(index, 0)
        after = np.array([*WEIGHTS[1:], 0][index * 8 : index * 8 + 8], np.float32)
        assert row["weights"].tolist() == np.where(row["targets"] == IGNORE, 0, after).tolist()


def test_the_loss_is_the_one_computed_by_hand(tmp_path):
    """Sum of weight times cross-entropy over the sum of the weights, for the batch and for parts of it."""
    from phylon.families import build_spec
    from phylon.model import build
    from phylon.train.gradients import cut

    model = build(build_spec({"family": "llama", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24,
                              "vocab_size": 11, "max_seq_len": 16}), seed=0, device="cpu")  # fmt: skip
    rows = PackedRows(tokenise(lines(tmp_path, ROWS), Characters(), None), 4)
    batch, objective = Loader(rows, 4, 7).batch(3), NextToken()
    logits = model(batch["tokens"], segments=batch["segments"]).logits.detach().log_softmax(-1)
    top = bottom = 0.0
    for b in range(4):
        for t in range(4):
            target = int(batch["targets"][b, t])
            if target != IGNORE:
                weight = float(batch["weights"][b, t])
                top, bottom = top - weight * float(logits[b, t, target]), bottom + weight
    assert objective.counts(batch)["lm"] == pytest.approx(bottom)
    found = objective.losses(model, batch)["lm"]
    assert float(found.sum) == pytest.approx(top, rel=1e-5)
    assert float(found.count) == pytest.approx(bottom)
    parts = [float(objective.losses(model, part)["lm"].sum) for part in cut(batch, 4)]
    assert sum(parts) == pytest.approx(top, rel=1e-5)


def weighed_recipe(tmp_path, rows):
    lines(tmp_path, rows)
    source = json.dumps(str(tmp_path / "w.jsonl"))
    data = f"""
[data]
source = {{ kind = "jsonl", path = {source}, weight = "w" }}
tokenizer = {{ kind = "char" }}
seq_len = 12
held_out = 0.2
"""
    return recipe_from_toml("schema = 1\n" + DECODER + data + RUN.replace("steps = 20", "steps = 6"))


def test_a_text_that_counts_nothing_teaches_nothing(tmp_path):
    """The same run whatever a text of weight 0 says to predict; and what counts nothing is really in the rows."""
    rows = [{"text": "the cat sat on the mat. " * 4, "w": 1.0}, {"text": "zyx wvu tsr qpo nml " * 4, "w": 0.0}] * 4
    plain = [{**row, "w": 1.0} for row in rows]
    heavy = [{**row, "w": 3.0 * row["w"]} for row in rows]
    runs = []
    for number, these in enumerate((rows, plain, heavy)):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(train(weighed_recipe(folder, these), out=folder / "out", device="cpu").loss)
    assert runs[0] != runs[1]
    assert runs[2] == pytest.approx(runs[0], rel=1e-4), "a mean over weights does not depend on their scale"


def test_a_weighed_run_resumes_bit_for_bit(tmp_path):
    import os
    import signal

    from phylon.train import Callback, Interrupted

    class Stop(Callback):
        def record(self, record, run):
            if record["kind"] == "step" and record["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

    rows = [{"text": f"the cat {i} sat on the mat. " * 3, "w": 0.5 + i} for i in range(8)]
    recipe = weighed_recipe(tmp_path, rows)
    whole = train(recipe, out=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        train(recipe, out=tmp_path / "parts", callbacks=[Stop()], device="cpu")
    parts = train(recipe, out=tmp_path / "parts", resume=True, device="cpu")
    assert whole.loss == parts.loss
    assert whole.held_out_loss == parts.held_out_loss
    for one, two in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, two)


RECORDS = ["text_classes", "text_scores", "word_classes", "answers", "contrastive", "translation", "text_to_text"]


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_weight_two_are_two_records(tmp_path, kind):
    """Rows weighed 1, 2, 0 give the loss of the rows once, twice and not at all."""
    from phylon.train.prepare import check, prepare

    recipe = tiny(kind)
    source = recipe.data.source
    if kind == "text_to_text":
        source = Records(rows=tuple({"input": w, "target": w[::-1]} for w in ("ax", "bxby", "c", "axb", "cxa", "by")))
    rows = [row | {"w": float(i % 3)} for i, row in enumerate(source.rows)]
    recipe = recipe.replace(
        objective=recipe.objective.replace(weight="w"),
        data=recipe.data.replace(source=source.replace(rows=tuple(rows)), held_out=0.0),
        run=recipe.run.replace(accumulate=1),
    )
    made = prepare(recipe, tmp_path, check(recipe, None, "cpu"), "cpu", lambda m: None, lambda t: None,
                   resume=False, kept=False)  # fmt: skip
    batch, objective, model = made.feed.loader.batch(0), recipe.objective, made.model.eval()
    name = next(iter(objective.counts(batch)))
    weighed = objective.losses(model, batch)[name]
    assert float(weighed.count) == pytest.approx(objective.counts(batch)[name])
    bare = {key: value for key, value in batch.items() if key != "weights"}
    weights = batch["weights"].reshape(len(batch["weights"]), -1).max(1).values
    assert len(set(weights.tolist())) > 1, "so that the weights say something"
    if kind != "contrastive":  # whose rows are each other's negatives
        total = sum(
            float(w) * float(objective.losses(model, {k: v[i : i + 1] for k, v in bare.items()})[name].sum)
            for i, w in enumerate(weights)
        )
        assert float(weighed.sum) == pytest.approx(total, rel=1e-4)
    assert float(weighed.sum) != pytest.approx(float(objective.losses(model, bare)[name].sum), rel=1e-3)


def test_weights_of_held_out_texts_alone_are_refused_too(tmp_path):
    weighed = lines(tmp_path, ROWS)
    plain = Texts(("abc", "defghij", "jih"))
    material = SimpleNamespace(
        recipe=tiny("denoising"), text=Characters(), training=plain, held_out=weighed, folder=None, say=lambda _: None
    )
    with pytest.raises(UserError, match="next_token alone"):
        token_stores(material, 4)
    assert token_stores(material, 4, weighs=True)[1].weights is not None


def test_what_cannot_weigh_says_so(tmp_path):
    recipe = tiny("denoising")
    lines(tmp_path, [{"text": "the cat sat on the mat. " * 20, "w": 2.0}] * 3)
    source = JsonLines(path=str(tmp_path / "w.jsonl"), weight="w")
    with pytest.raises(UserError, match="next_token alone"):
        train(recipe.replace(data=recipe.data.replace(source=source)), out=tmp_path / "out", device="cpu")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "w": -1}, r"w.jsonl:1: the weight in 'w' is not a number of at least 0: -1"),
        ({"text": "a", "w": "x"}, "is not a number of at least 0"),
        ({"text": "a"}, "no field 'w'"),
        ({"text": [{"text": "a", "wieght": 1}], "w": 1}, "unknown key 'wieght' .did you mean 'weight'"),
        ({"text": [3], "w": 1}, "neither a text nor"),
        ({"text": [{"text": "a", "weight": True}], "w": 1}, "is not a number of at least 0: True"),
        ({"text": "a", "w": "1.0"}, r"w.jsonl:1: the weight in 'w' is not a number of at least 0: '1.0'"),
        ({"text": "a", "w": True}, r"w.jsonl:1: the weight in 'w' is not a number of at least 0: True"),
        ({"text": "a", "w": None}, r"w.jsonl:1: the weight in 'w' is not a number of at least 0: None"),
        ({"text": "a", "w": 1e300}, r"w.jsonl:1: the weight in 'w' is more than fp32 holds"),
        ({"text": [{"text": "a", "weight": "2"}], "w": 1}, r"w.jsonl:1: a part of 'text' .* at least 0: '2'"),
        ({"text": [{"text": "a", "weight": 1e30}], "w": 1e30}, r"w.jsonl:1: a weight is more than fp32 holds"),
    ],
)
def test_weights_that_are_none_are_named(tmp_path, row, words):
    with pytest.raises(UserError, match=words):
        list(lines(tmp_path, [row]).documents())


@pytest.mark.parametrize("value", ["1.0", True, -1, float("nan"), float("inf"), 1e300, 10**400, None, [1]])
def test_the_weight_of_a_record_is_a_number(value):
    """With the record and the field named; of a table's cells, which are text, a written number is one."""
    with pytest.raises(UserError, match=r"^rows:7: the weight in 'w' is "):
        weight_of(Record({"w": value}, "rows:7"), "w")
    assert (
        weight_of(Record({"w": 2}, "rows:7"), "w") == weight_of(Record({"w": "2.0"}, "t.tsv:7", cells=True), "w") == 2.0
    )
    for cell in ("-1", "nan", "inf", "1e300", "x", ""):
        with pytest.raises(UserError, match=r"^t.tsv:7: the weight in 'w' is "):
            weight_of(Record({"w": cell}, "t.tsv:7", cells=True), "w")


def test_a_table_and_a_mixture_of_it_have_written_weights(tmp_path):
    (tmp_path / "t.tsv").write_text("text\tlabel\tw\na\t1\t0.5\nb\t0\ttwo\n")
    table = Table(path=str(tmp_path / "t.tsv"))
    mixed = Mixture(tasks=(Task(name="t", source=table, input="text", target="label"),))
    for source, name in ((table, "t.tsv:3"), (mixed, "t/t.tsv:3")):
        read = read_texts(source, "text", None, "label", "w")
        assert next(read).weight == 0.5
        with pytest.raises(UserError, match=f"^{name}: the weight in 'w' .*'two'; data.source.unreadable=skip"):
            next(read)

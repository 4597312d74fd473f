"""The supervised objectives: what their examples are, what their losses and metrics say, what they refuse."""

import json
import math

import numpy as np
import pytest
import torch
from objective_toys import tiny
from task_toys import PAIRS, TASKS

from phylon import hub
from phylon.data.buckets import padded
from phylon.data.images import ImageFolder
from phylon.generate import answer, beam_search, generate
from phylon.generate.finetuned import Answering, answering
from phylon.model import build
from phylon.spec import UserError
from phylon.text import train_wordpiece
from phylon.text.tokenizer import Joint
from phylon.train import Callback, recipe_from_toml, train
from phylon.train.measures import bleu
from phylon.train.objectives import answers
from phylon.train.objectives.answers import Answers, best_span
from phylon.train.objectives.contrastive import Contrastive, pooled
from phylon.train.objectives.supervised import shortened
from phylon.train.objectives.translation import Translation
from phylon.train.prepare import check, prepare
from phylon.train.recipe import model_spec


def ready(folder, kind, number=0, **changes):
    """The recipe of a tiny run with its tokenizer, batches and model."""
    recipe = tiny(kind, number)
    recipe = recipe.replace(objective=recipe.objective.replace(**changes)) if changes else recipe
    source = check(recipe, None, "cpu")
    return recipe, prepare(recipe, folder, source, "cpu", lambda _: None, lambda _: None, resume=False, kept=False)


def refused(folder, text, message):
    with pytest.raises(UserError, match=message):
        train(recipe_from_toml("schema = 1\n" + text + "\n[run]\nsteps = 1\n"), out=folder, device="cpu")


def test_a_pair_is_taught_behind_the_start_and_with_its_end(tmp_path):
    recipe, prepared = ready(tmp_path, "translation")
    tokenizer, model = prepared.tokenizer, prepared.model
    start, end = model.generation.decoder_start_id, tokenizer.eos_ids[0]
    assert (tokenizer.token(start), tokenizer.token(end)) == ("<pad>", "</s>")
    batch, said = prepared.feed.loader.batch(0), set()
    for row in range(len(batch["tokens"])):
        length = int(batch["segments"][row].sum())
        tokens, targets = batch["tokens"][row, :length].tolist(), batch["targets"][row, :length].tolist()
        assert tokens == [start, *targets[:-1]]
        assert targets[-1] == end
        assert set(batch["targets"][row, length:].tolist()) <= {-100}
        source = batch["source"][row, : int(batch["source_segments"][row].sum())].tolist()
        said.add((tokenizer.decode(source), tokenizer.decode(targets[:-1])))
    assert said
    assert said <= set(PAIRS)
    assert max(batch["tokens"].numel(), batch["source"].numel()) <= recipe.objective.max_tokens


def test_the_translation_loss_is_smoothed_and_its_bleu_that_of_the_search(tmp_path):
    pytest.importorskip("sacrebleu")
    recipe, prepared = ready(tmp_path, "translation")
    model, objective = prepared.model.eval(), recipe.objective
    batches = list(prepared.feed.held_out())
    with torch.no_grad():
        found = objective.evaluate(model, batches)
        total, smooth, count, said, right = 0.0, 0.0, 0, [], []
        for batch in batches:
            logits = model(batch["tokens"], segments=batch["segments"], source=batch["source"],
                           source_segments=batch["source_segments"]).logits.flatten(0, 1)  # fmt: skip
            loss = torch.nn.functional.cross_entropy
            total += float(loss(logits, batch["targets"].flatten(), reduction="sum"))
            smooth += float(loss(logits, batch["targets"].flatten(), reduction="sum", label_smoothing=0.1))
            count += int((batch["targets"] != -100).sum())
            for row in range(len(batch["source"])):
                source = batch["source"][row][batch["source_segments"][row] == 1].tolist()
                best = beam_search(model, [source], n_beams=2, max_new_tokens=len(source) + 50, length_penalty=0.6)
                said.append(best[0][0]["text"].strip())
                right.append(next(b for a, b in PAIRS if a == prepared.tokenizer.decode(source)))
    assert found["loss"] == pytest.approx(smooth / count, rel=1e-5)
    assert found["nll"] == pytest.approx(total / count, rel=1e-5)
    assert found["bleu"] == pytest.approx(bleu(said, right)[0])


def test_translation_learns_its_pairs_by_heart(tmp_path):
    """Positive control: what it says after training is what it was told."""
    pytest.importorskip("sacrebleu")
    recipe = tiny("translation")
    recipe = recipe.replace(
        data=recipe.data.replace(held_out=0.0),
        model=recipe.model | {"d_model": 32, "dropout": 0.0},
        run=recipe.run.replace(steps=250, accumulate=1, eval_every=None),
    )
    model = train(recipe, out=tmp_path, device="cpu").model
    said = [rows[0]["text"] for rows in beam_search(model, [a for a, _ in PAIRS], n_beams=2, max_new_tokens=40)]
    assert bleu(said, [b for _, b in PAIRS])[0] > 90


def test_the_size_of_batches_by_tokens_stays_on_the_way(tmp_path):
    pytest.importorskip("sacrebleu")
    recipe = tiny("translation")
    recipe = recipe.replace(run=recipe.run.replace(steps=1))
    train(recipe, out=tmp_path, device="cpu")
    changed = recipe.replace(objective=recipe.objective.replace(max_tokens=100))
    for allow in (False, True):
        with pytest.raises(UserError, match=r"objective.max_tokens was 120 and is now 100: .*--allow-changes neither"):
            train(changed, out=tmp_path, resume=True, allow_changes=allow, device="cpu")


def test_what_translation_refuses(tmp_path):
    base = TASKS["translation"][0]
    for old, new, message in [
        ("max_tokens = 120", "max_tokens = 20", r"max_tokens 20 is less than data.seq_len 24"),
        ('family = "transformer2017"', 'family = "gpt2"', "translation trains an encoder-decoder"),
        ("n_beams = 2", "n_beams = 0", "n_beams must be at least 1"),
        ("n_beams = 2", "label_smoothing = 1.0", "label_smoothing must be at least 0 and below 1"),
        ("n_beams = 2", 'target = "targt"', r"record:\d+: no field 'targt' \(did you mean 'target'\?\)"),
        ("seq_len = 24", "seq_len = 2", "every one of the .* training pairs has a side above data.seq_len 2"),
    ]:
        assert old in base
        refused(tmp_path, base.replace(old, new), message)


def test_texts_are_cut_at_their_ends_and_the_longer_one_first():
    joint = Joint(list(range(10)), [0] * 10, [None, 0, 0, 0, 0, 0, None, 1, 1, None], [(0, 0)] * 10)
    assert shortened(joint, 10).ids == list(range(10))
    assert shortened(joint, 8).ids == [0, 1, 2, 3, 6, 7, 8, 9]
    assert shortened(joint, 6).ids == [0, 1, 2, 6, 7, 9]  # of two equal ones the second is cut
    with pytest.raises(UserError, match="leaves no room"):
        shortened(joint, 2)


@pytest.mark.parametrize("number", [0, 1])
def test_classes_are_read_as_bert_reads_them(tmp_path, number):
    recipe, prepared = ready(tmp_path, "text_classes", number)
    tokenizer = prepared.tokenizer
    batch = prepared.feed.loader.batch(0)
    rows = [(a, i % 2) for i, (a, _) in enumerate(PAIRS)] if number == 0 else [
        ((a, b), i % 3) for i, (a, b) in enumerate(PAIRS)]  # fmt: skip
    read = {y: [] for y in (0, 1, 2)}
    for text, label in rows:
        joint = tokenizer.encode_joint(*((text,) if isinstance(text, str) else text))
        read[label].append(shortened(joint, 24).ids)
    for row in range(len(batch["tokens"])):
        ids = batch["tokens"][row][batch["segments"][row] == 1].tolist()
        assert ids in read[int(batch["targets"][row])]
    assert bool((batch["types"] == 1).any()) is (number == 1)
    out = prepared.model.eval()(batch["tokens"], segments=batch["segments"], types=batch["types"])
    loss = torch.nn.functional.cross_entropy(out.logits, batch["targets"], reduction="sum")
    assert float(recipe.objective.losses(prepared.model, batch)["class"].sum) == pytest.approx(float(loss), rel=1e-5)


def test_a_regression_is_a_squared_error_with_its_correlations(tmp_path):
    recipe, prepared = ready(tmp_path, "text_scores")
    model, objective = prepared.model.eval(), recipe.objective
    (batch,) = prepared.feed.held_out()
    with torch.no_grad():
        said = model(batch["tokens"], segments=batch["segments"], types=batch["types"]).logits[:, 0]
        found = objective.evaluate(model, [batch])
    expected = pytest.approx(float((said - batch["targets"]).square().mean()), rel=1e-5)
    assert found["loss"] == expected
    assert found["mse"] == expected
    assert -1 <= found["spearman"] <= 1
    assert not batch["targets"].long().equal(batch["targets"])


def test_the_first_token_of_a_word_carries_its_label(tmp_path):
    _, prepared = ready(tmp_path, "word_classes")
    batch = prepared.feed.loader.batch(0)
    for row in range(len(batch["tokens"])):
        ids = batch["tokens"][row][batch["segments"][row] == 1].tolist()
        tokens = [prepared.tokenizer.token(i) for i in ids]
        first = [not t.startswith("##") and not t.startswith("[") for t in tokens]
        assert (batch["targets"][row][: len(ids)] != -100).tolist() == first
        words = "".join(t.removeprefix("##") if t.startswith("##") else f" {t}" for t in tokens[1:-1]).split()
        labels = batch["targets"][row][batch["targets"][row] != -100].tolist()
        assert labels == [len(word) % 2 == 0 for word in words]  # classes by name: O is 0, X is 1; X where even


def test_what_labels_are_refused(tmp_path):
    base = TASKS["text_classes"][0]
    for old, new, message in [
        ("n_classes = 2", "n_classes = 1", r"record:\d+: the label 1 is out of range: classes are 0 to 0"),
        ('"text_classes"', '"text_classes"\nclasses = ["a", "b"]', r"the label '\d' is none of the 2 classes"),
        (
            '"text_classes"',
            '"text_classes"\nclasses = ["a"]',
            r"1 classes \(a\) and the head 'class' 2: set its n_classes",
        ),
        ('heads = ["class"]', 'heads = ["pooled"]', "text_classes needs a head 'class'"),
        ('heads = ["class"]', 'heads = ["token"]', "text_classes needs a head 'class'"),
        ('"text_classes"', '"text_classes"\nhead = "token"', "text_classes needs a head 'token'"),
        ('"text_classes"', '"text_scores"', "needs a head 'class' with n_classes = 1"),
        ('"text_classes"', '"text_classes"\nlabel = "labels"', r"no field 'labels' \(did you mean 'label'\?\)"),
    ]:
        assert old in base
        refused(tmp_path, base.replace(old, new), message)
    both = base.replace('heads = ["class"]', 'heads = ["token"]')
    refused(tmp_path, both.replace('"text_classes"', '"text_classes"\nhead = "token"'), "needs a head with a pool")


@pytest.mark.parametrize("stray", [-1, 0.5, 2, "x", "²"])
@pytest.mark.parametrize("kind", ["text_classes", "word_classes"])
def test_a_stray_label_is_named_and_passed_over_by_policy(tmp_path, kind, stray):
    """Whether a head of two classes or, for whole numbers, of three."""
    labels = [[number % 2 if number != 7 else stray] for number in range(40)]
    words = kind == "word_classes"
    rows = [{"words": ["a"], "labels": y} if words else {"text": f"a {y}", "label": y[0]} for y in labels]
    base = TASKS[kind][0]
    source = table(tmp_path, rows)
    base = base[: base.index("source =")] + source + base[base.index("\ntokenizer") :].replace("0.3", "0.0")
    message = r"qa.jsonl:8: the label .* is out of range: classes are 0 to {}; objective.classes names others.*=skip"
    refused(tmp_path / "two", base, message.format(1))
    if stray == -1:
        refused(tmp_path / "three", base.replace("n_classes = 2", "n_classes = 3"), message.format(2))
    skip = base.replace(source, source.replace(" }", ', unreadable = "skip" }'))
    recipe = recipe_from_toml("schema = 1\n" + skip)
    prepared = prepare(recipe, tmp_path / "run", check(recipe, None, "cpu"), "cpu", lambda _: None, lambda _: None,
                       resume=False, kept=False)  # fmt: skip
    assert len(prepared.feed.loader.rows) == 39
    named = recipe.replace(objective=recipe.objective.replace(classes=("0", "1")))
    prepared = prepare(named, tmp_path / "named", check(named, None, "cpu"), "cpu", lambda _: None, lambda _: None,
                       resume=False, kept=False)  # fmt: skip
    assert len(prepared.feed.loader.rows) == 39


def table(folder, rows):
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'source = {{ kind = "table", path = "{folder}/qa.jsonl" }}'


def answer_recipe(folder, rows, seq_len=24, options=""):
    base = TASKS["answers"][0]
    start, end = base.index("source ="), base.index("\ntokenizer")
    text = base[:start] + table(folder, rows) + base[end:]
    text = text.replace("seq_len = 24", f"seq_len = {seq_len}") + options + "[run]\nsteps = 2\nbatch_size = 2\n"
    return recipe_from_toml("schema = 1\n" + text)


def test_an_answer_is_found_in_its_windows(tmp_path):
    context = " ".join(f"word{i % 10}" for i in range(40))
    at = 2 + context.index("word3")
    rows = [{"question": "where?", "context": f"{n} {context} end", "answer": "word3", "start": at} for n in "abcdefgh"]
    recipe = answer_recipe(tmp_path, rows)
    recipe = recipe.replace(objective=recipe.objective.replace(stride=6))
    prepared = prepare(recipe, tmp_path / "run", check(recipe, None, "cpu"), "cpu", lambda _: None, lambda _: None,
                       resume=False, kept=False)  # fmt: skip
    seen: set[int] = set()
    for batch in prepared.feed.held_out():
        for row in range(len(batch["tokens"])):
            spans = batch["spans"][row]
            said = "".join(map(chr, batch["context"][row].tolist())).rstrip("\0")
            first, last = batch["targets"][row].tolist()
            inside = {tuple(s) for s in spans.tolist() if s[0] >= 0}
            seen |= {i for s in inside for i in range(*s)}
            assert int((batch["segments"][row] == 1).sum()) <= 24
            if (first, last) != (0, 0):
                assert said[int(spans[first, 0]) : int(spans[last, 1])] == "word3"
            else:
                at = said.index("word3")
                assert not {at, at + 4} <= {i for s in inside for i in range(*s)}
    assert seen >= {i for i, letter in enumerate(said) if letter != " "}, "every character is in some window"


def test_the_best_span_lies_in_the_context_and_is_short_enough():
    scores = torch.zeros(6, 2)
    scores[1], scores[5] = 9.0, 9.0  # outside of the context
    scores[2, 0], scores[4, 1], scores[2, 1] = 3.0, 2.0, 1.0
    spans = torch.tensor([[-1, -1], [-1, -1], [0, 4], [5, 7], [8, 9], [-1, -1]])
    assert best_span(scores, spans, 5) == (5.0, 0, 9)
    assert best_span(scores, spans, 2) == (4.0, 0, 4)  # three tokens are too many
    scores[0] = 7.0
    assert best_span(scores, spans, 5)[0] == 5.0 - 14.0
    backwards = torch.zeros(3, 2)
    backwards[2, 0], backwards[1, 1] = 5.0, 5.0
    assert best_span(backwards, torch.tensor([[-1, -1], [0, 1], [1, 2]]), 9)[0] == 5.0  # never end before start


def test_answers_evaluate_as_squad_does(tmp_path):
    """A head that is told the truth answers everything; one below the threshold says nothing."""
    rows = [{"question": "who?", "context": f"{a} in a house", "answer": a.split()[1], "start": a.index(" ") + 1}
            for a, _ in PAIRS]  # fmt: skip
    rows += [{"question": "why?", "context": f"{b} oder nicht", "answer": "", "start": ""} for _, b in PAIRS]
    recipe = answer_recipe(tmp_path, rows)
    prepared = prepare(recipe, tmp_path / "run", check(recipe, None, "cpu"), "cpu", lambda _: None, lambda _: None,
                       resume=False, kept=False)  # fmt: skip
    batches = list(prepared.feed.held_out())

    class Oracle:
        def __init__(self):
            self.left = iter(batches)

        def __call__(self, tokens, targets, **_):
            batch = next(self.left)
            scores = torch.zeros(*tokens.shape, 2)
            for row, (first, last) in enumerate(batch["targets"].tolist()):
                scores[row, first, 0] = scores[row, last, 1] = 5.0
            loss = type("Loss", (), {"sum": torch.tensor(1.0), "count": torch.tensor(2)})
            return type("Out", (), {"heads": {"span": scores}, "losses": {"span": loss}})

    assert recipe.objective.replace(threshold=0.0).evaluate(Oracle(), batches) == {
        "loss": 0.5, "exact_match": 1.0, "f1": 1.0
    }  # fmt: skip
    found = recipe.objective.replace(threshold=100.0).evaluate(Oracle(), batches)
    shares = [int((b["targets"].sum(1) == 0).sum()) for b in batches]
    assert found["exact_match"] == pytest.approx(sum(shares) / sum(len(b["targets"]) for b in batches))
    assert recipe.objective.evaluate(Oracle(), batches)["exact_match"] < 1.0, "without a threshold there is always one"


def alone(batch):
    """The rows of a batch, each in a batch of its own without padding."""
    for row, length in enumerate(batch["segments"].sum(1).tolist()):
        yield {
            name: value[row : row + 1, :length] if value.shape[1:2] == batch["segments"].shape[1:] else value[row][None]
            for name, value in batch.items()
        }


@pytest.mark.parametrize("kind", ["answers", "text_classes", "text_scores", "word_classes"])
def test_what_an_evaluation_says_does_not_depend_on_who_is_in_the_batch(tmp_path, kind):
    recipe = tiny(kind)
    if kind == "answers":
        draw = np.random.default_rng(0)
        rows = [{"question": "who?", "context": " ".join(draw.choice(["anna", "saw", "ben", "end"], n)) + " end",
                 "answer": "end", "start": ""} for n in (1, 2, 9, 12) for _ in range(12)]  # fmt: skip
        recipe = answer_recipe(tmp_path, [row | {"start": len(row["context"]) - 3} for row in rows])
    prepared = prepare(recipe, tmp_path / "run", check(recipe, None, "cpu"), "cpu", lambda _: None, lambda _: None,
                       resume=False, kept=False)  # fmt: skip
    model, batches = prepared.model.eval(), list(prepared.feed.held_out())
    assert any((batch["segments"] == 0).any() for batch in batches), "some rows are padded"
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(5):
            for parameter in model.parameters():
                parameter.normal_(0, 0.5, generator=draw)
            together = recipe.objective.evaluate(model, batches)
            apart = recipe.objective.evaluate(model, [one for batch in batches for one in alone(batch)])
            assert together == pytest.approx(apart, rel=1e-4), together


def test_the_answers_that_are_refused(tmp_path):
    rows = [{"question": "who?", "context": "it was anna", "answer": "anna", "start": 3}]
    with pytest.raises(UserError, match=r"qa.jsonl:1: the answer 'anna' is not at character 3; it stands at 7"):
        train(answer_recipe(tmp_path, rows * 9, options=""), out=tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match="stride must be at least 1"):
        Answers(stride=0)


def test_the_contrastive_loss_by_hand():
    left = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    right = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [0.1, 1.0], [1.0, 0.2]]), dim=1)
    objective = Contrastive(temperature=0.5)
    scores = (left @ right.T / 0.5).tolist()
    plain = sum(-math.log(math.exp(row[i]) / sum(map(math.exp, row))) for i, row in enumerate(scores))
    found = objective._loss(left, right, torch.tensor([1, 2, 3]))
    assert float(found.sum) == pytest.approx(plain, rel=1e-5)
    assert int(found.count) == 3
    # The first and the third second text are the same: neither is a negative of the other.
    masked = 0.0
    for i, row in enumerate(scores):
        kept = [s for j, s in enumerate(row) if j == i or {i, j} != {0, 2}]
        masked -= math.log(math.exp(row[i]) / sum(map(math.exp, kept)))
    assert float(objective._loss(left, right, torch.tensor([1, 2, 1])).sum) == pytest.approx(masked, rel=1e-5)


def test_pools_read_the_real_tokens():
    hidden = torch.arange(12.0).view(2, 3, 2)
    segments = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pooled(hidden, segments, "mean").tolist() == [[1.0, 2.0], [8.0, 9.0]]
    assert pooled(hidden, segments, "first").tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert pooled(hidden, segments, "last").tolist() == [[2.0, 3.0], [10.0, 11.0]]


def test_contrastive_needs_its_batch_whole(tmp_path):
    base = TASKS["contrastive"][0]
    for run, message in [
        ("accumulate = 2", "compares all pairs of a batch, which parts of it cannot: set run.accumulate to 1"),
        ("batch_size = 1", "takes its negatives from the batch"),
    ]:
        with pytest.raises(UserError, match=message):
            train(recipe_from_toml(f"schema = 1\n{base}[run]\n{run}\n"), out=tmp_path, device="cpu")
    for bad in ({"temperature": 0.0}, {"pool": "max"}):
        with pytest.raises(UserError):
            Contrastive(**bad)


def test_images_are_augmented_in_training_alone_and_read_at_another_resolution(tmp_path):
    recipe, prepared = ready(tmp_path, "image_classes")
    loader, objective = prepared.feed.loader, recipe.objective
    assert [list(b["images"].shape[1:]) for b in prepared.feed.held_out()] == [[1, 8, 8]]
    n = loader.order.n_rows
    first, second = ({int(i): loader.rows.example(int(i), e)["images"].tobytes() for i in range(n)} for e in (0, 1))
    assert sum(first[i] != second[i] for i in range(n)) > n // 2
    images = recipe.data.source.open()
    for batch in prepared.feed.held_out():
        plain = {objective.pixels(images.pixels(i)).numpy().tobytes(): images.labels[i] for i in range(len(images))}
        for image, label in zip(batch["images"], batch["targets"].tolist(), strict=True):
            assert plain[image.numpy().tobytes()] == label
    big = recipe.replace(objective=objective.replace(pixels=objective.pixels.replace(size=(12, 16))))
    assert train(big, out=tmp_path / "big", device="cpu").steps == 20


def test_what_image_classes_refuses(tmp_path):
    base = TASKS["image_classes"][0]
    for old, new, message in [
        ("n_classes = 3", "n_classes = 4", r"the data have 3 classes \(0, 1, 2\) and the head 'class' 4"),
        ("n_classes = 3", "n_classes = 2", r"image:\d+ of '.*y.npy': 2 is none of the 2 classes"),
        ("n_channels = 1", "n_channels = 3", "the images have 1 channels and the model reads 3"),
        ("patch_size = 4", "patch_size = 8", "steps = 1"),
        ("augment = {", "pixels = { size = [9, 8] }\naugment = {", "images of 9 x 8 do not cut into patches of 4 x 4"),
        ('family = "vit"', 'family = "bert"', "."),
        ('kind = "image_arrays"', 'kind = "image_array"', r"did you mean 'image_arrays'"),
    ]:
        assert old in base
        if message not in ("steps = 1", "."):
            refused(tmp_path, base.replace(old, new), message)
    # Without what says nothing beside images, and is refused first.
    lines = TASKS["text_classes"][0].splitlines(keepends=True)
    texts = "".join(line for line in lines if not line.startswith(("tokenizer", "seq_len")))
    refused(
        tmp_path, TASKS["text_classes"][0].replace('"text_classes"', '"image_classes"'), "data.tokenizer has no effect"
    )
    refused(tmp_path, texts.replace('"text_classes"', '"image_classes"'), "trains a model that reads images")
    vit = base[: base.index("[data]")] + texts[texts.index("[data]") :].replace('"text_classes"', '"image_classes"')
    refused(tmp_path, vit, "image_classes reads images")


def test_a_span_loss_is_finite_beside_padding():
    """Masked scores have an infinite mean, which a smoothing of 0 must not multiply."""
    tokenizer = train_wordpiece([a for a, _ in PAIRS], 60)
    recipe = tiny("answers")
    from phylon.train.recipe import model_spec

    model = build(model_spec(recipe, tokenizer.vocab_size), device="cpu")
    rows = [{"tokens": np.arange(5, 5 + n), "segments": np.ones(n, np.int64)} for n in (3, 9)]
    batch = padded(rows)
    out = model(**batch, targets={"span": torch.tensor([[1, 2], [3, 4]])})
    assert math.isfinite(float(out.losses["span"].sum))


def test_cosines_are_fp32_under_autocast():
    """The temperature makes twenty of one, and of its rounding."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.nn.functional.normalize(torch.randn(6, 16, generator=draw), dim=-1) for _ in range(2))
    plain = Contrastive()._loss(left, right, torch.arange(6)).sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Contrastive()._loss(left, right, torch.arange(6)).sum, plain)


def test_folders_called_by_numbers_keep_their_names(tmp_path):
    """Folders go by name (0, 1, 10, 2, …), so that the number of a class is not what its folder is called."""
    pillow = pytest.importorskip("PIL.Image")
    for name in map(str, range(11)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            pillow.new("L", (8, 8), int(name)).save(tmp_path / "images" / name / f"{number}.png")
    recipe = tiny("image_classes")
    source = ImageFolder(path=str(tmp_path / "images"), channels=1)
    recipe = recipe.replace(
        model=recipe.model | {"n_classes": 11},
        data=recipe.data.replace(source=source),
        run=recipe.run.replace(steps=1),
    )
    model = train(recipe, out=tmp_path / "run", device="cpu").model
    assert model.labels["class"][2] == "10"


def test_a_greedy_translation_is_as_long_as_a_searched_one_may_be(tmp_path, monkeypatch):
    _, prepared = ready(tmp_path, "translation")
    model, sources = prepared.model.eval(), [[5], [5] * 9]
    objective = Translation(n_beams=1)
    rows = [{"tokens": [6 + i % 3 for i in range(59)], "text": ""}] * 2
    monkeypatch.setattr("phylon.train.objectives.translation.generate", lambda *_, **__: rows)
    decode = model.tokenizer.decode
    assert objective.translate(model, sources) == [decode(rows[0]["tokens"][:n]).strip() for n in (51, 59)]


def test_greedy_translations_are_made_in_batches_of_bounded_size(tmp_path, monkeypatch):
    _, prepared = ready(tmp_path, "translation")
    model, sources = prepared.model.eval(), [[5 + i % 4] * (1 + i % 7) for i in range(12)]
    together, seen = Translation(n_beams=1).translate(model, sources), []

    def counted(model, read, **options):
        seen.append(len(read) * (max(map(len, read)) + options["max_new_tokens"]))
        return generate(model, read, **options)

    monkeypatch.setattr("phylon.train.objectives.translation.generate", counted)
    assert Translation(n_beams=1, max_tokens=200).translate(model, sources) == together
    assert len(seen) > 3
    assert max(seen) <= 200


@pytest.mark.parametrize("saved", [True, False])
def test_an_image_that_breaks_while_training_names_the_last_good_state_and_the_policy(tmp_path, saved):
    from PIL import Image

    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    base = TASKS["image_classes"][0]
    source = next(line for line in base.splitlines() if line.startswith("source"))
    text = base.replace(source, f'source = {{ kind = "image_folder", path = "{tmp_path}/images", channels = 1 }}')
    text = text.replace("n_classes = 3", "n_classes = 2").replace("held_out = 0.3", "held_out = 0")
    recipe = recipe_from_toml(f"schema = 1\n{text}\n[run]\nsteps = 12\nbatch_size = 4\n")
    recipe = recipe.replace(run=recipe.run.replace(save_every=2 if saved else None))

    class Break(Callback):
        def record(self, record, state):
            if state.step == 3:
                for path in (tmp_path / "images").rglob("*.png"):
                    path.write_bytes(path.read_bytes()[:60])

    with pytest.raises(UserError, match=r"of step 3: cannot read the image '.*\.png': .*unreadable=skip") as caught:
        train(recipe, out=tmp_path / "run", device="cpu", callbacks=[Break()])
    state = f"last good state is {tmp_path}/run/checkpoints/step-00000002, --resume" if saved else "no checkpoint yet"
    assert state in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_a_model_answers_as_its_evaluation_has_read_it(tmp_path, monkeypatch, threshold):
    """The same windows of the same length, the same longest answer, the same threshold, also of a saved model."""
    filler = " ".join(f"word{i % 10}" for i in range(40))
    rows = [{"question": "where?", "context": f"{n} {filler} {n}", "answer": n, "start": 0} for n in "abcdefghijkl"]
    recipe = answer_recipe(tmp_path, rows)
    recipe = recipe.replace(objective=recipe.objective.replace(stride=6, max_answer=2, threshold=threshold))
    heard = []
    monkeypatch.setattr(answers, "exact_match", lambda said, right: heard.append((said, right[0])) or 0.0)
    done = train(recipe, out=tmp_path / "run", device="cpu")
    last = heard[-len(heard) // 2 :] if done.metrics and len(heard) > 2 else heard
    hub.save(hub.load(tmp_path / "run" / "model", device="cpu"), tmp_path / "hf", format="hf")
    for place in (tmp_path / "run" / "model", tmp_path / "hf"):
        model = hub.load(place, device="cpu")
        assert answering(model) == Answering(max_answer=2, stride=6, threshold=threshold, max_tokens=24)
        for said, name in last:
            found = answer(model, "where?", f"{name} {filler} {name}")
            assert found["answer"] == said
            assert len(found["answer"].split()) <= 2
    assert last
    if threshold is None:
        assert all(said for said, _ in last)


def test_what_a_configuration_says_of_answers_is_checked():
    recipe = tiny("answers")
    model = build(model_spec(recipe, 40), seed=0, device="cpu")
    assert answering(model) == Answering()
    for said in ({"max_answer": 0}, {"stride": "far"}, {"max_answers": 3}, 7):
        model.kept = {"task_specific_params": {"phylon_answers": said}}
        with pytest.raises(UserError, match="'task_specific_params' of this model's configuration cannot be read"):
            answering(model)
    model.kept = {"task_specific_params": None}
    assert answering(model) == Answering()

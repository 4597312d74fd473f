"""T5's mixtures of tasks, and distillation: formulas by hand, exact quotas, what is refused."""

import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_toys import teacher, tiny

from phylon import hub
from phylon.data import IGNORE, Mixture, PythonFunctions, Task, Texts
from phylon.model import build
from phylon.spec import UserError
from phylon.train import read_metrics, train
from phylon.train.objectives import NextToken
from phylon.train.objectives.distillation import Distillation, soft_loss, start_from
from phylon.train.objectives.mixing import MixedExamples, mixing_rates, quotas
from phylon.train.prepare import prepare
from phylon.train.recipe import model_spec
from phylon.train.vocabulary import BPE


def test_the_mixing_rates_are_the_papers_formula():
    """T5, section 3.5.2: r_m = min(e_m, K) / sum min(e_n, K), raised to 1/T and normalised again."""
    sizes = [100, 10_000, 1_000_000]
    assert mixing_rates(sizes, None, 1.0).tolist() == pytest.approx([s / 1_010_100 for s in sizes])
    assert mixing_rates(sizes, 1000, 1.0).tolist() == pytest.approx([100 / 2100, 1000 / 2100, 1000 / 2100])
    roots = [math.sqrt(0.1), math.sqrt(1.0), math.sqrt(1.0)]
    assert mixing_rates(sizes, 1000, 2.0).tolist() == pytest.approx([r / sum(roots) for r in roots])
    assert mixing_rates(sizes, 1, 3.0).tolist() == pytest.approx([1 / 3] * 3), "a limit below all sizes: equal mixing"
    assert mixing_rates(sizes, None, 1e9).tolist() == pytest.approx([1 / 3] * 3)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=12), st.sampled_from([1.0, 2.0, 8.0]))
def test_quotas_fill_a_block_and_leave_no_task_out(sizes, temperature):
    rates = mixing_rates(sizes, None, temperature)
    found = quotas(rates)
    assert found.sum() == 1024
    assert found.min() >= 1
    generous = rates * 1024 >= 1
    if generous.all():
        assert (np.abs(found - rates * 1024) <= 1).all()


def mixed(seed=0, sizes=(5, 900, 40)):
    tasks = {f"t{m}": [{"tokens": np.array([m, i])} for i in range(size)] for m, size in enumerate(sizes)}
    return MixedExamples(tasks, mixing_rates(sizes, 300, 2.0), seed)


def test_every_block_holds_its_quota_and_every_task_is_walked_through_evenly():
    found, seen = mixed(), Counter()
    for epoch in range(4):
        places = [found.place(index, epoch) for index in range(len(found))]
        assert np.bincount([task for task, _ in places]).tolist() == found.quota.tolist()
        seen.update(places)
    for task, size in enumerate((5, 900, 40)):
        counts = [seen[task, i] for i in range(size)]
        assert max(counts) - min(counts) <= 1, "no example comes again before all have come"
    assert [mixed().place(i, 7) for i in range(50)] == [found.place(i, 7) for i in range(50)]
    assert [mixed(seed=1).place(i, 7) for i in range(1024)] != [found.place(i, 7) for i in range(1024)]


def test_a_mixture_puts_the_prefix_in_front_and_names_the_task():
    one, two = Texts(("a", "b")), Texts(("c",))
    task = {"input": "text", "target": "text"}
    source = Mixture(tasks=(Task(name="x", source=one, prefix="go: ", **task), Task(name="y", source=two, **task)))
    assert [(r.fields, r.name) for r in source.records()] == [
        ({"text": "a", "input": "go: a", "target": "a", "task": "x"}, "x/text:0"),
        ({"text": "b", "input": "go: b", "target": "b", "task": "x"}, "x/text:1"),
        ({"text": "c", "input": "c", "target": "c", "task": "y"}, "y/text:0"),
    ]
    with pytest.raises(UserError, match="each with a name of its own; got x, x"):
        Mixture(tasks=(Task(name="x", source=one), Task(name="x", source=two)))
    with pytest.raises(UserError, match="no field 'input'"):
        list(Mixture(tasks=(Task(name="x", source=one),)).records())


def test_functions_of_the_standard_library_without_their_docstrings():
    records = list(PythonFunctions(max_bytes=300_000).records())
    assert len(records) > 50
    for record in records:
        assert record.fields["doc"]
        assert f"def {record.fields['name']}" in record.fields["code"]
        assert '"""' + record.fields["doc"] not in record.fields["code"]


def test_a_run_says_the_shares_and_measures_exact_answers(tmp_path):
    said = []
    from phylon.train import Callback

    class Listen(Callback):
        def said(self, message):
            said.append(message)

    recipe = tiny("text_to_text")
    result = train(recipe, out=tmp_path, callbacks=[Listen()], device="cpu")
    shares = [m for m in said if m.startswith("task ")]
    assert [m.split(":")[0] for m in shares] == ["task copy", "task same"]
    # 14 or so examples of the first against min(8, 4) of the second, their square roots.
    sizes = [int(m.split(": ")[1].split()[0]) for m in shares]
    rates = mixing_rates([sizes[0], min(sizes[1], 4)], None, 2.0)
    assert f"{100 * quotas(rates)[0] / 1024:.1f} %" in shares[0]
    assert set(result.metrics) == {"lm", "accuracy", "exact"}
    (last,) = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "samples"]
    assert "wanted: " in last["texts"][0]
    batch_recipe = recipe.objective
    targets = torch.tensor([[5, 1], [6, IGNORE]])
    assert batch_recipe.counts({"targets": targets, "segments": (targets != IGNORE).long()}) == {"lm": 3}


@pytest.mark.parametrize("own", [2, 100])
def test_a_tasks_own_cap_comes_before_the_objectives(tmp_path, own):
    """Below it and above."""
    recipe = tiny("text_to_text")
    copy, same = recipe.data.source.tasks
    source = recipe.data.source.replace(tasks=(copy, same.replace(cap=own)))
    recipe = recipe.replace(
        data=recipe.data.replace(source=source), objective=recipe.objective.replace(cap=3, temperature=1.0)
    )
    said = []
    prepared = prepare(recipe, tmp_path, source, "cpu", said.append, lambda _: None, resume=False, kept=False)
    sizes = [int(m.split(": ")[1].split()[0]) for m in said if m.startswith("task ")]
    assert min(sizes) > 3
    counted = [3, min(sizes[1], own)]
    assert prepared.feed.loader.rows.quota.tolist() == quotas(mixing_rates(counted, None, 1.0)).tolist()


def test_the_exact_share_counts_whole_answers():
    recipe = tiny("text_to_text")
    model = build(model_spec(recipe, 30), seed=0, device="cpu").eval()
    source = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 9, 9]])
    tokens = torch.tensor([[0, 3], [0, 4], [0, 5]])
    out = model(tokens, source=source)
    best = out.logits.argmax(-1)
    targets = best.clone()
    targets[1, 1] = (best[1, 1] + 1) % 30
    targets[2] = torch.tensor([int(best[2, 0]), IGNORE])
    ones = torch.ones_like(tokens)
    batch = {"tokens": tokens, "segments": ones, "source": source, "source_segments": torch.ones_like(source)}
    found = recipe.objective.measure(model, batch | {"targets": targets})
    assert (int(found["exact"].sum), int(found["exact"].count)) == (2, 3)
    assert (int(found["accuracy"].sum), int(found["accuracy"].count)) == (4, 5)


def test_the_soft_loss_is_hintons_by_hand():
    student = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 3.0]], requires_grad=True)
    wanted = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    for temperature in (1.0, 2.5):
        p, q = (torch.softmax(x / temperature, -1) for x in (wanted, student))
        by_hand = temperature**2 * (p * (p.log() - q.log())).sum()
        loss = soft_loss(student, wanted, temperature)
        torch.testing.assert_close(loss.sum, by_hand)
        assert int(loss.count) == 2
        (grad,) = torch.autograd.grad(loss.sum, student)
        torch.testing.assert_close(grad, temperature * (q - p).detach())
    assert float(soft_loss(wanted, wanted, 3.0).sum) == pytest.approx(0, abs=1e-6)


def test_the_gradient_is_a_quarter_of_the_teachers_and_three_of_the_labels(tmp_path):
    recipe = tiny("distillation")
    objective = recipe.objective
    assert (objective.soft, objective.temperature) == (0.25, 1.0)
    own = hub.load(teacher(), device="cpu")
    model = build(model_spec(recipe, own.tokenizer.vocab_size), seed=5, device="cpu").train()
    tokens = torch.randint(own.tokenizer.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    targets = torch.where(
        torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.7, tokens.roll(-1, 1), IGNORE
    )
    batch = {"tokens": tokens, "segments": torch.ones_like(tokens), "targets": targets}
    counts, losses = objective.counts(batch), objective.losses(model, batch)
    n = int((targets != IGNORE).sum())
    assert counts == {"lm": n, "soft": n}
    found = torch.autograd.grad(objective.summed(losses, counts) / n, list(model.parameters()))
    asked = targets != IGNORE
    logits, theirs = model(tokens).logits[asked], own.eval()(tokens).logits[asked].detach()
    hard = torch.nn.functional.cross_entropy(logits, targets[asked])
    p = torch.softmax(theirs, -1)
    soft = (p * (p.log() - torch.log_softmax(logits, -1))).sum(-1).mean()
    wanted = torch.autograd.grad(0.75 * hard + 0.25 * soft, list(model.parameters()))
    for mine, by_hand in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, by_hand, rtol=1e-4, atol=1e-6)
    means = {name: float(loss.mean.detach()) for name, loss in losses.items()}
    assert objective.total(means) == pytest.approx(float(0.75 * hard + 0.25 * soft), rel=1e-5)


def test_the_student_starts_with_all_but_the_experts():
    own = hub.load(teacher(), device="cpu")
    recipe = tiny("distillation")
    student = build(model_spec(recipe, own.tokenizer.vocab_size), seed=5, device="cpu")
    fresh = {name: p.clone() for name, p in student.named_parameters()}
    copied = start_from(student, own)
    for name, parameter in student.named_parameters():
        if ".ffn." in name:
            assert torch.equal(parameter, fresh[name])
        else:
            assert name in copied
            assert torch.equal(parameter, own.get_parameter(name))
    assert any(".ffn." in name for name in fresh)
    assert not any(".experts." in name for name in copied)
    other = build(model_spec(recipe.replace(model=recipe.model | {"d_model": 8}), 5), seed=0, device="cpu")
    with pytest.raises(UserError, match=r'set objective.start = "seed"'):
        start_from(other, own)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("text_to_text", {"model": {"family": "llama"}}, "text_to_text trains an encoder-decoder"),
        ("text_to_text", {"objective.temperature": 0.0}, "temperature must be at least 0.01"),
        ("text_to_text", {"objective.cap": 0}, "cap must be at least 1"),
        ("text_to_text", {"objective.input": "inputs"}, "did you mean 'input'"),
        ("text_to_text", {"objective.temprature": 2.0}, "did you mean 'temperature'"),
        ("distillation", {"objective.soft": 1.5}, "soft is the teacher's share"),
        ("distillation", {"objective.teacher": "no/such/model"}, "no/such/model"),
        ("distillation", {"data.tokenizer": "char"}, "teacher and student must share one vocabulary"),
        ("distillation", {"model.vocab_size": 99}, "set model.vocab_size to"),
        ("distillation", {"objective.task": "translation"}, "distillation learns tokens"),
    ],
)
def test_mistakes_are_one_line(tmp_path, kind, changes, words):
    recipe = tiny(kind)
    if changes == {"data.tokenizer": "char"}:
        changes = {**changes, "data.source.texts": ["other letters: äöü. " * 9]}
    with pytest.raises(UserError) as caught:
        train(recipe, out=tmp_path / "run", overrides=changes, device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_next_token_weighs_each_token():
    """The gradient of the weighted mean; a weight of 0 is a target less."""
    recipe = tiny("next_token")
    model = build(model_spec(recipe, 20), seed=0, device="cpu").train()
    tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "segments": torch.ones_like(tokens), "targets": tokens.roll(-1, 1)}
    batch["targets"][:, -1] = IGNORE
    weights = torch.tensor([[1.0, 0.5, 0.0, 2.0, 1.0, 9.0]] * 2)
    weighed = batch | {"weights": weights}
    objective = NextToken()
    logits = model(tokens).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    wanted = (each.view(2, 6) * weights)[:, :-1].sum() / weights[:, :-1].sum()
    found = objective.losses(model, weighed)["lm"]
    torch.testing.assert_close(found.mean, wanted)
    assert objective.counts(weighed) == {"lm": 9.0}
    ones = objective.losses(model, batch | {"weights": torch.ones(2, 6)})["lm"]
    torch.testing.assert_close(ones.sum, objective.losses(model, batch)["lm"].sum)
    assert isinstance(tiny("distillation").objective, Distillation)


def soft_losses(out):
    return [r["losses"]["soft"] for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "step"]


def test_another_teacher_in_the_same_place_is_noticed(tmp_path):
    """By the next run of the process, which learns from it, and by a resumed one, which names it."""
    place = tmp_path / "teacher"
    shutil.copytree(teacher(), place)
    recipe = tiny("distillation")
    recipe = recipe.replace(objective=recipe.objective.replace(teacher=str(place), start="seed"))
    recipe = recipe.replace(run=recipe.run.replace(steps=2))
    train(recipe, out=tmp_path / "first", device="cpu")
    other = hub.load(place, device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    hub.save(other, place, replace=True)
    train(recipe, out=tmp_path / "second", device="cpu")
    assert soft_losses(tmp_path / "second")[0] != pytest.approx(soft_losses(tmp_path / "first")[0], rel=1e-3)
    more = recipe.replace(run=recipe.run.replace(steps=3))
    train(more, out=tmp_path / "second", resume=True, allow_changes=True, device="cpu")
    with pytest.raises(UserError, match=rf"the teacher '{place}' is not the one of this run: .* --allow-changes"):
        train(recipe, out=tmp_path / "first", resume=True, device="cpu")
    train(more, out=tmp_path / "first", resume=True, allow_changes=True, device="cpu")
    records = [list(read_metrics(tmp_path / run / "metrics.jsonl")) for run in ("first", "second")]
    said = [next(r["changes"] for r in found if r["kind"] == "resumed") for found in records]
    assert [f"the teacher '{place}' has changed" in changes for changes in said] == [True, False]


def test_another_architecture_to_begin_from_is_named(tmp_path):
    """The weights are in the checkpoint; what the model does with them is not."""
    place = tmp_path / "start"
    shutil.copytree(teacher(), place)
    recipe = tiny("next_token").replace(model={"from": str(place)})
    recipe = recipe.replace(data=recipe.data.replace(tokenizer=BPE()), run=recipe.run.replace(steps=2))
    train(recipe, out=tmp_path / "run", device="cpu")
    text = (place / "phylon.json").read_text()
    assert '"theta": 10000.0' in text
    (place / "phylon.json").write_text(text.replace('"theta": 10000.0', '"theta": 500.0'))
    with pytest.raises(UserError, match=rf"the model '{place}' is not the one of this run"):
        train(recipe, out=tmp_path / "run", resume=True, device="cpu")

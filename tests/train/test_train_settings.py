"""Settings that take each other's place: who wins is said, and nothing that was given is lost in silence."""

import pytest
from objective_toys import tiny

from phylon.spec import UserError, to_data
from phylon.train import Linear, RollBack, load_recipe, recipe_from_toml, recipe_to_toml, train
from phylon.train.budget import TimeBudget
from phylon.train.callbacks import Callback
from phylon.train.doubtful import doubtful
from phylon.train.prepare import check, prepare
from phylon.train.recipe import apply_overrides, with_values
from phylon.train.resume import recipe_changes


def length(recipe):
    return recipe.run.steps, recipe.run.epochs, recipe.run.max_minutes


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("text-classes", {"run.steps": 7}, (7, None, None)),
        ("demo", {"run.steps": 20_000}, (20_000, None, None)),
        ("demo", {"run.epochs": 2}, (1000, 2, None)),
        ("demo", {"run.max_minutes": 9}, (3000, None, 9.0)),
        ("demo", {"run.steps": 5, "run.max_minutes": 9}, (5, None, 9.0)),
        ("demo", {"run.max_minutes": 9, "run.steps": 5}, (5, None, 9.0)),
        ("vit", {"run.max_minutes": 3, "run.epochs": None, "run.steps": 8}, (8, None, 3.0)),
        ("vit", {"run.steps": 8, "run.epochs": None}, (8, None, None)),
    ],
)
def test_the_command_line_has_the_say_over_the_length_of_a_run(name, changes, wanted):
    assert length(load_recipe(name, changes)) == wanted


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("demo", {"run.steps": 5, "run.epochs": 2}, r"run.steps has no effect, since run.epochs = 2"),
        (
            "vit",
            {"run.max_minutes": 3},
            r"run.epochs = 50 .* run.max_minutes = 3.0; choose one and set the other to none",
        ),
        ("translation", {"run.batch_size": 64}, r"run.batch_size has no effect, since objective.max_tokens = 25000"),
        ("vit", {"data.seq_len": 64}, r"data.seq_len has no effect, since this objective reads no text"),
        ("vit", {"data.tokenizer": "char"}, r"data.tokenizer has no effect"),
        (
            "finetune",
            {"data.tokenizer.vocab_size": 300},
            r"data.tokenizer.vocab_size .* the model that model.from names",
        ),
        ("demo", {"model.from": "smollm2", "data.tokenizer": "char"}, r"data.tokenizer has no effect"),
    ],
)
def test_what_would_be_lost_is_refused_with_what_takes_its_place(name, changes, words):
    with pytest.raises(UserError, match=words):
        load_recipe(name, changes)


def test_a_file_that_says_both_is_refused_and_a_runs_own_recipe_is_not(tmp_path):
    text = recipe_to_toml(load_recipe("text-classes"))
    assert "steps" not in text
    with pytest.raises(UserError, match=r"run.steps has no effect, since run.epochs = 3"):
        recipe_from_toml(text.replace("epochs = 3", "epochs = 3\nsteps = 9"))
    translation = load_recipe("translation")
    assert "batch_size" not in recipe_to_toml(translation)
    for name in ("text-classes", "translation", "vit", "finetune", "demo"):
        recipe = load_recipe(name)
        assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
    # The tokenizer of another recipe makes way for that of the model, and is not there to differ at a resumption.
    started = load_recipe("demo", {"model.from": "smollm2"})
    assert recipe_changes(to_data(started), to_data(recipe_from_toml(recipe_to_toml(started)))) == []


@pytest.mark.parametrize("turned", [False, True])
def test_values_that_only_agree_together_may_come_in_any_order(turned):
    for name, changes in (
        ("demo", {"run.accumulate": 16, "run.batch_size": 16}),
        ("vit", {"run.max_minutes": 3, "run.epochs": None}),
        ("demo", {"schedule.total": 30, "schedule.warmup": 10}),
        ("demo", {"objective.pairs": "next_sentence", "objective.kind": "masked_language"}),
    ):
        given = dict(reversed(changes.items())) if turned else changes
        data = to_data(load_recipe(name, given))
        for path, value in changes.items():
            table, key = path.split(".")
            assert data[table].get(key) == (value if key != "pairs" else {"kind": value, "random": 0.5})
    whole = {"model": {"family": "llama", "d_model": 32}, "model.vocab_size": 10}
    model = load_recipe("demo", dict(reversed(whole.items())) if turned else whole).model
    assert model == {"family": "llama", "d_model": 32, "vocab_size": 10}
    assert load_recipe("translation", {"run.accumulate": 30}).run.accumulate == 30, "its batches have no fixed rows"


def said_of(recipe, folder):
    source = check(recipe, None, "cpu")
    made = prepare(recipe, folder, source, "cpu", lambda m: None, lambda t: None, resume=False, kept=False)
    return list(doubtful(recipe, made.feed.loader, made.feed.held_out is not None))


def test_what_spoils_each_other_is_said(tmp_path):
    recipe = apply_overrides(tiny("next_token"), {"run.eval_every": None})
    assert said_of(recipe, tmp_path / "a") == []
    late = recipe.replace(schedule=Linear(warmup=2, total=10))
    assert "schedule.total is 10 and the run has 20 steps: from step 10 on" in said_of(late, tmp_path / "a")[0]
    assert "rises to" in said_of(recipe.replace(schedule=Linear(warmup=30)), tmp_path / "a")[0]
    rolling = recipe.replace(run=recipe.run.replace(on_spike=RollBack()))
    assert "without run.save_every" in said_of(rolling, tmp_path / "a")[0]
    assert said_of(rolling.replace(run=rolling.run.replace(save_every=5)), tmp_path / "a") == []
    nothing = with_values(recipe, {"data.held_out": 0.0, "run.eval_every": 5, "run.eval_rows": 2})
    assert [m.partition(" ")[0] for m in said_of(nothing, tmp_path / "b")] == ["run.eval_every", "run.eval_rows"]


def test_a_batch_larger_than_the_data_is_said_with_its_numbers(tmp_path):
    class Said(Callback):
        def __init__(self):
            self.all = []

        def said(self, message):
            self.all.append(message)

    said = Said()
    recipe = apply_overrides(tiny("text_classes"), {"run.batch_size": 64, "run.steps": 1})
    train(recipe, out=tmp_path / "run", device="cpu", callbacks=[said])
    (line,) = [m for m in said.all if "run.batch_size is 64 and the training data are" in m]
    rows = int(line.split(" rows")[0].split()[-1])
    assert f"set run.batch_size={rows} or less" in line
    assert not [m for m in said_of(apply_overrides(recipe, {"run.batch_size": rows}), tmp_path) if "batch_size" in m]


def test_a_plan_knows_how_many_steps_there_is_time_for():
    budget = TimeBudget(1000.0, 50)
    budget.begin(0, 0.0)
    total, _ = budget.plan(2, 2.0)
    assert (total, budget.room) == (50, 2 + int(1000 - budget.reserve - 2))


def test_steps_that_end_a_run_before_its_time_are_said(tmp_path):
    class Said(Callback):
        all = ()

        def said(self, message):
            self.all = (*self.all, message)

    said = Said()
    recipe = apply_overrides(tiny("next_token"), {"run.steps": 4, "run.max_minutes": 60, "run.threads": 1})
    train(recipe, out=tmp_path / "run", device="cpu", callbacks=[said])
    assert sum("run.steps = 4 ends this run before its run.max_minutes = 60 are over" in m for m in said.all) == 1

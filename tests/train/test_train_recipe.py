"""Recipes: the files that come with the library, TOML both ways, overrides, and one-line errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phylon.data import JsonLines, TextFile, Texts
from phylon.spec import UserError, override
from phylon.train import (
    BPE,
    WSD,
    AdamW,
    Characters,
    DataRecipe,
    InverseSqrt,
    Linear,
    Loaded,
    Recipe,
    RunRecipe,
    Unigram,
    WordPiece,
    builtin_recipes,
    load_recipe,
    recipe_from_toml,
    recipe_to_toml,
)
from phylon.train.recipe import model_spec
from phylon.train.resume import recipe_changes


def test_builtin_recipes_are_complete_and_go_to_toml_and_back():
    assert {"demo", "tinygpt"} <= set(builtin_recipes())
    for name in builtin_recipes():
        recipe = load_recipe(name)
        assert recipe_from_toml(recipe_to_toml(recipe)) == recipe


def test_tinygpt_is_the_guides_toy():
    recipe = load_recipe("tinygpt")
    (sentence,) = recipe.data.source.texts
    assert (len(sentence), len(set(sentence)), recipe.data.source.repeat) == (19, 17, 8)
    assert recipe.data.seq_len == 152
    assert recipe.optim.lr == 3e-3


recipes = st.builds(
    Recipe,
    model=st.sampled_from([{"preset": "gpt2"}, {"family": "llama", "d_model": 64}]),
    data=st.builds(
        DataRecipe,
        source=st.sampled_from(
            ["python", TextFile(path="a.txt"), JsonLines(path="b.jsonl", field="c"), Texts(("ab", "c"), repeat=3)]
        ),
        tokenizer=st.sampled_from(
            [BPE(vocab_size=300), Characters(), Loaded(path="x"), Unigram(), WordPiece(lowercase=False)]
        ),
        held_out=st.floats(0, 0.5),
        max_bytes=st.none() | st.integers(1, 9),
    ),
    optim=st.builds(AdamW, lr=st.floats(1e-6, 1), clip=st.none() | st.floats(0.1, 10)),
    schedule=st.sampled_from([WSD(), Linear(warmup=3), InverseSqrt(), Linear(total=7)]),
    run=st.builds(
        RunRecipe,
        max_minutes=st.none() | st.floats(0.1, 9),
        precision=st.sampled_from(["fp32", "bf16", "auto"]),
        save_every=st.none() | st.integers(1, 9),
        threads=st.none() | st.integers(1, 4),
    ),
)


@given(recipe=recipes)
def test_every_recipe_goes_to_toml_and_back(recipe):
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe


def test_overrides_reach_every_table():
    changes = {
        "model.d_model": 128,
        "optim.lr": 5e-4,
        "schedule": {"kind": "wsd", "warmup": 7},
        "data.source": "python",
        "data.tokenizer.vocab_size": 999,
        "run.max_minutes": None,
    }
    recipe = load_recipe("demo", changes)
    assert recipe.model["d_model"] == 128
    assert recipe.optim.lr == 5e-4
    assert recipe.schedule == WSD(warmup=7)
    assert recipe.data.tokenizer == BPE(vocab_size=999)
    assert recipe.run.max_minutes is None


def test_model_overrides_choose_another_form_or_change_a_preset():
    assert load_recipe("demo", {"model.preset": "gpt2"}).model == {"preset": "gpt2"}
    changed = load_recipe("tinygpt", {"model.decoder.blocks.*.attn.dropout": 0.5}).model
    assert changed == {"preset": "tinygpt", "set": {"decoder.blocks.*.attn.dropout": 0.5}}
    assert load_recipe("tinygpt").model == {"preset": "tinygpt"}


def test_a_family_takes_the_tokenizers_vocabulary():
    spec = model_spec(load_recipe("demo"), 777)
    assert spec.decoder.embed.vocab_size == spec.heads["lm"].vocab_size == 777
    assert model_spec(load_recipe("demo", {"model.vocab_size": 800}), 777).decoder.embed.vocab_size == 800


def test_differences_that_matter_are_listed():
    old, new = load_recipe("demo"), load_recipe("demo", {"optim.lr": 1.0, "run.keep": 9, "run.eval_every": 7})
    from phylon.spec import to_data

    assert recipe_changes(to_data(old), to_data(new)) == [f"optim.lr was {old.optim.lr} and is now 1.0"]
    assert recipe_changes(to_data(old), to_data(old)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 1\n[modle]\n", "did you mean 'model'"),
        ("schema = 1\n[model]\npreset='gpt2'\n[run]\nstep = 3\n", "did you mean 'steps'"),
        ("schema = 1\n[model]\npreset='gpt2'\n[optim]\nlearning_rate = 3\n", "unknown field 'learning_rate'"),
        ("schema = 1\n[model]\npreset='gpt2'\n[optim]\nkind='adamv'\n", "did you mean 'adamw'"),
        ("schema = 1\n[model]\npreset='gpt2'\n[run]\nsteps = 0\n", "steps must be at least 1"),
        ("schema = 1\n[model]\npreset='gpt2'\n[run]\nprecision = 'fp8'\n", "precision"),
        ("schema = 1\n[model]\npreset='gpt2'\n[run]\naccumulate = 9\n", "accumulate"),
        ("schema = 1\n[model]\npreset='gpt2'\n[data]\nheld_out = 1.0\n", "held_out"),
        ("schema = 1\n[model]\npreset='gpt2'\n[data]\ntokenizer={kind='bpe', vocab_size=9}\n", "257"),
        ("schema = 1\n[model]\npreset='gpt2'\nfamily='llama'\n", "exactly one of family, preset, spec"),
        ("schema = 2\n[model]\npreset='gpt2'\n", "schema"),
        ("[model]\npreset='gpt2'\n", "schema"),
        ("schema = 1\n[run]\nsteps = 3\n", "[model] is missing"),
        ("schema = 1\nmodel = 3\n", "[model]"),
        ("schema = ", "TOML"),
    ],
)
def test_bad_recipes_are_one_line_that_names_the_place(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_recipes_and_keys_get_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="did you mean 'tinygpt'"):
        load_recipe("tinygtp")
    with pytest.raises(UserError, match="did you mean 'lr'"):
        load_recipe("demo", {"optim.lrr": 1})
    with pytest.raises(UserError, match="cannot read"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "path", ["optim.lr", "optim.weight_decay", "optim.betas", "optim.clip", "optim.eps", "run.max_minutes"]
)
def test_numbers_that_are_not_finite_are_refused(path, number):
    value = [0.9, float(number)] if path == "optim.betas" else float(number)
    with pytest.raises(UserError) as caught:
        load_recipe("demo", {path: value})
    assert path.rpartition(".")[2] in str(caught.value)
    with pytest.raises(UserError, match=r"model\.d_model"):
        load_recipe("demo", {"model.d_model": float("nan")})


def test_values_that_agree_only_together_are_set_together():
    changed = load_recipe("vit", {"objective.pixels.mean": [0.5], "objective.pixels.std": [0.25]})
    assert (changed.objective.pixels.mean, changed.objective.pixels.std) == ((0.5,), (0.25,))
    with pytest.raises(UserError, match=r"'objective\.pixels\.mean': mean and std must have one number"):
        load_recipe("vit", {"objective.pixels.mean": [0.5], "objective.pixels.std": [0.25, 0.5]})
    with pytest.raises(UserError, match="did you mean 'std'"):
        load_recipe("vit", {"objective.pixels.sdt": [0.25], "objective.pixels.mean": [0.5]})


def test_a_kind_and_what_it_needs_are_set_together():
    changed = load_recipe("demo", {"data.tokenizer.kind": "load", "data.tokenizer.path": "x"})
    assert changed.data.tokenizer == Loaded(path="x")


def test_a_kind_that_is_set_replaces_the_mechanism_and_keeps_what_was_said():
    changed = load_recipe("demo", {"schedule.kind": "wsd", "schedule.decay": 0.3})
    assert changed.schedule == WSD(warmup=40, min_ratio=0.02, decay=0.3)
    assert load_recipe("demo", {"schedule.kind": "linear"}).schedule == Linear(warmup=40, min_ratio=0.02)
    assert load_recipe("tinygpt", {"schedule.kind": "linear"}).schedule == Linear()
    assert load_recipe("demo", {"optim.kind": "adamw"}) == load_recipe("demo")
    assert load_recipe("demo", {"data.tokenizer.kind": "char"}).data.tokenizer == Characters()
    assert load_recipe("demo", {"data.tokenizer.vocab_size": 999, "data.tokenizer.kind": "unigram"}).data.tokenizer == (
        Unigram(vocab_size=999)
    )


def test_what_the_new_kind_does_not_take_goes_back_to_its_default():
    linear = load_recipe("demo", {"schedule": {"kind": "linear", "warmup": 7, "min_ratio": 1.0}})
    zero = load_recipe("demo", {"schedule": {"kind": "warmup_cosine", "warmup": 7, "min_ratio": 0.0}})
    assert override(linear, {"schedule.kind": "wsd"}).schedule == WSD(warmup=7, min_ratio=1.0)
    assert override(zero, {"schedule.kind": "wsd"}).schedule == WSD(warmup=7)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("schedule.kind", "warmup_cosin", "did you mean 'warmup_cosine'"),
        ("schedule.kind", 3, "a kind is a name"),
        ("schedule.kind", "adamw", "unknown Schedule 'adamw'"),
        ("data.tokenizer.kind", "load", 'data.tokenizer={ kind = "load", path = … }'),
        ("run.kind", "wsd", "unknown field 'kind'"),
    ],
)
def test_a_kind_that_does_not_fit_is_named(path, kind, words):
    with pytest.raises(UserError) as caught:
        load_recipe("demo", {path: kind})
    assert words in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_every_trained_vocabulary_can_be_had_from_a_recipe(tmp_path, kind):
    text = ["the cat sat on the mat. ", "a dog ran in the fog. "] * 20
    recipe = load_recipe("demo", {"data.tokenizer": {"kind": kind, "vocab_size": 60}})
    tokenizer = recipe.data.tokenizer.make(lambda: iter(text))
    assert 20 < tokenizer.vocab_size <= 60
    assert "cat" in tokenizer.decode(tokenizer.encode("the cat"))
    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
    with pytest.raises(UserError, match="vocab_size"):
        load_recipe("demo", {"data.tokenizer": {"kind": kind, "vocab_size": 0}})
    with pytest.raises(UserError):
        recipe.data.tokenizer.replace(vocab_size=2).make(lambda: iter(text))

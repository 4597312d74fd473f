"""Every setting of every recipe against every kind of wrong value: one line, exit code 2, nothing begun."""

from functools import cache

import pytest
from objective_toys import TINY, tiny

from phylon.cli.main import main
from phylon.spec import UserError, to_data
from phylon.spec.override import parse_value
from phylon.train import builtin_recipes, load_recipe
from phylon.train.prepare import check
from phylon.train.recipe import apply_overrides

WRONG = ["x", "-1", "0", "nan", "true", "[]", "1" * 23]
NUMBERS = ("-1", "nan", "inf", "true", "")


def settings(data, path=""):
    """Every dotted path of plain data, with its value."""
    for key, value in data.items():
        where = f"{path}.{key}" if path else key
        yield where, value
        if isinstance(value, dict):
            yield from settings(value, where)


@cache
def known():
    """Every setting of the recipes that come with the library, with one that has it."""
    found = {}
    for name in builtin_recipes():
        for path, value in settings(to_data(load_recipe(name))):
            if not path.startswith("model"):
                found.setdefault(path, (name, value))
    return found


def outcome(name, path, text):
    """The line of a refusal, or ``None``; anything else that is raised is a mistake of ours."""
    said = None
    try:
        load_recipe(name, {path: parse_value(text)})
    except UserError as error:
        said = str(error)
    if said is not None:
        assert len(said.splitlines()) == 1
        assert len(said) < 400
        assert path.rpartition(".")[2] in said, (name, path, text, said)
    return said


@pytest.mark.parametrize("text", WRONG)
def test_any_value_of_any_setting_is_taken_or_refused_in_one_line(text):
    assert len(known()) > 100
    answers = [outcome(name, path, text) for path, (name, _) in known().items()]
    assert sum(answer is not None for answer in answers) > len(answers) / 3


def test_no_number_takes_what_is_none():
    """Signs where they are allowed aside: a length penalty, a power that decays."""
    signed = {"objective.length_penalty", "optim.decay_power"}
    for path, (name, value) in known().items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            for text in NUMBERS:
                if text != "-1" or path not in signed:
                    assert outcome(name, path, text) is not None, (path, text)


@pytest.mark.parametrize("path", sorted({path for path, value in known().items() if isinstance(value[1], dict)}))
def test_a_near_miss_in_a_table_names_the_setting(path):
    name, table = known()[path]
    key = next((key for key in table if key != "kind"), None)
    if key is not None and len(key) > 3:
        with pytest.raises(UserError, match=f"did you mean '{key}'"):
            load_recipe(name, {f"{path}.{key[0]}{key[2]}{key[1]}{key[3:]}": 1})


# Kind of tiny run, what is set, and words of the refusal.
REFUSED = [
    ("next_token", ["run.steps=0"], "steps must be at least 1"),
    ("next_token", ["run.stepz=3"], "did you mean 'steps'"),
    ("next_token", ["runs.steps=3"], "did you mean 'run'"),
    ("next_token", ["run.steps=9", "run.epochs=2"], "run.epochs = 2 says how long the run is"),
    ("next_token", ["run.epochs=2", "run.max_minutes=1"], "run.max_minutes = 1.0; choose one"),
    ("next_token", ["run.accumulate=5"], "more parts than the batch has rows"),
    ("next_token", ["run.best=accuracy"], "names no metric"),
    ("masked_language", ["run.best=mlm_acuracy"], "did you mean 'mlm_accuracy'"),
    ("next_token", ["run.best=loss", "data.held_out=0"], "needs held-out data"),
    ("next_token", ["run.best=loss", "run.average=2"], "choose one"),
    ("next_token", ["run.average=2"], "writes 1: set run.save_every=10"),
    ("next_token", ["run.ema=1"], "ema is the decay"),
    ("next_token", ["run.threads=100000"], "run.threads 100000 is more"),
    ("next_token", ["run.precision=fp16"], "needs a GPU"),
    ("next_token", ["run.precision=fp8"], "'fp8' is none of fp32, bf16, fp16, auto"),
    ("next_token", ["run.on_spike={kind='roll_back',margin=0}"], "margin"),
    ("next_token", ["run.seed=-1"], "run.seed"),
    ("next_token", ["data.seq_len=65"], "max_seq_len 64"),
    ("next_token", ["data.held_out=1"], "held_out is a share"),
    ("next_token", ["data.source=nowhere"], "there is no data 'nowhere'"),
    ("next_token", ["data.source={kind='jsonl',path='x',empty='drop'}"], "'drop' is none of refuse, skip"),
    ("next_token", ["data.tokenizer=chars"], "did you mean 'char'"),
    ("next_token", ["data.tokenizer={kind='load',path='x'}"], "no tokenizer at x"),
    ("next_token", ["data.tokenizer={kind='bpe'}", "model.vocab_size=300"], "vocab_size=300"),
    ("next_token", ["model.n_heads=3"], "3"),
    ("next_token", ["model.famly='gpt'"], "famly"),
    ("next_token", ["tune.train=['hed']"], "matches 'hed'"),
    ("next_token", ["tune.freeze=['*']"], "leaves no parameter to train"),
    ("next_token", ["optim.kind=sgd"], "unknown Optimizer 'sgd'"),
    ("next_token", ["optim.kind=muon", "tune.train=['heads*']"], "muon trains the fp32 matrices"),
    ("next_token", ["optim.lr=0"], "lr must be above 0"),
    ("next_token", ["optim.betas=[1, 0]"], "betas"),
    ("next_token", ["schedule.warmup=20", "schedule.total=20"], "warmup 20 must be less than the total"),
    ("next_token", ["objective.balance=-1"], "balance must be at least 0"),
    ("masked_language", ["data.seq_len=2"], "data.seq_len must be at least"),
    ("masked_language", ["data.source={kind='texts',texts=['one text']}"], "the data hold one"),
    ("denoising", ["objective.n_sentinels=0"], "raise objective.n_sentinels"),
    ("denoising", ["objective.corruption=spans"], "unknown Corruption"),
    ("text_to_text", ["objective.target_len=1"], "target_len"),
    ("translation", ["run.batch_size=4"], "objective.max_tokens = 120"),
    ("translation", ["data.seq_len=1"], "leaves no room"),
    ("translation", ["objective.source=en"], "no field 'en'"),
    ("translation", ["objective.n_beams=0"], "n_beams"),
    ("text_classes", ["objective.label=lable"], "no field 'lable'"),
    ("text_classes", ["objective.weight=w"], "no field 'w'"),
    ("text_classes", ["objective.classes=['a','b','c','d','e']"], "set its n_classes to 5"),
    ("text_classes", ["objective.classes=['a','a']"], "each once"),
    ("text_classes", ["objective.head=class2"], "did you mean|needs a head 'class2'"),
    ("text_classes", ["run.best=f2"], "did you mean 'f1'"),
    ("text_scores", ["objective.label=text"], "no field|not a finite number"),
    ("text_scores", ["objective.classes=['a']"], "leave objective.classes out"),
    ("word_classes", ["objective.labels=tags"], "no field 'tags'"),
    ("answers", ["objective.start=at"], "no field 'at'"),
    ("answers", ["objective.stride=0"], "stride must be at least 1"),
    ("contrastive", ["objective.pair=other"], "no field 'other'"),
    ("contrastive", ["run.batch_size=1"], "at least 2"),
    ("contrastive", ["objective.pool=max"], "unknown pool 'max'"),
    ("image_classes", ["data.seq_len=9"], "reads no text"),
    ("image_classes", ["objective.augment.padding=8"], "must be below the 8 pixels"),
    ("image_classes", ["objective.label_smoothing=1"], "label_smoothing"),
    ("distillation", ["objective.teacher=nobody"], "nobody"),
    ("distillation", ["objective.soft=2"], "soft"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED)
def test_what_is_wrong_is_known_before_anything_is_computed(kind, changes, words, monkeypatch):
    """By the recipe, the model and the first item of the data: no tokenizer is made, nothing tokenised."""
    monkeypatch.setattr("phylon.train.prepare._tokenizer", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match=words) as caught:
        check(apply_overrides(tiny(kind), dict(map(_assignment, changes))), None, "cpu")
    assert len(str(caught.value).splitlines()) == 1


def _assignment(text):
    path, _, value = text.partition("=")
    return path, parse_value(value)


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED[::12])
def test_the_command_line_leaves_with_2_and_one_line(kind, changes, words, tmp_path, capfd):
    path, out = tmp_path / "recipe.toml", tmp_path / "run"
    path.write_text("schema = 1\n" + TINY[kind][0] + "\n[run]\nsteps = 20\n")
    given = [word for change in changes for word in ("--set", change)]
    assert main(["train", str(path), "--out", str(out), "--device", "cpu", *given]) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("phylon: ")
    assert not out.exists()

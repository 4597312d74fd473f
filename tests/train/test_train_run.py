"""``phylon.train`` from recipe to folder: the toy's fall, small own runs, resuming, and bad input."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_toys import toy_spec

from phylon import hub
from phylon.data import Aligned, Texts
from phylon.spec import UserError
from phylon.text import char_tokenizer
from phylon.train import (
    Callback,
    Interrupted,
    latest_checkpoint,
    load_recipe,
    read_metrics,
    recipe_from_toml,
    train,
)
from phylon.train.folder import Lock, clear
from phylon.train.prepare import Limited
from phylon.train.sources import changed_files, note_files

SMALL = """
schema = 1
[model]
family = "llama"
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 24
max_seq_len = 16
[data]
source = { kind = "texts", texts = ["the cat sat on the mat. ", "a dog ran in the fog. "], repeat = 20 }
tokenizer = { kind = "char" }
seq_len = 16
held_out = 0.2
[optim]
lr = 1e-2
clip = 1.0
[run]
steps = 12
batch_size = 2
eval_every = 4
"""


def losses(out):
    return {r["step"]: r["loss"] for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "step"}


def check_fall(found, steps):
    """2.930, 0.009, 0.004, 0.003, 0.002, 0.001 at steps 0, 60, …, 300 of the guide."""
    assert 2.8 < found[0] < 3.0
    for step, most in zip(steps, (0.012, 0.006, 0.004, 0.003, 0.0015), strict=False):
        assert found[step] <= most, step


def test_tinygpt_falls_as_the_guide_prints(tmp_path):
    result = train("tinygpt", out=tmp_path / "run", overrides={"run.steps": 61}, device="cpu")
    assert sum(p.numel() for p in result.model.parameters()) == 349_344
    check_fall(losses(result.out), [60])


def test_a_damaged_tokenizer_of_a_run_is_named_with_the_way_on(tmp_path):
    recipe = recipe_from_toml(SMALL).replace(run=recipe_from_toml(SMALL).run.replace(steps=1, eval_every=None))
    out = train(recipe, out=tmp_path / "run", device="cpu").out
    file = out / "tokenizer" / "tokenizer.json"
    whole = file.read_bytes()
    for damage in (lambda: file.write_bytes(whole[:99]), lambda: shutil.rmtree(out / "tokenizer")):
        damage()
        with pytest.raises(UserError, match=rf"put this run's own '{out}/tokenizer' back, or --fresh begins again"):
            train(recipe, out=out, resume=True, device="cpu")


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ({"model.d_model": 32}, True),
        ({"model.n_layers": 2, "model.attention_dropout": 0.1}, True),
        ({"model.n_kv_heads": 1}, True),
        ({"model.max_seq_len": 32}, False),
        ({"model.attention_dropout": 0.1}, False),
    ],
)
def test_changes_are_offered_where_the_parameters_stay(tmp_path, changes, fixed):
    start = {"run.steps": 1, "run.eval_every": None}
    out = train(recipe_from_toml(SMALL), overrides=start, out=tmp_path / "run", device="cpu").out
    for allow in (False, True) if fixed else (False,):
        with pytest.raises(UserError) as caught:
            train(recipe_from_toml(SMALL), overrides=start | changes, out=out, resume=True, allow_changes=allow,
                  device="cpu")  # fmt: skip
        assert ("and --allow-changes neither" if fixed else "or with --allow-changes") in str(caught.value)
        assert all(path in str(caught.value) for path in changes)
    if not fixed:
        train(
            recipe_from_toml(SMALL), overrides=start | changes, out=out, resume=True, allow_changes=True, device="cpu"
        )


@pytest.mark.slow
def test_tinygpt_whole_run(tmp_path):
    check_fall(losses(train("tinygpt", out=tmp_path, device="cpu").out), [60, 120, 180, 240, 300])


def test_a_run_writes_everything_and_its_model_loads(tmp_path):
    seen = []
    recipe = recipe_from_toml(SMALL)
    result = train(recipe, out=tmp_path / "run", sample=lambda model: seen.append(model) or ["hello"], device="cpu")
    assert {p.name for p in result.out.iterdir() if not p.name.startswith(".")} == {
        "recipe.toml",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "report.html",
        "tokenizer",
        "data",
    }
    assert load_recipe(result.out / "recipe.toml") == recipe
    assert result.samples == ["hello"]
    assert seen == [result.model]
    assert result.held_out_loss is not None
    assert not result.model.training
    loaded = hub.load(result.out / "model", device="cpu")
    tokens = torch.tensor([loaded.tokenizer.encode("the cat")])
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)


def test_a_run_goes_on_from_its_folder_as_if_never_stopped(tmp_path):
    class Stop(Callback):
        def record(self, record, run):
            if record["kind"] == "step" and record["step"] == 4:
                os.kill(os.getpid(), signal.SIGINT)

    recipe = recipe_from_toml(SMALL)
    whole = train(recipe, out=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        train(recipe, out=tmp_path / "parts", callbacks=[Stop()], device="cpu")
    parts = train(recipe, out=tmp_path / "parts", resume=True, device="cpu")
    assert losses(whole.out) == losses(parts.out)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True))
    again = train(recipe, out=tmp_path / "parts", resume=True, device="cpu")
    assert again.steps == 12
    assert losses(again.out) == losses(whole.out)


def test_what_a_run_without_a_checkpoint_left_is_not_taken_for_its_own(tmp_path):
    train(recipe_from_toml(SMALL), out=tmp_path / "whole", device="cpu")
    out = tmp_path / "killed"
    (out / "checkpoints" / ".writing-x").mkdir(parents=True)
    (out / ".phylon-run").write_text("")
    (out / "recipe.toml").write_text("")
    (out / "metrics.jsonl").write_text('{"kind": "step", "step": 0, "loss": 9.0}\n')
    char_tokenizer("other letters").save(out / "tokenizer")
    train(recipe_from_toml(SMALL), out=out, resume=True, device="cpu")
    assert losses(out) == losses(tmp_path / "whole")


def test_a_spec_and_data_are_enough(tmp_path):
    recipe = {"data.tokenizer": {"kind": "char"}, "data.seq_len": 12, "run.steps": 2, "data.held_out": 0.0}
    text = tmp_path / "text.txt"
    text.write_text("abcab" * 20)
    from_file = train(toy_spec(), data=text, out=tmp_path / "file", overrides=recipe, device="cpu")
    in_memory = train(toy_spec(), data=Texts(("abcab" * 20,)), out=tmp_path / "memory", overrides=recipe, device="cpu")
    assert losses(from_file.out) == losses(in_memory.out)
    assert from_file.held_out_loss is None


def test_refused_runs_are_one_line(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".phylon-run").write_text("")
    (tmp_path / "old" / "recipe.toml").write_text("")
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    cases = [
        ({"out": tmp_path / "old"}, "already holds a run"),
        ({"out": tmp_path / "old", "resume": True, "fresh": True}, "choose one"),
        ({"out": tmp_path / "mine"}, "is not from a run"),
        ({"out": tmp_path / "mine", "fresh": True}, "is not from a run"),
        ({"out": tmp_path / "file"}, "cannot write"),
        ({"resume": True}, "no run to resume"),
        ({"device": "cdua"}, "cdua"),
        ({"overrides": {"run.threads": 1_000_000}}, "run.threads 1000000 is more than"),
        ({"data": tmp_path / "missing.txt"}, "missing.txt"),
        ({"overrides": {"data.seq_len": 17}}, "max_seq_len 16"),
        ({"overrides": {"model.vocab_size": 3}}, "set model.vocab_size to at least"),
        ({"overrides": {"model.n_head": 3}}, "did you mean 'n_heads'"),
        ({"overrides": {"model.family": "lama"}}, "llama"),
        ({"overrides": {"run.batchsize": 3}}, "did you mean 'batch_size'"),
        ({"overrides": {"data.held_out": 0.99}}, "data.held_out"),
        ({"overrides": {"data.tokenizer": {"kind": "load", "path": str(tmp_path / "none")}}}, "none"),
    ]
    for number, (options, words) in enumerate(cases):
        with pytest.raises(UserError) as caught:
            train(recipe_from_toml(SMALL), **{"device": "cpu", "out": tmp_path / f"run{number}", **options})
        assert words in str(caught.value), options
        assert "\n" not in str(caught.value)
        assert not (tmp_path / f"run{number}").exists(), "a refused run leaves nothing"


def test_mistakes_are_found_before_any_work(tmp_path, monkeypatch):
    def worked(*_args, **_options):
        raise AssertionError("began to work on a run that cannot be")

    monkeypatch.setattr("phylon.train.prepare._tokenizer", worked)
    monkeypatch.setattr("phylon.train.objectives.tokens.tokenise", worked)
    out = tmp_path / "run"
    for changes in ({"model.family": "lama"}, {"model.n_head": 3}, {"model.d_model": 15}, {"data.seq_len": 17}):
        with pytest.raises(UserError):
            train(recipe_from_toml(SMALL), out=out, overrides=changes, device="cpu")
    with pytest.raises(UserError, match="cdua"):
        train(recipe_from_toml(SMALL), out=out, device="cdua")
    assert not out.exists()


def test_fresh_removes_only_what_a_run_wrote_and_only_for_a_good_recipe(tmp_path):
    out, recipe = tmp_path / "run", recipe_from_toml(SMALL)
    (out / "data").mkdir(parents=True)
    (out / "data" / "mine.txt").write_text("precious")
    short = {"run.steps": 1}
    train(recipe, out=out, overrides=short, device="cpu")
    before = sorted(out.rglob("*"))
    for wrong in ({"model.family": "lama"}, {"model.vocab_size": 3}, {"run.best": "acuracy"}, {"run.average": 9}):
        with pytest.raises(UserError):
            train(recipe, out=out, overrides=short | wrong, fresh=True, device="cpu")
        assert sorted(out.rglob("*")) == before, "what was there stays until nothing is wrong with the new run"
    train(recipe, out=out, overrides=short, fresh=True, device="cpu")
    clear(out)
    assert [p.name for p in out.rglob("*")] == ["data", "mine.txt"]
    assert (out / "data" / "mine.txt").read_text() == "precious"


def test_a_new_run_that_cannot_begin_leaves_nothing(tmp_path):
    for wrong in ({"run.best": "acuracy"}, {"run.average": 9}):
        with pytest.raises(UserError):
            train(recipe_from_toml(SMALL), out=tmp_path / "run", overrides=wrong, device="cpu")
        assert not (tmp_path / "run").exists()


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path):
    class Second(Callback):
        refused = 0

        def record(self, record, run):
            if record["kind"] == "step" and record["step"] == 1:
                for options in ({"resume": True}, {"fresh": True}):
                    with pytest.raises(UserError, match="another process is training in"):
                        train(recipe_from_toml(SMALL), out=tmp_path, device="cpu", **options)
                    Second.refused += 1

    short = {"run.steps": 3, "run.save_every": 1}
    result = train(recipe_from_toml(SMALL), out=tmp_path, overrides=short, callbacks=[Second()], device="cpu")
    assert (Second.refused, result.steps) == (2, 3)
    assert train(recipe_from_toml(SMALL), out=tmp_path, overrides=short, resume=True, device="cpu").steps == 3


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_another_process_began_meanwhile_stays(tmp_path, monkeypatch, ended):
    out, other = tmp_path / "run", Lock(tmp_path / "run")

    def meanwhile(*_args):
        other.claim()
        (out / "recipe.toml").write_text("its recipe")
        (out / "checkpoints").mkdir()
        if ended:
            other.release()

    monkeypatch.setattr("phylon.train.run.check_fits", meanwhile)
    with pytest.raises(UserError, match="already holds a run" if ended else "another process is training in"):
        train(recipe_from_toml(SMALL), out=out, device="cpu")
    assert {path.name for path in out.iterdir()} == {".phylon-run", "recipe.toml", "checkpoints"}
    assert (out / "recipe.toml").read_text() == "its recipe"


def test_a_resumption_that_cannot_begin_removes_nothing(tmp_path):
    Lock(tmp_path).claim()
    (tmp_path / "recipe.toml").write_text("of a run without a checkpoint yet")
    with pytest.raises(UserError, match="acuracy"):
        train(recipe_from_toml(SMALL), out=tmp_path, overrides={"run.best": "acuracy"}, resume=True, device="cpu")
    assert (tmp_path / "recipe.toml").read_text() == "of a run without a checkpoint yet"


def test_what_a_resumption_cannot_change_is_refused_before_any_work(tmp_path, monkeypatch):
    recipe, short = recipe_from_toml(SMALL), {"run.steps": 2}
    train(recipe, out=tmp_path, overrides=short, device="cpu")

    def worked(*_args, **_options):
        raise AssertionError("read the data of a run that cannot go on")

    monkeypatch.setattr("phylon.train.run.prepare", worked)
    for changes, allow, words in (
        ({"data.seq_len": 8}, True, "--allow-changes neither"),
        ({"run.batch_size": 3}, True, "--allow-changes neither"),
        ({"optim.lr": 0.5}, False, "or with --allow-changes"),
    ):
        with pytest.raises(UserError, match=words):
            train(recipe, out=tmp_path, overrides=short | changes, resume=True, allow_changes=allow, device="cpu")


def test_data_that_were_moved_or_touched_are_the_same_and_changed_files_are_named(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt").write_text(f"the cat {name} sat on the mat. " * 20)
    short = {"run.steps": 2, "data.held_out": 0.0, "data.source": str(tmp_path / "texts")}
    recipe, out = recipe_from_toml(SMALL), tmp_path / "run"
    train(recipe, out=out, overrides=short, device="cpu")
    os.utime(tmp_path / "texts" / "a.txt", (1, 1))
    assert train(recipe, out=out, overrides=short, resume=True, device="cpu").steps == 2
    (tmp_path / "texts" / "b.txt").write_text("the mat b sat on the cat. " * 20)
    (tmp_path / "texts" / "c.txt").rename(tmp_path / "texts" / "d.txt")
    with pytest.raises(UserError) as caught:
        train(recipe, out=out, overrides=short, resume=True, device="cpu")
    assert str(caught.value) == (
        "the data are not those of this run (changed: 'b.txt'; new: 'd.txt'; gone: 'c.txt'): put them back, or resume "
        "with --allow-changes to go on with what is there"
    )
    assert len(list((out / "data").iterdir())) == 1, "said before anything is tokenised"


@pytest.mark.parametrize("epochs", [None, 3])
def test_data_may_be_changed_on_the_way_if_told(tmp_path, epochs):
    """The fix that the refusal names works, and what is there then is what the next resumption compares with."""
    (tmp_path / "texts").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"the cat {name} sat on the mat. " * 20)
    few = {"run.steps": 2} if epochs is None else {"run.epochs": epochs}
    short = few | {"data.held_out": 0.0, "data.source": str(tmp_path / "texts")}
    recipe, out = recipe_from_toml(SMALL), tmp_path / "run"
    done = train(recipe, out=out, overrides=short, device="cpu").steps
    (tmp_path / "texts" / "c.txt").write_text("the mat c sat on the cat. " * 30)
    later = short | ({"run.steps": 4} if epochs is None else {"run.epochs": epochs + 1})
    with pytest.raises(UserError, match="--allow-changes"):
        train(recipe, out=out, overrides=later, resume=True, device="cpu")
    went = train(recipe, out=out, overrides=later, resume=True, allow_changes=True, device="cpu")
    assert went.steps > done
    (record,) = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "resumed"]
    assert "the training data have changed" in record["changes"]
    assert train(recipe, out=out, overrides=later, resume=True, device="cpu").steps == went.steps


@pytest.mark.parametrize("most", [None, 1000])
def test_files_of_one_name_are_told_apart(tmp_path, most):
    for name in ("en", "de"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(f"a line of {name}\n")
    pairs = Aligned(source=str(tmp_path / "en" / "train.txt"), target=str(tmp_path / "de" / "train.txt"))
    source = pairs if most is None else Limited(pairs, most)
    note_files(source, tmp_path)
    assert changed_files(source, tmp_path) == ""
    (tmp_path / "en" / "train.txt").write_text("another line\n")
    assert changed_files(source, tmp_path) == " (changed: 'source/train.txt')"


def test_a_recipe_in_the_runs_own_folder_is_kept(tmp_path):
    path = tmp_path / "proj" / "recipe.toml"
    path.parent.mkdir()
    path.write_text(SMALL)
    for fresh in (False, True):
        with pytest.raises(UserError, match="lies in"):
            train(path, out=path.parent, fresh=fresh, device="cpu")
    assert path.read_text() == SMALL
    assert [p.name for p in path.parent.iterdir()] == ["recipe.toml"]


def test_a_run_without_a_folder_goes_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(recipe_from_toml(SMALL), overrides={"run.steps": 1}, device="cpu")
    assert result.out == Path("runs/llama")
    assert (tmp_path / "runs/llama/model").is_dir()


def test_a_sample_that_fails_loses_nothing(tmp_path):
    said = []

    class Listen(Callback):
        def said(self, message):
            said.append(message)

    def sample(model):
        raise ValueError("nothing to say")

    options = {"run.steps": 4, "run.sample_every": 2, "run.save_every": 2}
    result = train(recipe_from_toml(SMALL), out=tmp_path, overrides=options, sample=sample, callbacks=[Listen()])
    assert result.steps == 4
    assert (tmp_path / "model").is_dir()
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step-00000004"
    assert [m for m in said if "nothing to say" in m] == [f"no samples at step {n}: nothing to say" for n in (2, 4)]


SCRIPT = """
import os
import sys
from phylon.train import recipe_from_toml, train
begun = os.path.exists(os.path.join(sys.argv[2], ".phylon-run"))
train(recipe_from_toml(open(sys.argv[1]).read()), out=sys.argv[2], resume=begun, device="cpu")
"""


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing_that_was_saved(tmp_path):
    """With everything a run can remember: dropout, accumulation, a mean of the weights, a window of losses."""
    run = "steps = 400\nsave_every = 20\nthreads = 1\nema = 0.99\naccumulate = 2\n"
    run += "on_spike = { kind = 'roll_back', threshold = 1e9 }"  # the noise of so small a run is no spike
    text = SMALL.replace("steps = 12", run)
    text = text.replace("[data]", 'set = { "decoder.blocks.*.attn.dropout" = 0.1 }\n[data]')
    (tmp_path / "recipe.toml").write_text(text)
    source = str(Path(__file__).resolve().parents[2] / "src")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.toml"), str(tmp_path / "killed")]
    log, moments = tmp_path / "killed" / "metrics.jsonl", random.Random(7)

    def start():
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": source}, stderr=subprocess.PIPE)

    kills = 0
    for wanted in (10, 60, 120, 200, 300):
        child = start()
        while child.poll() is None and len(losses(tmp_path / "killed") if log.exists() else ()) < wanted:
            time.sleep(0.01)
        time.sleep(moments.random() * 0.5)  # in a step, in a checkpoint, between two files of it
        if child.poll() is None:
            child.kill()
            kills += 1
        child.wait()
    child = start()
    assert child.wait() == 0, child.stderr.read().decode()
    assert kills >= 3
    threads = torch.get_num_threads()
    try:
        whole = train(recipe_from_toml(text), out=tmp_path / "whole", device="cpu")
    finally:
        torch.set_num_threads(threads)
    timing = {"seconds", "tokens_per_s", "flops_per_s", "utilisation", "ceiling_flops_per_s"}
    logs = [
        [{k: v for k, v in r.items() if k not in timing} for r in read_metrics(out / "metrics.jsonl")]
        for out in (tmp_path / "killed", whole.out)
    ]
    assert logs[0] == logs[1]
    for name in ("model", "optimizer", "ema", "random"):
        files = [latest_checkpoint(out / "checkpoints") / f"{name}.safetensors" for out in (log.parent, whole.out)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


@pytest.mark.slow
def test_a_second_process_is_refused_while_the_first_goes_on(tmp_path):
    """Whatever the second one wants of the folder, the first one's run is the one nobody had disturbed."""
    text = SMALL.replace("steps = 12", "steps = 300\nsave_every = 20\nthreads = 1")
    (tmp_path / "recipe.toml").write_text(text)
    source = str(Path(__file__).resolve().parents[2] / "src")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "phylon", "train", str(tmp_path / "recipe.toml"), "--out", str(out)]
    command += ["--device", "cpu"]

    def start(*more):
        env = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*command, *more], env=env, stderr=subprocess.PIPE, text=True)

    first = start()
    while latest_checkpoint(out / "checkpoints") is None:
        time.sleep(0.02)
        assert first.poll() is None, first.stderr.read()
    # Held while the others try, so that it is still there when they do.
    first.send_signal(signal.SIGSTOP)
    try:
        others = [start(*more) for more in ((), ("--resume",), ("--fresh",), ("--resume", "--allow-changes"))]
        said = [other.communicate(timeout=120)[1].splitlines() for other in others]
    finally:
        first.send_signal(signal.SIGCONT)
    assert [other.returncode for other in others] == [2] * 4, said
    assert all(len(lines) == 1 for lines in said), said
    # The plain one is told first that a run is there.
    assert "already holds a run" in said[0][0]
    assert all("another process is training in" in lines[0] for lines in said[1:]), said
    assert first.wait(timeout=120) == 0, first.stderr.read()
    assert sorted(losses(out)) == list(range(300))
    whole = train(recipe_from_toml(text), out=tmp_path / "whole", device="cpu")
    assert losses(out) == losses(whole.out)
    again = start("--resume")
    assert again.wait(timeout=120) == 0

"""Checkpoints on disk: whole or not at all, found again, and honest about what changed."""

import errno
import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

import phylon.train.checkpoint as module
from phylon.spec import UserError
from phylon.train import Adafactor, AdamW, Callback, Muon, Trainer, latest_checkpoint, read_metrics
from phylon.train.average import average_checkpoints
from phylon.train.checkpoint import checkpoints, load_checkpoint, model_tensors


class Messages(Callback):
    def __init__(self):
        self.all = []

    def said(self, message):
        self.all.append(message)


def trainer_in(folder, *, messages=None, loader=None, **run):
    callbacks = [] if messages is None else [messages]
    return Trainer(toy_model(), loader or ToyLoader(), toy_recipe(**{"steps": 4, **run}), folder, callbacks)


def test_no_file_holds_a_pickle_and_ties_are_stored_once(tmp_path):
    trainer_in(tmp_path).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"}
    json.loads((folder / "state.json").read_text())
    stored = load_checkpoint(folder).model
    assert "decoder.embed.tokens.weight" in stored
    assert "heads.lm.proj.weight" not in stored
    assert stored.keys() == model_tensors(toy_model()).keys()


def test_a_killed_write_leaves_the_last_checkpoint_and_is_swept_up(tmp_path):
    trainer_in(tmp_path).run()
    folder = tmp_path / "checkpoints"
    (folder / ".writing-abc").mkdir()
    (folder / "step-00000009").mkdir()  # never had its state.json
    (folder / "latest").write_text("step-00000009\n")
    assert latest_checkpoint(folder).name == "step-00000004"
    trainer = trainer_in(tmp_path, steps=4)
    trainer.resume(latest_checkpoint(folder))
    trainer._save()
    assert not list(folder.glob(".*"))
    assert [path.name for path in checkpoints(folder)] == ["step-00000004"]


def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, save_every=2)
    real, calls = module._write_synced, []

    def full(path, content):
        if path.name == "state.json":
            calls.append(path)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(module, "_write_synced", full)
    words = r"the disk is full \(free some space\); the last good one is .*step-00000002"
    with pytest.raises(UserError, match=words) as caught:
        trainer.run()
    assert "\n" not in str(caught.value)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoints(folder)] == ["step-00000002"]
    assert not list(folder.glob(".writing-*"))
    load_checkpoint(latest_checkpoint(folder))


FILES = ["state.json", *(f"{part}.safetensors" for part in ("model", "optimizer", "random", "ema"))]


def flip(path, where=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut_short, lambda path: path.unlink()], ids=["flip", "cut", "remove"])
def test_every_damaged_file_is_named_with_the_older_whole_checkpoint(tmp_path, damage):
    trainer_in(tmp_path, save_every=1, keep=3, ema=0.9).run()
    older, damaged, newest = checkpoints(tmp_path / "checkpoints")[-3:]
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    for file in FILES:
        kept = (newest / file).read_bytes()
        damage(newest / file)
        with pytest.raises(UserError) as caught:
            load_checkpoint(newest)
        (newest / file).write_bytes(kept)
        assert str(newest / file) in str(caught.value) or (file == "state.json" and str(newest) in str(caught.value))
        assert f"remove {newest}, and --resume goes on from {damaged}, which is whole" in str(caught.value)
        assert "\n" not in str(caught.value)
    flip(newest / "model.safetensors")
    flip(damaged / "optimizer.safetensors")
    with pytest.raises(UserError, match=f"remove {newest} and {damaged}, and --resume goes on from {older}, which"):
        load_checkpoint(newest)
    flip(older / "random.safetensors")
    with pytest.raises(UserError, match="no older checkpoint is whole: --fresh begins again"):
        load_checkpoint(newest)


@pytest.mark.parametrize("file", FILES)
def test_the_newest_checkpoint_is_never_passed_over_for_an_older_one(tmp_path, file):
    trainer_in(tmp_path, save_every=2, ema=0.9).run()
    older, newest = checkpoints(tmp_path / "checkpoints")
    (newest / file).unlink()
    for _ in range(2):
        assert latest_checkpoint(tmp_path / "checkpoints") == newest
        with pytest.raises(UserError, match=rf"{newest}/{file}.*, and --resume goes on from {older}, which is whole"):
            trainer_in(tmp_path).resume(latest_checkpoint(tmp_path / "checkpoints"))
        with pytest.raises(UserError, match=f"{newest}/(model|state)") if file[0] in "ms" else nullcontext():
            average_checkpoints(tmp_path / "checkpoints", 2)
        (tmp_path / "checkpoints" / "latest").unlink(missing_ok=True)
    shutil.rmtree(newest)
    assert latest_checkpoint(tmp_path / "checkpoints") == older


def test_a_folder_of_the_users_is_no_checkpoint(tmp_path):
    trainer_in(tmp_path, save_every=2).run()
    older, newest = checkpoints(tmp_path / "checkpoints")
    for name in (f"{older.name}.bak", "step-one"):
        shutil.copytree(older, older.parent / name)
    assert checkpoints(older.parent) == [older, newest]
    trainer = trainer_in(tmp_path, keep=1)
    trainer.resume(newest)
    trainer._save()
    assert (older.parent / f"{older.name}.bak" / "state.json").is_file()


def test_every_bit_of_the_state_counts(tmp_path):
    trainer_in(tmp_path).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    load_checkpoint(folder)
    content = (folder / "state.json").read_bytes()
    for where in range(0, len(content), len(content) // 60):
        (folder / "state.json").write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
        with pytest.raises(UserError, match=r"state\.json is damaged|has the format"):
            load_checkpoint(folder)


def test_a_mean_of_checkpoints_reads_none_that_is_damaged(tmp_path):
    trainer_in(tmp_path, save_every=2).run()
    folder = tmp_path / "checkpoints"
    flip(checkpoints(folder)[0] / "model.safetensors")
    with pytest.raises(UserError, match=r"step-00000002/model.safetensors is damaged"):
        average_checkpoints(folder, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 8}, "run.batch_size was 4 and is now 8"),
        ({"seed": 6}, "run.seed was 5 and is now 6"),
        ({"optim": Adafactor()}, "optim.kind was adamw and is now adafactor"),
    ],
)
def test_what_nothing_can_change_on_the_way_is_not_offered(tmp_path, changes, words):
    trainer_in(tmp_path).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    for allow in (False, True):
        trainer = Trainer(toy_model(), ToyLoader(), toy_recipe(**{"steps": 4, **changes}), tmp_path)
        with pytest.raises(UserError) as caught:
            trainer.resume(folder, allow_changes=allow)
        assert words in str(caught.value)
        assert "a run cannot change that on its way, and --allow-changes neither" in str(caught.value)


@pytest.mark.parametrize("optim", [Adafactor(), pytest.param(Muon(), marks=pytest.mark.slow), AdamW()])
def test_a_state_that_does_not_fit_is_refused_before_anything_is_put_back(tmp_path, optim):
    trainer_in(tmp_path).run()
    found = load_checkpoint(latest_checkpoint(tmp_path / "checkpoints"))
    trainer = Trainer(toy_model(), ToyLoader(), toy_recipe(steps=4, optim=optim), tmp_path / "other")
    before = {name: value.clone() for name, value in trainer.optimizer.state_tensors().items()}
    tensors = found.optimizer | {"ghost.decoder": torch.zeros(1)}
    for refuse in (trainer.optimizer.check_state_tensors, trainer.optimizer.load_state_tensors):
        with pytest.raises(UserError, match="optimizer state"):
            refuse(tensors)
    after = trainer.optimizer.state_tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def held_out(seed):
    return lambda: [ToyLoader(seed=seed).batch(0)]


def test_other_held_out_data_are_refused_or_named(tmp_path):
    def trainer(seed, messages=None, **run):
        callbacks = [] if messages is None else [messages]
        recipe = toy_recipe(**{"steps": 4, **run})
        return Trainer(toy_model(), ToyLoader(), recipe, tmp_path, callbacks, held_out=held_out(seed))

    trainer(9).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    trainer(9).resume(folder)
    with pytest.raises(UserError, match="the held-out data are not those of this run"):
        trainer(8).resume(folder)
    trainer(8, eval_rows=2).resume(folder)  # how many rows are measured may change, and is another hash
    messages = Messages()
    trainer(8, messages).resume(folder, allow_changes=True)
    assert any("the held-out data have changed" in message for message in messages.all)


def test_a_changed_recipe_is_refused_with_its_differences_unless_allowed(tmp_path):
    trainer_in(tmp_path).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    changed = toy_recipe(steps=6, optim=AdamW(lr=0.5, clip=1.0), keep=7)
    trainer = Trainer(toy_model(), ToyLoader(), changed, tmp_path)
    with pytest.raises(UserError) as caught:
        trainer.resume(folder)
    assert "optim.lr was 0.01 and is now 0.5" in str(caught.value)
    assert "run.steps was 4 and is now 6" in str(caught.value)
    assert "keep" not in str(caught.value)
    trainer.resume(folder, allow_changes=True)
    assert trainer.run().step == 6


def test_a_changed_machine_is_named_and_goes_on(tmp_path):
    trainer_in(tmp_path, save_every=2).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    manifest = module.read_manifest(folder)
    manifest.environment |= {"torch": "1.0", "compiled": "blocks", "processes": "4", "native kernels": "ghost"}
    (folder / "state.json").write_bytes(module._sealed(manifest))
    messages = Messages()
    trainer = trainer_in(tmp_path, messages=messages)
    trainer.resume(folder)
    (message,) = [message for message in messages.all if "bit for bit" in message]
    for change in ("torch was 1.0 and is now", "compiled was blocks and is now no", "processes was 4 and is now 1"):
        assert change in message
    assert "native kernels was ghost and is now none" in message, "kernels that the run did not begin with stay unused"
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [r["kind"] for r in records].count("resumed") == 1


def test_other_data_is_refused(tmp_path):
    trainer_in(tmp_path).run()
    with pytest.raises(UserError, match="data position"):
        trainer_in(tmp_path, loader=ToyLoader(seed=8)).resume(latest_checkpoint(tmp_path / "checkpoints"))


def test_another_models_checkpoint_is_refused(tmp_path):
    trainer_in(tmp_path).run()
    folder = latest_checkpoint(tmp_path / "checkpoints")
    trainer = trainer_in(tmp_path)
    trainer.model.decoder.blocks[0].register_buffer("extra", torch.zeros(1))
    with pytest.raises(UserError, match=r"another model.*blocks.0.extra"):
        trainer.resume(folder)


def test_a_shortened_log_is_said(tmp_path):
    trainer_in(tmp_path).run()
    (tmp_path / "metrics.jsonl").write_text("")
    messages = Messages()
    trainer_in(tmp_path, messages=messages).resume(latest_checkpoint(tmp_path / "checkpoints"))
    assert any("shorter" in message for message in messages.all)


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    trainer_in(tmp_path).run()
    shutil.rmtree(latest_checkpoint(tmp_path / "checkpoints"))
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_full_disk_names_the_checkpoint_and_not_a_temporary_file(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("phylon.checkpoint.safetensors_io.finish", full)
    with pytest.raises(UserError, match=r"step-00000001.*disk is full \(free some space\)") as caught:
        Trainer(toy_model(), ToyLoader(), toy_recipe(steps=1), tmp_path).run()
    assert ".writing" not in str(caught.value)
    assert ".tmp" not in str(caught.value)

"""A user's mistakes: one line that names the thing and the fix, exit code 2, no traceback, nothing half-written."""

import contextlib
import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import phylon
from phylon.cli import errors
from phylon.cli.verify import page
from phylon.model.build import DTYPES
from phylon.model.passes import Lora


@pytest.fixture
def fails(run: Callable) -> Callable[..., str]:
    """Run a command that must fail as a user's mistake does; the line it prints."""

    def call(*args: object, code: int = 2) -> str:
        found = run(*args)
        assert found.code == code, found
        assert found.out == ""
        assert found.err.startswith("phylon: ")
        assert found.err.count("\n") == 1
        assert len(found.err) < 400
        return found.err

    return call


@pytest.fixture
def train_fails(run: Callable, tmp_path: Path) -> Callable[..., str]:
    """Train tinygpt into ``tmp_path/run``; it talks on standard error, and the last line must be the mistake."""

    def call(*settings: str) -> str:
        args = [word for setting in settings for word in ("--set", setting)]
        found = run("train", "tinygpt", "--out", tmp_path / "run", "--device", "cpu", *args)
        assert found.code == 2, found
        assert found.out == ""
        assert "Traceback" not in found.err
        assert not (tmp_path / "run/model").exists()
        return found.err.splitlines()[-1]

    return call


MODEL_COMMANDS = {
    "generate": ["--prompt", "a"],
    "score": ["--text", "ab"],
    "encode": ["--text", "ab"],
    "chat": [],
    "verify": [],
    "convert": ["{out}", "--to", "native"],
    "show": [],
    "account": [],
}


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_what_is_no_model(fails: Callable, command: str, model_folder: Path, tmp_path: Path) -> None:
    rest = [word.format(out=tmp_path / "out") for word in MODEL_COMMANDS[command]]
    damaged = {}
    for name in ("json", "spec", "schema"):
        shutil.copytree(model_folder, damaged.setdefault(name, tmp_path / name))
    (damaged["json"] / "phylon.json").write_text('{"schema": 1, "mod')
    config = (model_folder / "phylon.json").read_text()
    (damaged["spec"] / "phylon.json").write_text(config.replace('"d_model"', '"d_modle"'))
    (damaged["schema"] / "phylon.json").write_text(config.replace('"schema": 1', '"schema": 99'))
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    cases = {
        tmp_path / "nowhere": "nowhere",
        "smolm2": "did you mean 'smollm2'",
        tmp_path / "empty": "not a checkpoint",
        tmp_path / "model.bin": "not a .gguf file",
        tmp_path / "short.gguf": "short.gguf",
        damaged["json"]: "not JSON",
        damaged["spec"]: "d_modle",
        damaged["schema"]: "99",
    }
    for name, words in cases.items():
        assert words in fails(command, name, *rest)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["generate", "score", "encode", "verify", "convert"])
def test_truncated_and_missing_weights(fails: Callable, command: str, model_folder: Path, tmp_path: Path) -> None:
    rest = [word.format(out=tmp_path / "out") for word in MODEL_COMMANDS[command]]
    shutil.copytree(model_folder, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 1, 100, 4, 0):
        weights.write_bytes(whole[:length])
        assert "model.safetensors" in fails(command, tmp_path / "model", *rest)
    weights.unlink()
    fails(command, tmp_path / "model", *rest)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["shwo"], "did you mean 'show'"),
        (["show"], "missing argument"),
        (["show", "gpt2", "--batsh", "1"], "--batch"),
        (["show", "lama-7b"], "did you mean 'llama-7b'"),
        (["account", "gpt2", "--seq-len", "many"], "--seq-len"),
        (["account", "gpt2", "--seq-len", "1025"], "1024"),
        (["account", "gpt2", "--batch", "-1"], "at least 1"),
        (["account", "gpt2", "--dtype", "int3"], "int3"),
        (["show", "gpt2", "--shapes", "--seq-len", "0"], "at least 1"),
        (["list", "famlies"], "families"),
        (["--import", "nowhere.py", "list", "families"], "nowhere.py"),
        (["list", "families", "--import"], "--import"),
        (["train", "tinygtp", "--out", "{out}"], "did you mean 'tinygpt'"),
        (["train", "tinygpt"], "--out"),
        (["train", "tinygpt", "--out", "{out}", "--set", "optim.rl=1"], "did you mean 'lr'"),
        (["train", "--out", "{out}"], "--from"),
        (["train", "--out", "{out}", "--from", "smolm2"], "did you mean 'smollm2'"),
        (["train", "tinygpt", "--out", "{out}", "--set", "tune.lora={{rank=0}}"], "rank"),
        (["train", "tinygpt", "--out", "{out}", "--set", "run.on_spike=rollback"], "did you mean 'roll_back'"),
        (["train", "tinygpt", "--out", "{out}", "--set", "run.precision=fp16", "--device", "cpu"], "needs a GPU"),
        (["train", "tinygpt", "--out", "{out}", "--set", "optim.lr"], "not an assignment"),
        (["train", "tinygpt", "--out", "{out}", "--set", "run.steps=-1"], "steps"),
        (["train", "tinygpt", "--out", "{out}", "--resume", "--fresh"], "choose one"),
        (["generate", "{model}"], "--prompt"),
        (["generate", "{model}", "--prompt", ""], "empty"),
        (["generate", "{model}", "--prompt-ids", "1 x"], "whole numbers"),
        (["generate", "{model}", "--prompt-ids", "1 8"], "token id 8 is out of range"),
        (["generate", "{model}", "--prompt-ids", "-1"], "token id -1 is out of range"),
        (["generate", "{model}", "--prompt", "a" * 33], "32"),
        (["generate", "{model}", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "{model}", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", "{model}", "--prompt", "a", "--dtype", "float7"], "float7"),
        (["score", "{model}", "--text", ""], "at least two"),
        (["score", "{model}", "--text", "a" * 33], "32"),
        (["encode", "{model}", "--text", "a" * 40], "give max_tokens=32"),
        (["encode", "{model}", "--text", "a", "--pool", "max"], "pool must be"),
        (["convert", "{model}", "{out}", "--to", "onnx"], "onnx"),
        (["convert", "{model}", "{out}", "--to", "gguf"], ".gguf"),
        (["convert", "{model}", "{out}", "--to", "hf", "--quant", "Q8_0"], "--quant"),
        (["convert", "{model}", "{model}", "--to", "native"], "exists"),
    ],
)
def test_arguments(fails: Callable, args: list[str], words: str, model_folder: Path, tmp_path: Path) -> None:
    filled = [arg.format(out=tmp_path / "out", model=model_folder) for arg in args]
    line = fails(*filled)
    assert words in line
    assert not (tmp_path / "out/model").exists()
    assert not (tmp_path / "out").exists() or "train" in args


def test_a_full_disk_leaves_nothing(
    fails: Callable, train_fails: Callable, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["phylon.hub.save"], "write_safetensors", full)
    before = sorted(tmp_path.iterdir())
    assert "the disk is full" in fails("convert", model_folder, tmp_path / "out", "--to", "native")
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr("phylon.train.checkpoint.write_safetensors", full)
    line = train_fails("run.steps=1", "data.source.repeat=1", "data.seq_len=19")
    assert "space" in line or "full" in line
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_place_that_cannot_be_written(fails: Callable, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "file" in fails("convert", model_folder, tmp_path / "file/below", "--to", "native")


def test_interrupts_are_130_and_one_line(fails: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from phylon.train import Interrupted

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phylon.cli.catalogue.families", stop)
    assert fails("list", "families", code=130) == "phylon: interrupted\n"

    def saved(*_args: object) -> None:
        raise Interrupted("stopped at step 7, saved in x", signal.SIGTERM)

    monkeypatch.setattr("phylon.cli.catalogue.families", saved)
    assert "step 7" in fails("list", "families", code=143)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.seq_len=153", "152"),
        ("run.threads=1000000", "run.threads"),
        ("model.preset=gtp2", "did you mean 'gpt2'"),
        ("model.set={'decoder.d_model'=1000000000000}", "GiB"),
    ],
)
def test_training_that_cannot_begin(train_fails: Callable, setting: str, words: str) -> None:
    line = train_fails(setting)
    assert line.startswith("phylon: ")
    assert words in line


def test_a_prompt_that_cannot_be_said_is_refused_before_training(
    fails: Callable, run: Callable, tmp_path: Path
) -> None:
    for prompt in ("hello", ""):
        found = run("train", "tinygpt", "--out", tmp_path / "run", "--device", "cpu", "--prompt", prompt)
        assert found.code == 2
        assert found.err.splitlines()[-1].startswith("phylon: ")
        assert not (tmp_path / "run").exists()


def test_an_interrupt_that_somebody_swallows_ends_the_run_all_the_same(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module("phylon.train.prepare")._tokenizer

    def swallowing(*args: object) -> object:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(importlib.import_module("phylon.train.prepare"), "_tokenizer", swallowing)
    found = run("train", "tinygpt", "--out", tmp_path / "run", "--device", "cpu")
    assert found.code == 130
    assert found.err.endswith("phylon: interrupted\n")
    assert "tokenising" not in found.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run("list", "families").code == 0, "and is forgotten by the next command"


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    script = "from phylon.cli.main import main; import sys; sys.exit(main(['list', 'presets']))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | true; echo "${PIPESTATUS[0]}"', sys.executable, script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "141"
    assert done.stderr == ""


def test_our_own_mistakes_stay_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError):
        errors.reported(wrong)
    monkeypatch.setenv("PHYLON_DEBUG", "1")

    def theirs() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        errors.reported(theirs)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x.bin"), "'x.bin': the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "x.bin"), "'x.bin': permission denied"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UTF-8"),
    ],
)
def test_errors_of_the_machine(error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert errors.reported(command) == 2
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("seed", [99999999999999999999999, -1])
def test_a_seed_that_no_generator_takes(
    seed: int, fails: Callable[..., str], train_fails: Callable[..., str], model_folder: Path
) -> None:
    assert "seed must be " in fails("verify", model_folder, "--seed", seed, "--reference", "none", "--device", "cpu")
    assert "run.seed must be " in train_fails(f"run.seed={seed}")
    for make in (lambda: phylon.build("tinygpt", seed=seed, device="cpu"), lambda: Lora(seed=seed)):
        with pytest.raises(phylon.UserError, match="seed must be"):
            make()


def test_any_seed_of_a_text(run: Callable, model_folder: Path) -> None:
    for seed in (99999999999999999999999, -1):
        words = ("--prompt", "ab", "--max-new-tokens", 2, "--seed", seed, "--device", "cpu")
        assert run("generate", model_folder, *words).code == 0


def test_an_empty_name(fails: Callable[..., str]) -> None:
    assert "the name of the model is empty" in fails("verify", "")


def test_help_names_every_dtype(run: Callable) -> None:
    said = " ".join(run("verify", "--help").out.split())
    assert all(name in said for name in DTYPES)


def test_verify_says_what_it_ran_and_against_what() -> None:
    cell = {"name": "batching", "passed": True, "error": None, "bound": None, "reason": None}
    data = {"model": "m", "dtype": "float32", "passed": True, "cells": [cell]}
    images = page(data | {"inputs": "images", "lengths": [17, 17, 17]})
    assert "m: float32, 3 images of 17 tokens each\n" in images
    assert "Reference" not in images
    texts = page(data | {"inputs": "texts", "lengths": [24, 8, 16], "reference": "X of Y, attention 'sdpa'"})
    assert "3 texts of 24, 8, 16 tokens\n" in texts
    assert "\nReference: X of Y, attention 'sdpa'\n" in texts

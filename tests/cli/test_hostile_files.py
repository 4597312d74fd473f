"""Case 36 through every command that takes a model: one line that names the file, nothing run, nothing written."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from phylon.families.llama import llama_spec
from phylon.hub import save
from phylon.hub.save import save_gguf
from phylon.model import build

WEIGHTS = "model.safetensors"
COMMANDS = {
    "generate": ["{model}", "--prompt", "a"],
    "score": ["{model}", "--text", "ab"],
    "encode": ["{model}", "--text", "ab"],
    "chat": ["{model}"],
    "verify": ["{model}"],
    "convert": ["{model}", "{out}", "--to", "native"],
    "show": ["{model}"],
    "account": ["{model}"],
    "train --from": ["--from", "{model}", "--out", "{out}", "--device", "cpu"],
    "train a recipe": ["{recipe}", "--out", "{out}", "--device", "cpu"],
}
NO_WEIGHTS = ("show", "account")
"""Commands that read the configuration alone."""


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.path,))


def header(folder: Path, change: Callable[[dict], None]) -> None:
    """``folder``'s weights with another header before the same bytes."""
    raw = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    table = json.loads(raw[8:end])
    change(table)
    text = json.dumps(table).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])


def first(table: dict) -> dict:
    return next(entry for name, entry in sorted(table.items()) if name != "__metadata__")


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "ran")))


def pickle_as_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder.parent / "ran")))


def truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50])


def overlap(folder: Path) -> None:
    def change(table: dict) -> None:
        entries = sorted((e for n, e in table.items() if n != "__metadata__"), key=lambda e: e["data_offsets"])
        entries[1]["data_offsets"] = [n - 4 for n in entries[1]["data_offsets"]]

    header(folder, change)


def beyond(folder: Path) -> None:
    header(folder, lambda table: first(table).update(shape=[2**58], data_offsets=[0, 2**60]))


def huge_shape(folder: Path) -> None:
    header(folder, lambda table: first(table).update(shape=[2**60]))


WEIGHT_FILES = (only_a_pickle, pickle_as_safetensors, truncated, overlap, beyond, huge_shape)


def config(folder: Path, changes: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CONFIGS = {
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    "quantised by": {"quantization_config": {"quant_method": "evil"}},
    "hidden_size": {"hidden_size": 2**60},
    "num_hidden_layers": {"num_hidden_layers": 2**60},
    "vocab_size": {"vocab_size": 2**60},
    "custom_kernel": {"custom_kernel": "https://evil.example/kernel"},
}


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    spec = llama_spec(d_model=24, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=40, vocab_size=50, max_seq_len=32)
    return save(build(spec, device="cpu"), tmp_path_factory.mktemp("hostile") / "hf", format="hf")


@pytest.fixture
def fails(run: Callable, tmp_path: Path) -> Callable[..., str]:
    """One command on one path: refused with exit code 2 in one line; nothing run, nothing left."""

    def call(command: str, path: Path) -> str:
        (tmp_path / "recipe.toml").write_text(f'schema = 1\n[model]\nfrom = "{path}"\n')
        places = {"model": path, "out": tmp_path / "out", "recipe": tmp_path / "recipe.toml"}
        found = run(command.split()[0], *(word.format(**places) for word in COMMANDS[command]))
        said = found.err.splitlines()
        assert found.code == 2, (command, found)
        assert found.out == ""
        assert len(said) == 1, (command, said)
        assert said[0].startswith("phylon: ")
        assert len(said[0]) < 600
        assert str(path) in said[0] or path.name in said[0], said
        assert not (tmp_path / "ran").exists()
        assert not list(tmp_path.glob("out/**/*.safetensors"))
        return said[0]

    return call


@pytest.mark.parametrize("damage", WEIGHT_FILES)
@pytest.mark.parametrize("native", [True, False], ids=["native", "hf"])
def test_weights(damage: Callable, native: bool, fails: Callable, model_folder: Path, hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder if native else hf, folder)
    damage(folder)
    for command in COMMANDS:
        if command not in NO_WEIGHTS:
            fails(command, folder)


@pytest.mark.parametrize("name", ["config.json", "phylon.json", WEIGHTS])
def test_pipes_and_folders_are_refused_and_not_waited_for(
    name: str, fails: Callable, model_folder: Path, hf: Path, tmp_path: Path
) -> None:
    for make, said in ((os.mkfifo, "is a pipe, not a file"), (Path.mkdir, "is a folder, not a file")):
        folder = tmp_path / make.__name__
        shutil.copytree(hf if name == "config.json" else model_folder, folder)
        (folder / name).unlink()
        make(folder / name)
        for command in COMMANDS:
            # Training looks at the configuration first, which does not fit the default recipe.
            if name != WEIGHTS or command not in (*NO_WEIGHTS, "train --from", "train a recipe"):
                assert said in fails(command, folder)


def test_commands_that_read_no_weights_run_nothing_of_them(run: Callable, hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf, folder)
    only_a_pickle(folder)
    for command in NO_WEIGHTS:
        run(command, folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", CONFIGS)
def test_configurations(words: str, fails: Callable, hf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf, folder)
    config(folder, CONFIGS[words])
    for command in COMMANDS:
        assert words in fails(command, folder)


def test_gguf(fails: Callable, hf: Path, tmp_path: Path) -> None:
    import phylon

    whole = save_gguf(phylon.load(hf, device="cpu"), tmp_path / "whole.gguf").read_bytes()
    assert whole[:4] == b"GGUF"
    counts = {"lying": 2**60, "one more": struct.unpack("<Q", whole[8:16])[0] + 1, "none": 0}
    files = {name: whole[:8] + struct.pack("<Q", n) + whole[16:] for name, n in counts.items()}
    files |= {"truncated": whole[:-100], "pickle": pickle.dumps(Bomb(tmp_path / "ran"))}
    for data in files.values():
        (tmp_path / "model.gguf").write_bytes(data)
        for command in COMMANDS:
            fails(command, tmp_path / "model.gguf")

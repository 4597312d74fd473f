"""A file of a checkpoint that is no regular file: refused by name in one line, never waited for, never passed over."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from phylon.hub import load, save
from phylon.hub.adapter import load_adapter
from phylon.hub.save import save_gguf
from phylon.spec.errors import UserError
from phylon.spec.files import read_file
from phylon.text import load_tokenizer

from .hub_data import hf_folder, made, one_line


def mkfifo(path: Path) -> None:
    os.mkfifo(path)


def socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("gone")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (mkfifo, "is a pipe, not a file"),
    "folder": (Path.mkdir, "is a folder, not a file"),
    "socket": (socket, "is a socket, not a file"),
    "device": (device, "is a device, not a file"),
    "loop": (loop, "cannot be read: too many levels of symbolic links"),
    "dangling link": (dangling, "is a link to nothing"),
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with every file that is read, in shards."""
    folder = hf_folder(tmp_path_factory.mktemp("odd") / "a")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "b"}')
    (folder / "added_tokens.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    load(folder, device="cpu")
    return folder


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_of_a_folder(name: str, kind: str, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    make, said = KINDS[kind]
    make(folder / name)
    with pytest.raises(UserError, match=said) as error:
        load(folder, device="cpu")
    assert str(folder / name) in one_line(error)
    if "token" in name or "template" in name:
        with pytest.raises(UserError, match=said):
            load_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_others(kind: str, tmp_path: Path) -> None:
    """A native configuration, a shard, a GGUF file, an adapter, old vocabularies."""
    make, said = KINDS[kind]

    def refused(call: Callable[[], object], path: Path) -> None:
        with pytest.raises(UserError, match=said) as error:
            call()
        assert str(path) in one_line(error)

    native = save(made(), tmp_path / "native")
    (native / "phylon.json").unlink()
    make(native / "phylon.json")
    refused(lambda: load(native), native / "phylon.json")

    folder = hf_folder(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "keep")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "shard.safetensors"}}))
    make(folder / "shard.safetensors")
    refused(lambda: load(folder), folder / "shard.safetensors")

    if kind != "folder":
        make(tmp_path / "x.gguf")
        refused(lambda: load(tmp_path / "x.gguf"), tmp_path / "x.gguf")
        make(tmp_path / "tokenizer.model")
        refused(lambda: load_tokenizer(tmp_path / "tokenizer.model"), tmp_path / "tokenizer.model")
    (tmp_path / "adapter").mkdir()
    make(tmp_path / "adapter" / "adapter.json")
    refused(lambda: load_adapter(made(), tmp_path / "adapter"), tmp_path / "adapter" / "adapter.json")
    for name in ("vocab.json", "vocab.txt", "spiece.model"):
        (tmp_path / name[:7]).mkdir()
        make(tmp_path / name[:7] / name)
        refused(lambda name=name: load_tokenizer(tmp_path / name[:7]), tmp_path / name[:7] / name)
        shutil.rmtree(tmp_path / name[:7])


def test_a_model_that_is_no_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model")
    with pytest.raises(UserError, match=r"'.*model' is not a .gguf file; give the folder"):
        load(tmp_path / "model")
    loop(tmp_path / "round")
    with pytest.raises(UserError, match=r"round' is not a .gguf file"):
        load(tmp_path / "round")


def test_a_file_larger_than_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(UserError, match="too large: more than 1 MB"):
        read_file(tmp_path / "x", most=2**20)
    assert len(read_file(tmp_path / "x")) == 2**20 + 1


def test_links_to_regular_files_are_read(whole: Path, tmp_path: Path) -> None:
    """As the cache of the reference lays them out."""
    (tmp_path / "a").mkdir()
    for path in whole.iterdir():
        (tmp_path / "a" / path.name).symlink_to(path)
    assert load(tmp_path / "a", device="cpu").tokenizer is not None
    save_gguf(made(), tmp_path / "x.gguf")
    (tmp_path / "y.gguf").symlink_to(tmp_path / "x.gguf")
    assert load(tmp_path / "y.gguf", device="cpu").spec == load(tmp_path / "x.gguf", device="cpu").spec

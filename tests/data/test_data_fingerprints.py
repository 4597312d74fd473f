"""What data are known by: the content of their files, neither where these lie nor when they were written."""

import json
import os
import shutil

import numpy as np
import pytest

from phylon.data import (
    Aligned,
    ImageArrays,
    ImageFolder,
    JsonLines,
    Mixture,
    Parquet,
    Table,
    Task,
    TextFile,
    TextFolder,
)


def _texts(root):
    root.mkdir()
    (root / "a.txt").write_text("one")
    (root / "b.md").write_text("two")
    (root / "t.tsv").write_text("input\ttarget\na\tb\n")
    (root / "l.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    np.save(root / "x.npy", np.zeros((2, 4, 4), np.uint8))
    np.save(root / "y.npy", np.arange(2))


def _images(root):
    pillow = pytest.importorskip("PIL.Image")
    for name, shade in (("cats", 0), ("dogs", 9)):
        (root / "images" / name).mkdir(parents=True)
        pillow.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(root / "images" / name / "1.png")


def _parquet(root):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), root / "p.parquet")


SOURCES = {
    "file": (lambda at: TextFile(path=f"{at}/a.txt"), "a.txt"),
    "folder": (lambda at: TextFolder(path=f"{at}"), "b.md"),
    "jsonl": (lambda at: JsonLines(path=f"{at}/l.jsonl"), "l.jsonl"),
    "table": (lambda at: Table(path=f"{at}/t.tsv"), "t.tsv"),
    "aligned": (lambda at: Aligned(source=f"{at}/a.txt", target=f"{at}/b.md"), "b.md"),
    "arrays": (lambda at: ImageArrays(images=f"{at}/x.npy", labels=f"{at}/y.npy"), "x.npy"),
    "images": (lambda at: ImageFolder(path=f"{at}/images"), "images/dogs/1.png"),
    "parquet": (lambda at: Parquet(path=f"{at}/p.parquet"), "p.parquet"),
    "mixture": (
        lambda at: Mixture(tasks=(Task(name="t", source=Table(path=f"{at}/t.tsv"), input="input", target="target"),)),
        "t.tsv",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_moved_and_touched_files_are_the_same_data_and_others_are_not(tmp_path, kind):
    make, file = SOURCES[kind]
    _texts(tmp_path / "here")
    for fill, kinds in ((_images, "images"), (_parquet, "parquet")):
        if kind == kinds:
            fill(tmp_path / "here")
    before = make(tmp_path / "here").fingerprint()
    os.utime(tmp_path / "here" / file, (1, 1))
    assert make(tmp_path / "here").fingerprint() == before
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert make(tmp_path / "there").fingerprint() == before
    names = [name for name, _ in make(tmp_path / "there").files()]
    assert any(name.endswith(file.removeprefix("images/")) for name in names)
    changed = tmp_path / "there" / file
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1  # of the same length
    changed.write_bytes(content)
    assert make(tmp_path / "there").fingerprint() != before

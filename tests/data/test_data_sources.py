import sys
import sysconfig

import pytest

from phylon.data import (
    JsonLines,
    Part,
    PythonCorpus,
    TextFile,
    TextFolder,
    Texts,
    open_source,
    split_documents,
)
from phylon.spec.errors import UserError


def refused(source, *words):
    """The one-line message with which the source refuses; it must hold the words."""
    with pytest.raises(UserError) as caught:
        list((open_source(source) if isinstance(source, str) else source).documents())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def pairs(source):
    return [(document.text, document.name) for document in source.documents()]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    for name, text in {
        "b.txt": "second",
        "a/z.md": "first",
        "a/empty.txt": "",
        "code.py": "x = 1\r\n",
        "picture.png": "no",
        ".hidden/c.txt": "no",
        "._c.txt": "no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def test_folder_is_sorted_filtered_and_kept_as_it_is(folder):
    source = open_source(folder)
    assert pairs(source) == [("first", "a/z.md"), ("second", "b.txt"), ("x = 1\r\n", "code.py")]
    assert [d.name for d in TextFolder(path=str(folder), patterns=("a/*",)).documents()] == ["a/z.md"]


def test_json_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '\ufeff{"text": "eins"}\n\n{"text": "", "n": 1}\n{"n": [1], "text": "zwei\\nzeilen \u00e9"}', "utf-8"
    )
    assert pairs(open_source(str(path))) == [("eins", "data.jsonl:1"), ("zwei\nzeilen é", "data.jsonl:4")]


def test_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é", "utf-8-sig")
    assert pairs(open_source(path)) == [("é", "a.txt")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "half', ["data.jsonl:3", "not JSON"]),
        ('{"text": "\\ud800"}', ["data.jsonl:3", "not JSON"]),
        ("[1]", ["data.jsonl:3", "not a JSON object"]),
        ('{"texts": "x"}', ["data.jsonl:3", "no field 'text'", "did you mean 'texts'"]),
        ('{"text": 5}', ["data.jsonl:3", "not text but int"]),
    ],
)
def test_bad_json_line_names_file_and_line(tmp_path, line, words):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    refused(str(path), *words)


def test_json_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    refused(str(path), "data.jsonl:2", "not UTF-8 text (byte 0xff)")


def test_what_is_missing_empty_or_of_another_kind(tmp_path, folder):
    refused(str(tmp_path / "text"), "there is no data", "did you mean 'texts'", '"python"', ".jsonl")
    refused("pyhton", "did you mean 'python'")
    refused("no such name at all", "there is no data 'no such name at all'; give")
    refused("x" * 5000, "cannot read the data", "xxx")
    refused("", "empty")
    refused(str(folder / "picture.png"), "cannot tell what kind", "picture.png", '"python"')
    refused(str(folder / "a/empty.txt"), "empty.txt' is empty")
    refused(TextFile(path=str(folder / "gone.txt")), "cannot read", "gone.txt")
    refused(TextFolder(path=str(folder / "b.txt")), "is no folder but a file")
    refused(TextFolder(path=str(folder / "gone")), "there is no folder", "gone")
    refused(TextFolder(path=str(folder), patterns=("*.rst",)), "*.rst", "it holds", "2 .txt", "1 .png")
    refused(
        TextFolder(path=str(folder), patterns=("empty*",)), "nothing of the data can be used", "empty.txt' is empty"
    )
    refused(TextFolder(path=str(tmp_path / "text")), "there is no folder", "did you mean 'texts'")
    (tmp_path / "nothing").mkdir()
    refused(str(tmp_path / "nothing"), "no file", "holds no files")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(str(tmp_path / "empty.jsonl"), "no text in the field 'text'")
    refused(Texts(("", "")), "no characters")


def test_a_file_that_is_not_utf8_is_named_wherever_it_lies(folder):
    (folder / "a/latin.txt").write_bytes("naïve".encode("latin-1"))
    for source in (str(folder / "a/latin.txt"), str(folder)):
        refused(source, "latin.txt", "not UTF-8", "byte 0xef at offset 2")


def test_fingerprints_follow_the_data(folder, tmp_path):
    source = open_source(folder)
    seen = {source.fingerprint(), source.fingerprint()}
    (folder / "picture.png").write_text("not a part of it")
    seen.add(source.fingerprint())
    assert len(seen) == 1
    (folder / "b.txt").write_text("changed")
    seen.add(source.fingerprint())
    (folder / "b.txt").rename(folder / "c.txt")
    seen.add(source.fingerprint())
    seen.add(TextFolder(path=str(folder), patterns=("*.md",)).fingerprint())
    seen |= {part.fingerprint() for part in split_documents(source)}
    seen |= {Texts(("a", "b")).fingerprint(), Texts(("ab",)).fingerprint()}
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a", "title": "b"}')
    seen |= {JsonLines(path=str(path)).fingerprint(), JsonLines(path=str(path), field="title").fingerprint()}
    assert len(seen) == 10
    with pytest.raises(UserError, match="cannot read"):
        TextFile(path=str(folder / "gone.txt")).fingerprint()


def test_the_split_is_whole_disjoint_and_stays_when_documents_are_added():
    texts = Texts(tuple(f"text {index}" for index in range(2000)))
    train, held_out = (list(part.documents()) for part in split_documents(texts, 0.1))
    assert sorted(train + held_out) == sorted(texts.documents())
    assert 140 < len(held_out) < 260
    fewer = Texts(texts.texts[:1000])
    assert list(split_documents(fewer, 0.1)[1].documents()) == [d for d in held_out if int(d.name[5:]) < 1000]
    assert list(split_documents(texts, 0.1, seed=1)[1].documents()) != held_out
    refused(Part(source=Texts(("only one",)), start=0.0, stop=1e-9), "none of the 1 documents", "share")
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(UserError, match="share"):
            split_documents(texts, share)


def test_the_embedded_corpus_of_this_interpreter():
    documents = list(PythonCorpus().documents())
    names = [d.name for d in documents]
    assert sum(len(text.encode()) for text, *_ in documents) > 3_000_000
    assert names == sorted(set(names))
    assert {"argparse.py", "asyncio/tasks.py"} <= set(names)
    assert not {part for name in names for part in name.split("/")} & {"test", "tests", "site-packages", "lib2to3"}
    assert list(open_source("python").documents()) == documents
    some = list(PythonCorpus(max_bytes=100_000).documents())
    assert some == documents[: len(some)]
    size = [sum(len(text.encode()) for text, *_ in documents[: len(some) + more]) for more in (0, 1)]
    assert size[0] <= 100_000 < size[1]
    assert PythonCorpus().fingerprint() == PythonCorpus().fingerprint() != PythonCorpus(max_bytes=1).fingerprint()
    refused(PythonCorpus(max_bytes=0), "max_bytes")
    refused(PythonCorpus(max_bytes=1), "below the first document")


def test_without_source_files_the_help_topics_take_their_place(monkeypatch, tmp_path):
    with_files = PythonCorpus().fingerprint()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "hidden"))
    documents = list(PythonCorpus().documents())
    assert sum(len(text) for text, *_ in documents) > 200_000
    assert all(name.startswith("topics/") for name in (d.name for d in documents))
    assert "assert" in {d.name: d.text for d in documents}["topics/assert"]
    assert PythonCorpus().fingerprint() != with_files
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    refused(PythonCorpus(), "neither its source files nor pydoc_data")

"""Items that are empty or wrong, in every kind of source: named, then passed over or fatal, as the source says."""

import datetime
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from phylon.data import (
    Aligned,
    HFDataset,
    ImageArrays,
    ImageFolder,
    JsonLines,
    Mixture,
    Parquet,
    Records,
    Table,
    TextFolder,
    Texts,
    split_records,
)
from phylon.data.labelled import read_texts
from phylon.data.mixture import Task
from phylon.data.passed import Policies, _named
from phylon.spec import UserError

DEEP = "[" * 200_000


@pytest.fixture(autouse=True)
def forget():
    _named.clear()


def table(tmp_path, name, lines):
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return Table(path=str(path))


def texts(source):
    return [row.text for row in read_texts(source, "text", None, "label")]


@pytest.mark.parametrize(
    ("name", "lines", "where", "words"),
    [
        ("t.tsv", ["text\tlabel", "a\t1", "b", "c\t1"], ":3", "1 cells"),
        ("t.tsv", ["text\tlabel", "a\t1", b"\xff\t1", "c\t1"], ":3", "not UTF-8"),
        ("t.csv", ["text,label", "a,1", '"b" x,1', "c,1"], ":3", "not CSV"),
        ("t.jsonl", ['{"text": "a", "label": 1}', "{", '{"text": "c", "label": 1}'], ":2", "not JSON"),
        ("t.jsonl", ['{"text": "a", "label": 1}', DEEP, '{"text": "c", "label": 1}'], ":2", "nested too deeply"),
        ("t.jsonl", ['{"text": "a", "label": 1}', '{"label": 1}', '{"text": "c", "label": 1}'], ":2", "no field"),
        ("t.jsonl", ['{"text": "a", "label": 1}', '{"text": 5, "label": 1}', '{"text": "c", "label": 1}'], ":2", "int"),
    ],
)
def test_a_bad_row_of_a_table(tmp_path, caplog, name, lines, where, words):
    source = table(tmp_path, name, lines)
    with pytest.raises(UserError, match=f"{name}{where}: .*{words}.*; data.source.unreadable=skip passes over"):
        texts(source)
    assert texts(source.replace(unreadable="skip")) == ["a", "c"]
    assert f"{name}{where}" in caplog.text
    assert source.fingerprint() != source.replace(unreadable="skip").fingerprint()


def test_an_empty_text_is_another_matter_than_a_damaged_one(tmp_path, caplog):
    source = table(tmp_path, "t.tsv", ["text\tlabel", "a\t1", " \t1", "c\t1"])
    with pytest.raises(UserError, match=r"t.tsv:3: the field 'text' is empty; data.source.empty=skip passes over"):
        texts(source.replace(unreadable="skip", empty="refuse"))
    assert texts(source) == ["a", "c"]
    assert "t.tsv:3" in caplog.text


def test_where_nothing_can_be_used_the_first_problem_is_said(tmp_path):
    source = table(tmp_path, "t.tsv", ["txt\tlabel", "a\t1", "b\t1"]).replace(unreadable="skip")
    with pytest.raises(UserError, match=r"nothing of the data can be used; .* t.tsv:2: no field 'text'"):
        texts(source)


def test_a_part_of_a_source_does_as_the_source_says():
    rows = [{"text": f"t{i}", "label": 1} if i % 5 else {"label": 1} for i in range(40)]
    source = Records(rows=tuple(rows))
    for part in split_records(source.replace(unreadable="skip"), 0.4, ("text",)):
        assert set(texts(part)) <= {row.get("text") for row in rows} - {None}
    with pytest.raises(UserError, match="record:0: no field 'text'"):
        texts(split_records(source, 0.4, ("text",))[0])


def test_tasks_of_a_mixture_have_their_own_policies():
    rows = ({"input": "a", "target": "b"}, {"input": "", "target": "b"}, {"input": "c", "target": "d"})
    lenient, strict = Records(rows=rows), Records(rows=rows, empty="refuse")
    found = Mixture(tasks=(Task(name="x", source=lenient, prefix="p: "),)).records()
    assert [record.fields["input"] for record in found] == ["p: a", "p: c"]
    tasks = (Task(name="x", source=lenient), Task(name="y", source=strict))
    with pytest.raises(UserError, match=r"record:1: .* is empty; data.source.tasks.1.source.empty=skip passes over"):
        list(Mixture(tasks=tasks).records())


def test_aligned_lines(tmp_path, caplog):
    (tmp_path / "a.en").write_bytes(b"one\ntwo\n\xff\nfour\n")
    (tmp_path / "a.de").write_bytes(b"eins\n\ndrei\nvier\n")
    source = Aligned(source=str(tmp_path / "a.en"), target=str(tmp_path / "a.de"))
    with pytest.raises(UserError, match=r"a.en:2: the line is empty in one"):
        list(source.replace(unreadable="skip", empty="refuse").records())
    with pytest.raises(UserError, match=r"a.en:3: not UTF-8"):
        list(source.records())
    found = [r.fields["target"] for r in source.replace(empty="skip", unreadable="skip").records()]
    assert found == ["eins", "vier"]
    assert "a.en:2" in caplog.text


def test_a_side_that_is_damaged_ends_both(tmp_path, caplog):
    lines = [f"line {number} {random.Random(number).random()}\n".encode() for number in range(20_000)]
    whole = gzip.compress(b"".join(lines))
    (tmp_path / "a.en.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a.de").write_bytes(b"".join(lines))
    source = Aligned(source=str(tmp_path / "a.en.gz"), target=str(tmp_path / "a.de"))
    with pytest.raises(UserError, match=r"a.en.gz' is damaged after line"):
        list(source.records())
    assert 0 < len(list(source.replace(unreadable="skip").records())) < 20_000
    assert "is damaged after line" in caplog.text
    assert "the other file goes on" in caplog.text


def test_what_an_objective_cannot_use_of_a_mixture_is_up_to_the_mixture():
    rows = Records(rows=({"a": "one", "b": "two", "label": 1}, {"a": "three", "b": "four", "label": ""}))
    mixture = Mixture(tasks=(Task(name="t", source=rows, input="a", target="b"),))
    read = lambda source: [row.text for row in read_texts(source, "input", None, "label")]
    lenient, mixture = mixture, mixture.replace(empty="refuse")
    with pytest.raises(UserError, match=r"t/record:1: the label in 'label' is missing; data.source.empty=skip"):
        read(mixture)
    assert read(lenient) == ["one"]
    assert mixture.fingerprint() != lenient.fingerprint()


@pytest.mark.parametrize(
    "value", [datetime.date(2024, 5, 1), [datetime.time(1)], {"at": datetime.datetime(2024, 5, 1)}]
)
def test_a_date_in_a_record_is_named(value):
    with pytest.raises(UserError, match=r"record:1: the field 'when' must be text, a number"):
        Records(rows=({"when": "x"}, {"when": value}))
    assert Records(rows=({"when": [None, True, 1, 2.5, {"a": "b"}]},)).fingerprint()


def test_documents_of_json_lines_that_are_nested_too_deeply(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + "\n" + DEEP + "\n" + json.dumps({"text": "two"}) + "\n")
    with pytest.raises(UserError, match=r"a.jsonl:2: JSON that is nested too deeply"):
        list(JsonLines(path=str(path)).documents())
    assert [d.text for d in JsonLines(path=str(path), unreadable="skip").documents()] == ["one", "two"]


def test_parquet_rows_of_another_type(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": [["one"], None, ["x"]], "w": [1.0, 1.0, -1.0]}), path)
    source = Parquet(path=path, weight="w")
    with pytest.raises(UserError, match=r"a.parquet:2: the weight in 'w' is not a number of at least 0: -1.0"):
        list(source.documents())
    assert [d.name for d in source.replace(unreadable="skip").documents()] == ["a.parquet:0"]


def test_labels_that_are_no_class_of_arrays(tmp_path, caplog):
    np.save(tmp_path / "x.npy", np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2))
    np.save(tmp_path / "y.npy", np.array([0, 1, 7, 1, 0]))
    source = ImageArrays(images=str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy"), classes=("a", "b"))
    with pytest.raises(UserError, match="image 2: the label 7 is out of range"):
        source.open()
    found = source.replace(unreadable="skip").open()
    assert found.labels.tolist() == [0, 1, 1, 0]
    assert [found.name(i) for i in (1, 2)] == ["image:1", "image:3"]
    assert found.pixels(2)[0, 0, 0] == 12
    assert "image 2" in caplog.text


def test_image_files_of_no_bytes(tmp_path, caplog):
    pillow = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pillow.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name / "1.png")
    (tmp_path / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"a/0.png' is empty"):
        ImageFolder(path=str(tmp_path), empty="refuse").open()
    found = ImageFolder(path=str(tmp_path)).open()
    assert [found.name(i) for i in range(len(found))] == ["a/1.png", "b/1.png"]
    assert "0.png" in caplog.text


def test_every_source_of_many_items_has_the_policies():
    for kind in (Aligned, HFDataset, ImageArrays, ImageFolder, JsonLines, Mixture, Parquet, Records, Table, TextFolder):
        assert issubclass(kind, Policies)
        assert (kind.__struct_defaults__.count("skip"), kind.__struct_defaults__.count("refuse")) == (1, 1), "one rule"
    assert [d.text for d in Texts(("a", "", "b")).documents()] == ["a", "b"]
    with pytest.raises(UserError, match="text:1 is empty"):
        list(Texts(("a", "", "b"), empty="refuse").documents())


def test_a_file_that_cannot_be_opened_is_passed_over_by_all_who_look(tmp_path: Path) -> None:
    """By the sums of the files too, which tell a run whether its data have changed."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    source = TextFolder(path=str(tmp_path))
    with pytest.raises(UserError, match=r"cannot read .*b\.txt.*; data.source.unreadable=skip passes over"):
        list(source.documents())
    lenient = source.replace(unreadable="skip")
    assert [document.text for document in lenient.documents()] == ["one"]
    before = lenient.fingerprint()
    (tmp_path / "nowhere").write_text("two")
    assert lenient.fingerprint() != before
    assert [document.text for document in lenient.documents()] == ["one", "two"]

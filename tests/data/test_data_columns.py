"""Parquet and saved Hugging Face datasets as sources, and what happens to bad documents in the middle of the data."""

import builtins
import json
import logging
from datetime import date, datetime
from decimal import Decimal

import pytest

from phylon.data import HFDataset, JsonLines, Loader, PackedRows, Parquet, TextFolder, open_source
from phylon.data.passed import _named
from phylon.data.split import split_records
from phylon.spec import UserError

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
import pyarrow  # noqa: E402
from data_toys import store_of  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh():
    _named.clear()


def write(path, texts, **columns):
    parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts))), **columns}), path, row_group_size=2)
    return path


def test_a_parquet_file_gives_documents_and_records(tmp_path):
    path = write(tmp_path / "a.parquet", ["one", "", "drei é", None, "five"])
    source = open_source(path)
    assert isinstance(source, Parquet)
    assert [d[:2] for d in source.documents()] == [
        ("one", "a.parquet:0"),
        ("drei é", "a.parquet:2"),
        ("five", "a.parquet:4"),
    ]
    assert next(iter(source.records()))[:2] == ({"text": "one", "n": 0}, "a.parquet:0")
    with pytest.raises(UserError, match=r"a.parquet:1: the field 'text' is empty"):
        list(source.replace(empty="refuse").documents())
    with pytest.raises(UserError, match=r"no field 'texts' .did you mean 'text'"):
        list(source.replace(field="texts").documents())
    with pytest.raises(UserError, match=r"the field 'n' is not text but int"):
        list(source.replace(field="n").documents())
    before = source.fingerprint()
    write(path, ["other"])
    assert source.fingerprint() != before


def test_a_folder_of_parquet_files_with_a_bad_one_in_the_middle(tmp_path, caplog):
    (tmp_path / "b").mkdir()
    write(tmp_path / "a.parquet", ["one"])
    write(tmp_path / "b" / "c.parquet", ["three"])
    (tmp_path / "b" / "bad.parquet").write_bytes(b"PAR1 not really")
    source = Parquet(path=str(tmp_path))
    with pytest.raises(UserError, match=r"bad.parquet' as Parquet"):
        list(source.documents())
    with caplog.at_level(logging.WARNING):
        found = list(source.replace(unreadable="skip").documents())
    assert [d.name for d in found] == ["a.parquet:0", "b/c.parquet:0"]
    assert len(caplog.records) == 1
    assert "passed over: cannot read" in caplog.text
    assert "bad.parquet" in caplog.text


@pytest.mark.parametrize("kind", ["ArrowNotImplementedError", "ArrowTypeError", "ArrowKeyError", "ArrowInvalid"])
def test_whatever_pyarrow_says_is_one_line(tmp_path, monkeypatch, kind):
    def raises(*_args, **_options):
        raise getattr(pyarrow.lib, kind)("codec 'lzo'\nnot built")

    source = Parquet(path=str(write(tmp_path / "a.parquet", ["one"])))
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", raises)
    with pytest.raises(UserError, match=r"cannot read '.*a.parquet' as Parquet: .?codec 'lzo'"):
        list(source.documents())


@pytest.mark.parametrize(("name", "words"), [("nothing", "there is no Parquet"), ("empty", "no .parquet file below")])
def test_no_parquet(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words):
        list(Parquet(path=str(tmp_path / name)).documents())


def test_text_files_that_are_empty_or_unreadable_are_named(tmp_path, caplog):
    for name, content in (("a.txt", b"one"), ("b.txt", b""), ("c.txt", b"\xff\xfe\x00bad"), ("d.txt", b"two")):
        (tmp_path / name).write_bytes(content)
    source = TextFolder(path=str(tmp_path))
    with pytest.raises(UserError, match=r"c.txt' is not UTF-8"):
        list(source.documents())
    with pytest.raises(UserError, match=r"b.txt' is empty"):
        list(source.replace(empty="refuse", unreadable="skip").documents())
    with caplog.at_level(logging.WARNING):
        lenient = source.replace(unreadable="skip")
        assert [d.text for d in lenient.documents()] == ["one", "two"]
        assert [d.text for d in lenient.documents()] == ["one", "two"]
    assert [r.message.split(":")[0] for r in caplog.records] == ["passed over"] * 2, "each is named once"
    assert "b.txt" in caplog.text
    assert "c.txt" in caplog.text
    assert source.fingerprint() != lenient.fingerprint()


def test_bad_lines_of_json(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nno json\n\n{"text": ""}\n{"other": 1}\n{"text": "two"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: not JSON"):
        list(JsonLines(path=str(path)).documents())
    with caplog.at_level(logging.WARNING):
        found = list(JsonLines(path=str(path), unreadable="skip").documents())
    assert [d.text for d in found] == ["one", "two"]
    assert [r.message.split("a.jsonl:")[1][0] for r in caplog.records] == ["2", "4", "5"]
    with pytest.raises(UserError, match=r"a.jsonl:4: the field 'text' is empty"):
        list(JsonLines(path=str(path), unreadable="skip", empty="refuse").documents())


@pytest.mark.parametrize("content", [b"", b"PAR1", b"junk" * 99])
def test_where_all_is_passed_over_the_first_problem_is_the_error(content, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "t.parquet").write_bytes(content)
    source = Parquet(path=str(tmp_path / "t.parquet"), unreadable="skip")
    with pytest.raises(UserError, match=r"nothing of the data can be used; the first problem: cannot read .*t.parquet"):
        list(source.records())


def test_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "label": [0, 1, 0]})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    found = [d[:2] for d in HFDataset(path=str(tmp_path / "saved")).documents()]
    assert found == [("one", "saved:0"), ("two", "saved:2")]
    both = HFDataset(path=str(tmp_path / "both"), split="train")
    assert next(iter(both.records())).fields == {"text": "one", "label": 0}
    with pytest.raises(UserError, match=r"several splits \(train, test\)"):
        list(both.replace(split=None).documents())
    with pytest.raises(UserError, match=r"no split 'tran' .did you mean 'train'"):
        list(both.replace(split="tran").documents())
    rows.select([]).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none' holds no rows"):
        list(HFDataset(path=str(tmp_path / "none")).records())
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"is not what datasets saves"):
        list(HFDataset(path=str(tmp_path / "other")).documents())


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        ("datasets", HFDataset(path="saved"), "needs the package datasets: pip install datasets"),
        ("pyarrow", Parquet(path="a.parquet"), "Parquet needs pyarrow: pip install 'phylon.data.'"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, package, source, words):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=words):
        list(source.documents())


def test_the_position_survives_a_change_of_the_number_of_workers():
    """Two processes stop after step 5, four go on: together they see what one alone would have seen."""
    rows = PackedRows(store_of([5, 9, 4, 7, 12, 3, 8, 2, 6, 5] * 3), 4)
    alone = Loader(rows, 8, 3)
    batches = [next(alone)["tokens"] for _ in range(12)]
    two = [Loader(rows, 8, 3) for _ in range(2)]
    seen = []
    for step in range(5):
        seen.append([loader.batch(step, part=part, of=2)["tokens"] for part, loader in enumerate(two)])
        for loader in two:
            loader.step = step + 1
    state = json.loads(json.dumps(two[0].state_dict()))
    assert state == two[1].state_dict(), "every worker saves the same position"
    four = [Loader(rows, 8, 3) for _ in range(4)]
    for loader in four:
        loader.load_state_dict(state)
    seen += [
        [loader.batch(step, part=part, of=4)["tokens"] for part, loader in enumerate(four)]
        for step in range(four[0].step, 12)
    ]
    together = [[row for part in parts for row in part.tolist()] for parts in seen]
    assert together == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("value", [datetime(2020, 1, 1), Decimal("1.5"), b"abc", [date(2020, 1, 1)]])
def test_what_json_cannot_say_cannot_decide_the_split(tmp_path, value):
    write(tmp_path / "a.parquet", [f"text {n}" for n in range(30)])
    parquet.write_table(pyarrow.table({"text": [value], "n": [1]}), tmp_path / "b.parquet")
    source = Parquet(path=str(tmp_path))
    kind = type(value).__name__
    with pytest.raises(UserError, match=rf"b.parquet:0: the field 'text' is neither text nor number but {kind}.*skip"):
        list(split_records(source, 0.3, ("text",))[0].records())
    parts = split_records(source.replace(unreadable="skip"), 0.3, ("text",))
    assert sum(len(list(part.records())) for part in parts) == 30

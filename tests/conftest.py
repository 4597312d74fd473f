"""One thread, since the tensors are tiny and results must not depend on the machine's cores; the golden flag."""

import signal

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("shared machine", deadline=None)  # times say nothing there
hypothesis.settings.load_profile("shared machine")
# A suite that was started in the background has Ctrl-C ignored, and hands that on to the commands it runs.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files; their diff is the review")


def pytest_sessionstart() -> None:
    """Kernels are compiled before the first test, so that every test sees the same backends."""
    import phylon.train  # noqa: F401  (registers them)
    from phylon.ops import native

    native.wait()

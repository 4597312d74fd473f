"""One thread, since the tensors are tiny and results must not depend on the machine's cores; the golden flag."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files; their diff is the review")

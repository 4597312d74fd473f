"""Real files that tests read where they are present."""

import importlib.util
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models"


def shared(name: str) -> Path:
    """A file or folder of the shared data, or the test is skipped."""
    if not (SHARED / name).exists():
        pytest.skip(f"shared data {name} is not here")
    return SHARED / name


def packaged(package: str, name: str) -> Path:
    """A file of an installed data package, found without importing it, or the test is skipped."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0]) / name

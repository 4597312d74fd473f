"""Load and save models: native folders, Hugging Face folders, GGUF files, known packages."""

from phylon.hub.adapter import load_adapter, save_adapter
from phylon.hub.describe import Description, describe
from phylon.hub.load import load, load_tokenizer_of
from phylon.hub.names import KNOWN, find_model
from phylon.hub.save import save, save_gguf

__all__ = [
    "KNOWN",
    "Description",
    "describe",
    "find_model",
    "load",
    "load_adapter",
    "load_tokenizer_of",
    "save",
    "save_adapter",
    "save_gguf",
]

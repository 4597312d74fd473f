"""From texts to training batches: sources, tokenising once, packing into rows, and a deterministic, resumable order."""

from phylon.data.corpus import PythonCorpus
from phylon.data.documents import Document, Source
from phylon.data.loader import BatchOrder, Loader, epoch_permutation, evaluation_batches, next_token_targets
from phylon.data.packing import IGNORE, PackedDocuments, PackedRows, Row, Rows, pack_documents
from phylon.data.sources import JsonLines, TextFile, TextFolder, Texts, open_source
from phylon.data.split import Part, split_documents
from phylon.data.tokens import Tokenizer, TokenStore, tokenise

__all__ = [
    "IGNORE",
    "BatchOrder",
    "Document",
    "JsonLines",
    "Loader",
    "PackedDocuments",
    "PackedRows",
    "Part",
    "PythonCorpus",
    "Row",
    "Rows",
    "Source",
    "TextFile",
    "TextFolder",
    "Texts",
    "TokenStore",
    "Tokenizer",
    "epoch_permutation",
    "evaluation_batches",
    "next_token_targets",
    "open_source",
    "pack_documents",
    "split_documents",
    "tokenise",
]

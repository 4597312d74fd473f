"""From texts to training batches: sources, tokenising once, packing into rows, and a deterministic, resumable order."""

from phylon.data.columns import HFDataset, Parquet
from phylon.data.corpus import PythonCorpus
from phylon.data.documents import DataSource, Document, Record, Source
from phylon.data.draws import Draws
from phylon.data.loader import (
    Batches,
    BatchOrder,
    Example,
    Examples,
    Loader,
    epoch_permutation,
    evaluation_batches,
    next_token_targets,
    stack,
)
from phylon.data.mixture import Mixture, PythonFunctions, Task
from phylon.data.packing import IGNORE, PackedDocuments, PackedRows, Row, pack_documents
from phylon.data.sentences import sentences
from phylon.data.sources import JsonLines, TextFile, TextFolder, Texts, open_source
from phylon.data.split import Part, split_documents
from phylon.data.tokens import Tokenizer, TokenStore, tokenise

__all__ = [
    "IGNORE",
    "BatchOrder",
    "Batches",
    "DataSource",
    "Document",
    "Draws",
    "Example",
    "Examples",
    "HFDataset",
    "JsonLines",
    "Loader",
    "Mixture",
    "PackedDocuments",
    "PackedRows",
    "Parquet",
    "Part",
    "PythonCorpus",
    "PythonFunctions",
    "Record",
    "Row",
    "Source",
    "Task",
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
    "sentences",
    "split_documents",
    "stack",
    "tokenise",
]

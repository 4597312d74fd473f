"""From texts to training batches: sources, tokenising once, packing into rows, and a deterministic, resumable order."""

from phylon.data.augment import Augment, Pixels
from phylon.data.buckets import BucketLoader, LengthLoader, PaddedLoader, TokenBatches, padded
from phylon.data.columns import HFDataset, Parquet
from phylon.data.corpus import PythonCorpus
from phylon.data.documents import DataSource, Document, Record, Source
from phylon.data.draws import Draws
from phylon.data.images import ImageArrays, ImageFolder
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
from phylon.data.parallel import Aligned
from phylon.data.sentences import sentences
from phylon.data.sources import JsonLines, TextFile, TextFolder, Texts, open_source
from phylon.data.split import Part, RecordPart, held_out_names, split_documents, split_records
from phylon.data.table import Records, Table
from phylon.data.tokens import Tokenizer, TokenStore, tokenise

__all__ = [
    "IGNORE",
    "Aligned",
    "Augment",
    "BatchOrder",
    "Batches",
    "BucketLoader",
    "DataSource",
    "Document",
    "Draws",
    "Example",
    "Examples",
    "HFDataset",
    "ImageArrays",
    "ImageFolder",
    "JsonLines",
    "LengthLoader",
    "Loader",
    "Mixture",
    "PackedDocuments",
    "PackedRows",
    "PaddedLoader",
    "Parquet",
    "Part",
    "Pixels",
    "PythonCorpus",
    "PythonFunctions",
    "Record",
    "RecordPart",
    "Records",
    "Row",
    "Source",
    "Table",
    "Task",
    "TextFile",
    "TextFolder",
    "Texts",
    "TokenBatches",
    "TokenStore",
    "Tokenizer",
    "epoch_permutation",
    "evaluation_batches",
    "held_out_names",
    "next_token_targets",
    "open_source",
    "pack_documents",
    "padded",
    "sentences",
    "split_documents",
    "split_records",
    "stack",
    "tokenise",
]

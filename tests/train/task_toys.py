"""Tiny runs of the supervised objectives: what resuming and accumulation are tested on."""

import atexit
import shutil
import tempfile
from pathlib import Path

import numpy as np

PAIRS = [
    ("the cat sat", "die katze sass"),
    ("the dog saw it", "der hund sah es"),
    ("a tree grows", "ein baum waechst"),
    ("we read a book", "wir lesen ein buch"),
    ("it was warm", "es war warm"),
    ("nobody knew why", "niemand wusste warum"),
    ("birds live there", "dort leben voegel"),
    ("in winter they leave", "im winter gehen sie"),
    ("then it snows", "dann schneit es"),
    ("the book was long", "das buch war lang"),
    ("it had no end", "es hatte kein ende"),
    ("we put it down", "wir legten es hin"),
]


def records(rows: list[dict]) -> str:
    """A source that holds these records."""
    tables = ", ".join("{" + ", ".join(f"{key} = {value!r}" for key, value in row.items()) + "}" for row in rows)
    return f'source = {{ kind = "records", rows = [{tables}] }}'


def data(rows: list[dict], tokenizer: str = 'kind = "wordpiece", vocab_size = 60') -> str:
    return f"\n[data]\n{records(rows)}\ntokenizer = {{ {tokenizer} }}\nseq_len = 24\nheld_out = 0.3\n"


def bert(heads: str, n_classes: int = 2) -> str:
    return f"""
[model]
family = "bert"
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 24
max_seq_len = 24
dropout = 0.1
heads = {heads}
n_classes = {n_classes}
"""


SEQ2SEQ = """
[model]
family = "transformer2017"
d_model = 16
n_layers = 1
n_heads = 2
max_seq_len = 80
dropout = 0.1
"""
VIT = """
[model]
family = "vit"
d_model = 16
n_layers = 1
n_heads = 2
image_size = [8, 8]
patch_size = 4
n_channels = 1
n_classes = 3
dropout = 0.1
"""


def _images() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="phylon-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    draw = np.random.default_rng(0)
    np.save(folder / "x.npy", draw.integers(0, 256, (40, 8, 8), dtype=np.uint8))
    np.save(folder / "y.npy", draw.permutation(np.arange(40) % 3))
    return folder


IMAGES = _images()
TEXTS = [{"text": one, "label": number % 2} for number, (one, _) in enumerate(PAIRS)]
TASKS: dict[str, list[str]] = {
    "translation": [
        SEQ2SEQ + data([{"source": one, "target": other} for one, other in PAIRS], 'kind = "bpe", vocab_size = 300')
        + '[objective]\nkind = "translation"\nmax_tokens = 120\nn_beams = 2\n'
    ],
    "text_classes": [
        bert('["class"]') + data(TEXTS) + '[objective]\nkind = "text_classes"\n',
        bert('["class"]', 3)
        + data([{"a": x, "b": y, "c": "xyz"[i % 3]} for i, (x, y) in enumerate(PAIRS)])
        + '[objective]\nkind = "text_classes"\ntext = "a"\npair = "b"\nlabel = "c"\n',
    ],
    "text_scores": [
        bert('["class"]', 1)
        + data([{"text": x, "label": len(x) / 10} for x, _ in PAIRS])
        + '[objective]\nkind = "text_scores"\n'
    ],
    "word_classes": [
        bert('["token"]')
        + data([{"words": x.split(), "labels": ["XO"[len(word) % 2] for word in x.split()]} for x, _ in PAIRS])
        + '[objective]\nkind = "word_classes"\n'
    ],
    "answers": [
        bert('["span"]')
        + data([{"question": "who?", "context": x, "answer": x.split()[1], "start": x.index(" ") + 1}
                for x, _ in PAIRS])
        + '[objective]\nkind = "answers"\nstride = 3\n'
    ],
    "contrastive": [
        bert("[]") + data([{"text": x, "pair": y} for x, y in PAIRS]) + '[objective]\nkind = "contrastive"\n'
    ],
    "image_classes": [
        VIT
        + f'\n[data]\nsource = {{ kind = "image_arrays", images = "{IMAGES}/x.npy", labels = "{IMAGES}/y.npy" }}\n'
        + 'held_out = 0.3\n[objective]\nkind = "image_classes"\naugment = { padding = 1, flip = 0.5 }\n'
    ],
}  # fmt: skip

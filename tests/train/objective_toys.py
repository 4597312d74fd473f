"""A tiny run of every registered objective: what resuming, accumulation and the docs are tested on."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from task_toys import TASKS

from phylon import hub
from phylon.families.decoder import llama_spec
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.model import build
from phylon.spec import override
from phylon.text import char_tokenizer
from phylon.train import recipe_from_toml

EXPERTS = MoE(n_experts=3, expert=GLU(d_ff=20), router=RenormalisedRouter(top_k=1))

TEXTS = [
    "the cat sat on the mat. it was warm. the dog saw it and left. nobody knew why.\n",
    "a tree grows in the yard. birds live there. in winter they leave. then it snows.\n",
    "we read a book. the book was long. it had no end. we put it down again.\n",
]

ENCODER = """
[model]
family = "bert"
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 24
max_seq_len = 24
dropout = 0.1
heads = ["mlm", "nsp"]
"""
DECODER = """
[model]
family = "llama"
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 24
max_seq_len = 64
"""
SEQ2SEQ = """
[model]
family = "t5"
d_model = 16
n_layers = 1
n_heads = 2
head_dim = 8
d_ff = 24
dropout = 0.1
"""
SWITCH = SEQ2SEQ.replace('"t5"', '"switch"') + "sparse_step = 1\nn_experts = 3\ncapacity = 12\n"
PREFIX = (
    DECODER
    + """
[model.set]
"decoder.blocks.*.attn.pattern" = { kind = "or", patterns = [{ kind = "causal" }, { kind = "prefix" }] }
"""
)
DATA = f"""
[data]
source = {{ kind = "texts", texts = {json.dumps(TEXTS)} }}
tokenizer = {{ kind = "char" }}
seq_len = 24
held_out = 0.2
"""
RUN = """
[optim]
lr = 1e-2
[run]
steps = 20
batch_size = 4
accumulate = 2
eval_every = 5
seed = 3
"""

WORDS = [f"{a}{b}" for a in "abcdefghij" for b in "xyz"]
COPY = 'name = "copy", prefix = "say: ", input = "text", target = "text"'
SAME = 'name = "same", prefix = "do: ", input = "text", target = "text", cap = 4'
PAIRS = f"""
[data]
tokenizer = {{ kind = "char" }}
seq_len = 24
held_out = 0.3
[data.source]
kind = "mixture"
tasks = [
  {{ {COPY}, source = {{ kind = "texts", texts = {json.dumps(WORDS[:18])} }} }},
  {{ {SAME}, source = {{ kind = "texts", texts = {json.dumps(WORDS[18:])} }} }},
]
"""
TAUGHT = DATA.replace('kind = "char"', 'kind = "load", path = "TEACHER"')

# The tables of a tiny run, by the kind of objective: several where its parts differ in kind.
TINY: dict[str, list[str]] = {
    "next_token": [DECODER + DATA + '[objective]\nkind = "next_token"\n'],
    "masked_language": [
        ENCODER + DATA + '[objective]\nkind = "masked_language"\npairs = "next_sentence"\n',
        ENCODER.replace(', "nsp"', "") + DATA + '[objective]\nkind = "masked_language"\nunit = "whole_words"\n',
    ],
    "denoising": [
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\n',
        SWITCH + DATA + '[objective]\nkind = "denoising"\nbalance = 0.01\nz_loss = 0.001\n',
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\ncorruption = "iid_spans"\n',
        PREFIX + DATA + '[objective]\nkind = "denoising"\ncorruption = "split_prefix"\n',
        DECODER + DATA + '[objective]\nkind = "denoising"\ncorruption = { kind = "iid_tokens", random = 0.0 }\n',
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\ncorruption = "whole_text"\n',
    ],
    "text_to_text": [SEQ2SEQ + PAIRS + '[objective]\nkind = "text_to_text"\ntarget_len = 8\ntemperature = 2.0\n'],
    "distillation": [
        DECODER + TAUGHT + '[objective]\nkind = "distillation"\nteacher = "TEACHER"\ntask = "next_token"\n',
    ],
}
TINY |= TASKS
ALL = [(kind, number) for kind, tables in TINY.items() for number in range(len(tables))]


@cache
def teacher() -> str:
    """The folder of a model that learns nothing: a mixture of experts over the characters of the texts."""
    folder = Path(tempfile.mkdtemp(prefix="phylon-teacher-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = char_tokenizer("".join(TEXTS))
    spec = llama_spec(d_model=16, n_layers=1, n_heads=2, d_ff=24, max_seq_len=64, vocab_size=tokenizer.vocab_size)
    model = build(override(spec, {"decoder.blocks.*.ffn": EXPERTS}), seed=11, device="cpu")
    model.tokenizer = tokenizer
    hub.save(model, folder / "model")
    return (folder / "model").as_posix()


def tiny(kind: str, number: int = 0):
    """The recipe of a tiny run; in parts, unless the objective needs its batch whole."""
    run = RUN.replace("accumulate = 2", "accumulate = 1") if kind == "contrastive" else RUN
    if kind == "translation":
        run = run.replace("batch_size = 4\n", "")  # max_tokens says how large a batch is
    text = "schema = 1\n" + TINY[kind][number] + run
    return recipe_from_toml(text.replace("TEACHER", teacher()) if "TEACHER" in text else text)

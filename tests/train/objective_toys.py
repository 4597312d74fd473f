"""A tiny run of every registered objective: what resuming, accumulation and the docs are tested on."""

from task_toys import TASKS

from phylon.train import recipe_from_toml

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
DATA = f"""
[data]
source = {{ kind = "texts", texts = {TEXTS!r} }}
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

# The tables of a tiny run, by the kind of objective: several where its parts differ in kind.
TINY: dict[str, list[str]] = {
    "next_token": [DECODER + DATA + '[objective]\nkind = "next_token"\n'],
    "masked_language": [
        ENCODER + DATA + '[objective]\nkind = "masked_language"\npairs = "next_sentence"\n',
        ENCODER.replace(', "nsp"', "") + DATA + '[objective]\nkind = "masked_language"\nunit = "whole_words"\n',
    ],
}
TINY |= TASKS
TINY.pop("masked_language")
ALL = [(kind, number) for kind, tables in TINY.items() for number in range(len(tables))]


def tiny(kind: str, number: int = 0):
    """The recipe of a tiny run."""
    return recipe_from_toml("schema = 1\n" + TINY[kind][number] + RUN)

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
    "denoising": [
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\n',
        SWITCH + DATA + '[objective]\nkind = "denoising"\nbalance = 0.01\nz_loss = 0.001\n',
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\ncorruption = "iid_spans"\n',
        PREFIX + DATA + '[objective]\nkind = "denoising"\ncorruption = "split_prefix"\n',
        DECODER + DATA + '[objective]\nkind = "denoising"\ncorruption = { kind = "iid_tokens", random = 0.0 }\n',
        SEQ2SEQ + DATA + '[objective]\nkind = "denoising"\ncorruption = "whole_text"\n',
    ],
}
TINY |= TASKS
ALL = [(kind, number) for kind, tables in TINY.items() for number in range(len(tables))]


def tiny(kind: str, number: int = 0):
    """The recipe of a tiny run; in parts, unless the objective needs its batch whole."""
    run = RUN.replace("accumulate = 2", "accumulate = 1") if kind == "contrastive" else RUN
    return recipe_from_toml("schema = 1\n" + TINY[kind][number] + run)

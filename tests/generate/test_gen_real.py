"""Generation and scores on real weights and real tokenizers."""

import gzip
import json
from pathlib import Path

import gen_toys as toys
import pytest

import phylon
from phylon.generate import ChatSession, generate, score, score_choices, stream
from phylon.text import load_tokenizer

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the repository")


@pytest.fixture(scope="module")
def cut():
    return phylon.load(DATA / "models" / "smollm2-1layer-5120.Q4_1.gguf", device="cpu")


def test_one_block_of_smollm2_gives_its_gold_values(cut):
    gold = json.loads((DATA / "models" / "smollm2-1layer-gold.json").read_text())
    ids = gold["ids"]
    assert score(cut, [ids])[0]["mean_nll"] == pytest.approx(gold["mean_nll"], abs=2e-3)
    best, second = gold["last_top5_ids"][:2]
    row = generate(cut, [ids], max_new_tokens=1, temperature=0)[0]
    assert row["tokens"] == [best]
    assert row["logprobs"][0] == pytest.approx(gold["last_top5_logprob"][0], abs=2e-3)
    scored = score(cut, [[*ids, second]])[0]["logprobs"][-1]
    assert scored == pytest.approx(gold["last_top5_logprob"][1], abs=2e-3)


FILES = {
    "smollm2": {"smollm2-tokenizer.json.gz": "tokenizer.json"},
    "gpt2": {"gpt2-encoder.json.gz": "encoder.json", "gpt2-vocab.bpe.gz": "vocab.bpe"},
    "mistral": {"mistral-v1-spm.model": "tokenizer.model"},
}


def with_tokenizer(folder: Path, name: str):
    for source, target in FILES[name].items():
        raw = (DATA / "tokenizers" / source).read_bytes()
        (folder / target).write_bytes(gzip.decompress(raw) if source.endswith(".gz") else raw)
    tokenizer = load_tokenizer(folder)
    made = toys.model(vocab_size=tokenizer.vocab_size)
    made.tokenizer = tokenizer
    return made


@pytest.mark.parametrize("name", FILES)
def test_real_tokenizers_stream_what_they_generate(tmp_path, name):
    made = with_tokenizer(tmp_path, name)
    prompts = ["The capital of France is", "é司 and"]
    options = {"max_new_tokens": 25, "seed": 3, "eos_ids": ()}
    for prompt, row in zip(prompts, generate(made, prompts, **options), strict=True):
        pieces = list(stream(made, prompt, **options))
        assert "".join(pieces) == row["text"]
        # Prompt and text join as one text would: a leading space of the first token is kept.
        ids = made.tokenizer.encode(prompt)
        assert prompt + row["text"] == made.tokenizer.decode([*ids, *row["tokens"]], skip_special=True)
    choices = ["Paris", " Paris", "\n", "n't", " "]
    assert all(row["n_scored"] >= 1 for row in score_choices(made, "The capital of France is", choices))
    # Bytes of one character that come token by token, in a vocabulary of bytes and in one of byte pieces.
    ids = made.tokenizer.encode("é司𓀀", special=False)
    script = toys.Script(made, 1, ids)
    made.heads["lm"] = script
    pieces = list(stream(made, [5], max_new_tokens=len(ids), temperature=0, eos_ids=()))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).strip() == "é司𓀀"


def test_chat_through_a_real_template(tmp_path):
    made = with_tokenizer(tmp_path, "smollm2")
    made.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatSession(made, max_new_tokens=6, temperature=0)
    for text in ("Hi", "And you?"):
        prompt = made.tokenizer.chat_ids([*chat.history, {"role": "user", "content": text}])
        assert "".join(chat.send(text)) == generate(made, [prompt], max_new_tokens=6, temperature=0)[0]["text"]


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    try:
        made = phylon.load("smollm2", device="cpu")
    except phylon.UserError as error:
        pytest.skip(str(error))
    chat = ChatSession(made, temperature=0)
    assert "".join(chat.send("What is the capital of France?")) == "The capital of France is Paris."
    assert "Berlin" in "".join(chat.send("And of Germany?"))

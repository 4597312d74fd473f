"""The task classes and bare models beside a family's language model: both directions, padded batches, case 8."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import phylon
from phylon.checkpoint.verify import against
from phylon.families import family
from phylon.hub.reference import transformers_reference
from phylon.layers.heads.classify import Classify
from phylon.layers.heads.pools import Last
from phylon.spec.errors import UserError

from .decoders import LENGTHS, close, padded, tokens_of, transformers
from .harness import draw, drawn, edit_config

TASKS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
DECODERS = {
    "bloom": ("Bloom", TASKS),
    "deepseek": ("DeepseekV3", TASKS[:3]),
    "falcon": ("Falcon", TASKS),
    "gemma3": ("Gemma3Text", TASKS[:2]),
    "gpt2": ("GPT2", TASKS),
    "gpt_neo": ("GPTNeo", TASKS),
    "gpt_neox": ("GPTNeoX", TASKS),
    "gptj": ("GPTJ", (*TASKS[:2], TASKS[3])),
    "jamba": ("Jamba", TASKS[:2]),
    "llama": ("Llama", TASKS),
    "mamba": ("Mamba", TASKS[:1]),
    "mamba2": ("Mamba2", TASKS[:1]),
    "mistral": ("Mistral", TASKS),
    "mixtral": ("Mixtral", TASKS),
    "mpt": ("Mpt", TASKS),
    "qwen3": ("Qwen3", TASKS),
    "starcoder": ("GPTBigCode", TASKS[:3]),
}
CASES = [(name, stem + task) for name, (stem, tasks) in DECODERS.items() for task in tasks]
SEQ2SEQ = [
    ("t5", "T5Model"),
    ("t5", "T5EncoderModel"),
    ("t5", "T5ForSequenceClassification"),
    ("t5", "T5ForTokenClassification"),
    ("t5", "T5ForQuestionAnswering"),
    ("switch", "SwitchTransformersModel"),
    ("transformer2017", "MarianModel"),
]
PAD, EOS = 0, 1


def made(name: str, architecture: str, folder: Path, **changes: object):
    """A random reference of the class, saved in ``folder``, and ours of that folder."""
    found = family(name)
    assert found.hf is not None
    folder.mkdir()
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": EOS, "decoder_start_token_id": PAD}
    (folder / "config.json").write_text(json.dumps(found.hf.write(found.cases()[0]) | ids))
    config = transformers.AutoConfig.from_pretrained(folder)
    if "Question" not in architecture:
        config.num_labels = 5
    for key, value in changes.items():
        setattr(config, key, value)
    cls = getattr(transformers, architecture)
    kind = "sdpa" if cls._supports_sdpa else "eager"
    reference = cls._from_config(config, attn_implementation=kind, dtype=torch.float32)
    draw(reference)
    reference.eval().save_pretrained(folder)
    return reference, phylon.load(folder, device="cpu")


def values(out: object) -> Tensor:
    """What a class of theirs gives, whatever it calls it."""
    if getattr(out, "start_logits", None) is not None:
        return torch.stack([out.start_logits, out.end_logits], dim=-1)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def given_back(model, architecture: str, folder: Path, computed: str = "embed_positions") -> None:
    """Every tensor bit for bit, the same class, and the same model again."""
    phylon.save(model, folder / "b", format="hf")
    theirs, ours = (load_file(folder / name / "model.safetensors") for name in "ab")
    # Marian's tables are compared and given back, RoFormer's are computed.
    assert {n for n in theirs if computed not in n or n in ours} == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) for n in ours)
    assert json.loads((folder / "b/config.json").read_text())["architectures"] == [architecture]
    assert phylon.load(folder / "b", device="cpu").spec == model.spec


@pytest.mark.parametrize(("name", "architecture"), CASES)
@torch.no_grad()
def test_decoders(name: str, architecture: str, tmp_path: Path) -> None:
    reference, ours = made(name, architecture, tmp_path / "a")
    tokens, segments = tokens_of(), padded("right")
    tokens = torch.where(segments == 0, PAD, tokens + (tokens == PAD))
    theirs = values(reference(input_ids=tokens, attention_mask=segments))
    out = ours(tokens, segments=segments)
    mine = out.hidden if out.logits is None else out.logits
    pooled = "class" in ours.spec.heads
    close(mine, theirs) if pooled else close(mine[segments == 1], theirs[segments == 1])
    left, moved = padded("left"), torch.zeros_like(tokens)
    moved[left == 1] = tokens[segments == 1]
    again = ours(moved, segments=left)
    again = again.hidden if again.logits is None else again.logits
    close(again, mine) if pooled else close(again[left == 1], mine[segments == 1])
    given_back(ours, architecture, tmp_path)


@pytest.mark.parametrize(("name", "architecture"), SEQ2SEQ)
@torch.no_grad()
def test_encoder_decoders(name: str, architecture: str, tmp_path: Path) -> None:
    reference, ours = made(name, architecture, tmp_path / "a")
    tokens = tokens_of()
    tokens = torch.where(tokens < 2, tokens + 2, tokens)
    segments = torch.ones_like(tokens)
    if "Classification" not in architecture:
        segments = padded("right")
    tokens[:, -1] = EOS
    shifted = torch.cat([torch.full_like(tokens[:, :1], PAD), tokens[:, :-1]], dim=1)
    if ours.spec.decoder is None:
        theirs, out = reference(input_ids=tokens, attention_mask=segments), ours(tokens, segments=segments)
    else:
        inputs = {} if "Sequence" in architecture else {"decoder_input_ids": shifted}
        theirs = reference(input_ids=tokens, attention_mask=segments, **inputs)
        out = ours(shifted, source=tokens, source_segments=segments)
    mine, real = out.hidden if out.logits is None else out.logits, segments == 1
    whole = ours.spec.decoder is not None or "class" in ours.spec.heads
    close(mine, values(theirs)) if whole else close(mine[real], values(theirs)[real])
    given_back(ours, architecture, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bloom"])
@torch.no_grad()
def test_a_text_that_ends_in_the_pad_id(name: str, tmp_path: Path) -> None:
    """Case 8. The law the reference breaks: it looks for the last token by its id, and pads with the end's id."""
    reference, ours = made(name, DECODERS[name][0] + TASKS[1], tmp_path / "a", pad_token_id=EOS)
    tokens, segments = tokens_of(), padded("right")
    tokens[tokens == EOS] += 1
    for row, n in enumerate(LENGTHS):
        tokens[row, n - 1 :] = EOS
    mine = ours(tokens, segments=segments).logits
    for row, n in enumerate(LENGTHS):
        close(mine[row], ours(tokens[row : row + 1, :n]).logits[0])
    theirs = reference(input_ids=tokens, attention_mask=segments).logits
    assert float((mine - theirs).abs().max()) > 0.1 * float(theirs.abs().max())
    # What it reads is the token before, in a batch and alone.
    cut = segments * (tokens != EOS)
    close(ours(tokens, segments=cut).logits, theirs)


@pytest.mark.parametrize(("name", "architecture"), [CASES[1], ("llama", "LlamaModel"), ("t5", SEQ2SEQ[2][1])])
def test_verify_compares_them(name: str, architecture: str, tmp_path: Path) -> None:
    made(name, architecture, tmp_path / "a")
    cells = against(phylon.load(tmp_path / "a", device="cpu"), transformers_reference(tmp_path / "a"))
    assert all(cell.passed for cell in cells), cells
    assert len(cells) > 6


def test_ours_to_the_reference(tmp_path: Path) -> None:
    """A head of ours on a decoder of ours is saved as the class that the reference has for it."""
    spec = family("qwen3").cases()[0]
    model = drawn(spec.replace(heads={"class": Classify(n_classes=3, pool=Last(), bias=False)}, ties=()))
    model.family = "qwen3"
    phylon.save(model, tmp_path / "a", format="hf")
    reference, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "a", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reference.config.pad_token_id = None
    tokens = tokens_of()[:1]
    with torch.no_grad():
        close(model(tokens).logits, reference.eval()(tokens).logits)


def test_refused(tmp_path: Path) -> None:
    made("llama", "LlamaForSequenceClassification", tmp_path / "a")
    edit_config(tmp_path / "a", {"architectures": ["LlamaForSequenceClasification"]})
    with pytest.raises(UserError, match="did you mean 'LlamaForSequenceClassification'"):
        phylon.load(tmp_path / "a", device="cpu")
    edit_config(tmp_path / "a", {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match=r"unexpected \('score\.weight'\)"):
        phylon.load(tmp_path / "a", device="cpu")
    edit_config(tmp_path / "a", {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}})
    with pytest.raises(UserError, match=r"score\.weight' is"):
        phylon.load(tmp_path / "a", device="cpu")

"""What every encoder-decoder must give: padded sources, padded targets, states, greedy texts, both directions."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phylon.checkpoint import open_safetensors
from phylon.generate import generate
from phylon.hub import load, save
from phylon.model import Model, ModelSpec

from .encoders import rows
from .harness import assert_close, differs, draw, drawn, edit_config, load_reference, random_tokens, same_tensors

torch.set_num_threads(1)


@torch.no_grad()
def logits(model: Model, tokens: Tensor, **inputs: Any) -> Tensor:
    found = model(tokens, **inputs).logits
    assert found is not None
    return found


@torch.no_grad()
def same(model: Model, reference: Any) -> None:
    """Logits with plain, right-padded and (against ours alone) left-padded sources; padded targets; chunks; greedy."""
    vocab = model.spec.last_stack.embed.vocab_size
    source, source_segments = rows(vocab, "right")
    tokens, segments = rows(vocab, "right")
    tokens, segments = tokens.flip(0), segments.flip(0)
    theirs = reference(
        input_ids=source,
        attention_mask=source_segments,
        decoder_input_ids=tokens,
        decoder_attention_mask=segments,
        use_cache=False,
    ).logits
    given = {"source": source, "source_segments": source_segments}
    ours = logits(model, tokens, segments=segments, **given)
    assert_close(ours[segments == 1], theirs[segments == 1])
    left, left_segments = rows(vocab, "left")
    moved = logits(model, tokens, segments=segments, source=left, source_segments=left_segments)
    assert_close(moved[segments == 1], ours[segments == 1])
    whole = random_tokens(vocab, len(source), 13)
    plain = reference(input_ids=source, decoder_input_ids=whole, attention_mask=source_segments, use_cache=False).logits
    ours = logits(model, whole, **given)
    assert_close(ours, plain)
    in_chunks(model, whole, given, ours)
    changed = source.clone()
    changed[0, -1] = 1 + changed[0, -1] % (vocab - 1)
    assert differs(logits(model, whole, source=changed, source_segments=source_segments)[:1], ours[:1])
    greedy(model, reference, source, source_segments)


@torch.no_grad()
def in_chunks(model: Model, tokens: Tensor, given: dict[str, Tensor], whole: Tensor) -> None:
    state, found = model.new_state(len(tokens)), []
    for i, chunk in enumerate(tokens.split([5, 1, 4, 3], dim=1)):
        found.append(logits(model, chunk, state=state, **(given if i == 0 else {})))
    assert_close(torch.cat(found, dim=1), whole)


@torch.no_grad()
def greedy(model: Model, reference: Any, source: Tensor, segments: Tensor, length: int = 12) -> None:
    """Decoding through the state, by hand and by ``generate``, gives the text of the reference's ``generate``."""
    start = model.generation.decoder_start_id
    assert start is not None
    theirs = reference.generate(
        input_ids=source,
        attention_mask=segments,
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        bad_words_ids=None,
        decoder_start_token_id=start,
    )
    state, tokens = model.new_state(len(source)), [torch.full((len(source), 1), start)]
    given: dict[str, Any] = {"source": source, "source_segments": segments}
    for _ in range(length):
        tokens.append(logits(model, tokens[-1], state=state, **given)[:, -1:].argmax(-1))
        given = {}
    assert torch.equal(torch.cat(tokens, dim=1), theirs)
    prompts = [row[kept == 1].tolist() for row, kept in zip(source, segments, strict=True)]
    written = generate(model, prompts, max_new_tokens=length, temperature=0, eos_ids=(), batch_size=3)
    assert [row["tokens"] for row in written] == theirs[:, 1:].tolist()


def check(cls: Any, config: Any, folder: Path, edit: Any = None, prepare: Any = None) -> Model:
    """The reference, saved by itself, is what ours computes, and comes back bit for bit."""
    config._attn_implementation = "eager"
    reference = cls(config).eval()
    draw(reference)
    if prepare:
        prepare(reference)
    reference.save_pretrained(folder / "theirs")
    if edit:
        edit_config(folder / "theirs", edit)
    model = load(folder / "theirs", device="cpu")
    same(model, reference)
    save(model, folder / "ours", format="hf")
    stored, resaved = open_safetensors(folder / "theirs"), open_safetensors(folder / "ours")
    same_tensors(((n, stored.read(n)) for n in stored.tensors), ((n, resaved.read(n)) for n in resaved.tensors))
    same(model, load_reference(folder / "ours", cls))
    back = load(folder / "ours", device="cpu")
    assert (back.spec, back.generation) == (model.spec, model.generation)
    return model


def ours_saved(spec: ModelSpec, cls: Any, folder: Path, prepare: Any = None) -> None:
    """Ours, saved in the Hugging Face format, is what the reference computes."""
    model = drawn(spec)
    if prepare:
        prepare(model)
    model.generation = model.generation.replace(pad_id=0, decoder_start_id=0, eos_ids=(1,))
    save(model, folder / "a", format="hf")
    same(model, load_reference(folder / "a", cls))
    back = load(folder / "a", device="cpu")
    assert back.spec.replace(init=spec.init) == spec
    same_tensors(model.state_dict().items(), back.state_dict().items())

"""What every encoder family must give: a tiny random reference of each task, loaded and saved back exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phylon.checkpoint import open_safetensors
from phylon.families import family
from phylon.hub import load, save
from phylon.model import Model, ModelSpec, build_meta
from phylon.spec import UserError

from .harness import assert_close, differs, draw, drawn, edit_config, load_reference, random_tokens, same_tensors

torch.set_num_threads(1)
LENGTHS = (17, 5, 1, 11)


def rows(vocab_size: int, side: str, avoid: int = 0) -> tuple[Tensor, Tensor]:
    """A padded batch: tokens (B, T) with the pad id 0, and segments. Real tokens are above ``avoid``."""
    width = max(LENGTHS)
    tokens, segments = torch.full((len(LENGTHS), width), avoid), torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    for row, n in enumerate(LENGTHS):
        where = slice(width - n, width) if side == "left" else slice(0, n)
        tokens[row, where] = random_tokens(vocab_size - avoid - 1, 1, n, seed=n)[0] + avoid + 1
        segments[row, where] = 1
    return tokens, segments


@torch.no_grad()
def same(model: Model, reference: Any, outputs: dict[str, Any], avoid: int = 0) -> None:
    """Hidden states and every head, on whole and right-padded batches; left padding equals right padding."""
    vocab, n_types = model.spec.last_stack.embed.vocab_size, model.spec.last_stack.embed.n_types
    tokens, segments = rows(vocab, "right", avoid)
    kinds = None if n_types is None else (torch.arange(tokens.shape[1])[None] > 3).expand(tokens.shape).long() % n_types
    for given in ({"segments": segments}, {}):
        if not given:
            tokens = random_tokens(vocab - avoid - 1, 3, 13) + avoid + 1
            kinds = None if kinds is None else kinds[:3, :13]
        mask = given.get("segments", torch.ones_like(tokens))
        extra = {} if kinds is None else {"token_type_ids": kinds}
        theirs = reference(input_ids=tokens, attention_mask=mask, output_hidden_states=True, **extra)
        ours = model(tokens, types=kinds, **given)
        assert ours.heads.keys() == outputs.keys()
        assert_close(ours.hidden[mask == 1], theirs.hidden_states[-1][mask == 1])
        for name, get in outputs.items():
            mine, other = ours.heads[name], get(theirs)
            token_wise = mine.shape[:2] == tokens.shape
            assert_close(mine[mask == 1] if token_wise else mine, other[mask == 1] if token_wise else other)
    right, left = (rows(vocab, side, avoid) for side in ("right", "left"))
    a, b = (model(t, segments=s) for t, s in (right, left))
    assert_close(a.hidden[right[1] == 1], b.hidden[left[1] == 1])
    changed = right[0].clone()
    changed[0, 16] = avoid + 1 + (changed[0, 16] - avoid) % (vocab - avoid - 1)
    assert differs(model(changed, segments=right[1]).hidden[0, 0], a.hidden[0, 0]), "no token looks ahead"


def check(cls: Any, config: Any, folder: Path, outputs: dict[str, Any], avoid: int = 0, edit: Any = None) -> Model:
    """The reference, saved by itself, is what ours computes, and comes back bit for bit."""
    config._attn_implementation = "eager"
    reference = cls(config).eval()
    draw(reference)
    reference.save_pretrained(folder / "theirs")
    if edit:
        edit_config(folder / "theirs", edit)
    model = load(folder / "theirs", device="cpu")
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in reference.parameters() if p.requires_grad
    )
    same(model, reference, outputs, avoid)
    save(model, folder / "ours", format="hf")
    stored, resaved = open_safetensors(folder / "theirs"), open_safetensors(folder / "ours")
    same_tensors(((n, stored.read(n)) for n in stored.tensors), ((n, resaved.read(n)) for n in resaved.tensors))
    same(model, load_reference(folder / "ours", cls), outputs, avoid)
    assert load(folder / "ours", device="cpu").spec == model.spec
    return model


def ours_saved(spec: ModelSpec, cls: Any, folder: Path, outputs: dict[str, Any], avoid: int = 0) -> None:
    """Ours, saved in the Hugging Face format, is what the reference computes."""
    model = drawn(spec)
    save(model, folder / "a", format="hf")
    same(model, load_reference(folder / "a", cls), outputs, avoid)
    back = load(folder / "a", device="cpu")
    assert back.spec.replace(init=spec.init) == spec
    same_tensors(model.state_dict().items(), back.state_dict().items())


def golden(name: str) -> None:
    """The parameter counts of a family's presets."""
    chosen = family(name)
    assert set(chosen.golden) == set(chosen.presets)
    for preset, count in chosen.golden.items():
        assert sum(p.numel() for p in build_meta(chosen.presets[preset]()).parameters()) == count, preset


def refuses(folder: Path, config: Any, changes: dict[str, Any], match: str) -> None:
    """A config with these changes is refused in one line."""
    config.save_pretrained(folder)
    edit_config(folder, changes)
    with pytest.raises(UserError, match=match) as caught:
        load(folder, device="cpu")
    assert "\n" not in str(caught.value)

"""Parity with `transformers`, for every family: ours saved and read by the reference, the reference's read and saved.

A family's test file gives specs (``ours_to_reference``) and configurations (``reference_to_ours``); all the rest is
here. Weights and tolerance are those of the design: matrices with 2 / sqrt(fan_in), everything else perturbed, and
``max|difference| <= 1e-5 max|reference|`` in fp32.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from phylon.checkpoint import open_safetensors
from phylon.hub import load, save
from phylon.model import Model, ModelSpec, build

transformers = pytest.importorskip("transformers", reason="the test extra (transformers) is not installed")

TOLERANCE = 1e-5


def draw(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights that make scores spread, so that errors show; norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                # A table of sinusoids, part of the method.
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            elif any(part in name for part in ("embed", "wte", "wpe")):
                parameter.copy_(noise)
            else:
                # GPT-2's reference stores its maps (in, out); both sizes are close enough for the purpose.
                parameter.copy_(2 * noise / math.sqrt(parameter.shape[-1]))


def drawn(spec: ModelSpec, seed: int = 0) -> Model:
    """Our model of ``spec`` with such weights, in eval mode."""
    model = build(spec, device="cpu")
    draw(model, seed)
    return model.eval()


@contextmanager
def wide_casts() -> Iterator[None]:
    """Inside, what a program casts to fp32 it casts to fp64, tables that it computes on construction among it.

    The reference does so in the middle of a pass (norms, softmax, recurrences), whatever the dtype of its weights: only
    like this is it a float64 run, and a difference to ours no rounding.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(torch, "FloatTensor", torch.DoubleTensor),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def wide_reference(model: Any, **given: Any) -> Any:
    """What a copy of a reference's model computes in float64 throughout."""
    with wide_casts():
        kind = model.config._attn_implementation
        copy = type(model)._from_config(model.config, attn_implementation=kind, dtype=torch.float64).eval()
        copy.config._experts_implementation = "eager"  # the other one has no float64
        # A table of sinusoids, part of the method, is computed anew.
        tables = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        stored = {name: value for name, value in model.state_dict().items() if name not in tables}
        left = copy.load_state_dict(stored, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= tables
        return copy(
            **{k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
        )


def random_tokens(vocab_size: int, batch: int = 2, length: int = 21, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed + 1000))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    error, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert error <= tolerance * scale, f"off by {error:.3g}, {error / scale:.3g} of the largest logit"


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by far more than rounding: the positive control."""
    return float((a - b).abs().max()) > 1e-3 * float(b.abs().max())


def load_reference(folder: Path, cls: Any = None) -> Any:
    cls = cls or transformers.AutoModelForCausalLM
    model, info = cls.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
def reference_logits(model: Any, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False, **inputs).logits


@torch.no_grad()
def our_logits(model: Model, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = model(tokens, **inputs).logits
    assert logits is not None
    return logits


def ours_to_reference(spec: ModelSpec, folder: Path, cls: Any = None) -> tuple[Model, Any]:
    """Ours, saved in the Hugging Face format, is what the reference computes; returns both models."""
    model = drawn(spec)
    save(model, folder, format="hf")
    reference = load_reference(folder, cls)
    tokens = random_tokens(vocabulary(spec))
    assert_close(our_logits(model, tokens), reference_logits(reference, tokens))
    back = load(folder, device="cpu")
    assert back.spec.replace(init=spec.init) == spec
    same_tensors(model.state_dict().items(), back.state_dict().items())
    return model, reference


def reference_to_ours(
    config: Any, folder: Path, edit: dict[str, Any] | None = None, cls: Any = None, length: int = 21
) -> tuple[Model, Any]:
    """The reference, saved by itself, is what ours computes, and comes back bit for bit; returns both models.

    ``edit`` changes its ``config.json`` afterwards: another spelling, a key of older versions. ``None`` removes a key.
    """
    cls = cls or transformers.AutoModelForCausalLM
    made = cls.from_config(config, attn_implementation="eager", dtype=torch.float32)
    draw(made)
    made.save_pretrained(folder)
    if edit:
        edit_config(folder, edit)
    reference = load_reference(folder, cls)
    model = load(folder, device="cpu")
    tokens = random_tokens(vocabulary(model.spec), length=length)
    assert_close(our_logits(model, tokens), reference_logits(reference, tokens))
    again = folder.with_name(folder.name + "-again")
    save(model, again, format="hf")
    stored, resaved = open_safetensors(folder), open_safetensors(again)
    same_tensors(
        ((name, stored.read(name)) for name in stored.tensors), ((name, resaved.read(name)) for name in resaved.tensors)
    )
    assert_close(reference_logits(load_reference(again, cls), tokens), reference_logits(reference, tokens))
    return model, reference


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not REMOVED}))


REMOVED = object()


def same_tensors(a: Iterable[tuple[str, torch.Tensor]], b: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The same names, dtypes, shapes and bits."""
    first, second = dict(a), dict(b)
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(tensor.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8)), name


def vocabulary(spec: ModelSpec) -> int:
    return spec.last_stack.embed.vocab_size  # type: ignore[attr-defined]


def padded(model: Model, reference: Any, left: bool, positions: bool = False) -> None:
    """A padded batch equals the reference at the real tokens, and equals each row alone."""
    lengths, width = (17, 9, 13), 17
    rows = [random_tokens(vocabulary(model.spec), 1, n, seed=n)[0] for n in lengths]
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    segments = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, where], segments[i, where] = row, 1
    given = {"position_ids": (segments.cumsum(1) - 1).clamp(min=0)} if positions else {}
    theirs = reference_logits(reference, tokens, attention_mask=segments, **given)
    ours = our_logits(model, tokens, segments=segments)
    assert_close(ours[segments == 1], theirs[segments == 1])
    for i, row in enumerate(rows):
        assert_close(ours[i][segments[i] == 1], our_logits(model, row[None])[0])

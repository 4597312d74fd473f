"""What every decoder-only family must give: a tiny random reference model, loaded, computed and saved back exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import phylon
from phylon.model import Model

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

TOLERANCE = 1e-5
LENGTHS = (13, 7, 2)
VOCAB = 37


def drawn(reference: nn.Module, seed: int = 0) -> Any:
    """Matrices with 2 / sqrt(fan_in), so that scores spread; norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = {"Gemma3RMSNorm"}
    with torch.no_grad():
        for module in reference.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                elif parameter.ndim >= 2:
                    conv = type(module).__name__ == "Conv1D"
                    parameter.copy_(noise * 2 / parameter.shape[0 if conv else -1] ** 0.5)
                elif name == "bias" or type(module).__name__ in zero_centred:
                    parameter.copy_(0.3 * noise)
                else:
                    parameter.copy_(1 + 0.3 * noise)
    return reference.eval()


def close(ours: Tensor, theirs: Tensor) -> None:
    error, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert error <= TOLERANCE * scale, f"differ by {error / scale:.1e} of the largest logit"


def tokens_of(vocab: int = VOCAB, shape: tuple[int, int] = (len(LENGTHS), LENGTHS[0])) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def padded(side: str) -> Tensor:
    """Segments (B, T) of rows of ``LENGTHS``, padded on one side."""
    segments = torch.zeros(len(LENGTHS), LENGTHS[0], dtype=torch.int64)
    for row, n in enumerate(LENGTHS):
        segments[row, slice(-n, None) if side == "left" else slice(0, n)] = 1
    return segments


def reference_logits(reference: Any, tokens: Tensor, segments: Tensor | None = None, *, positions: bool) -> Tensor:
    """The reference's logits. ``positions``: whether it must be told where each token stands (a law it breaks)."""
    options: dict[str, Any] = {"use_cache": False}
    if segments is not None:
        options["attention_mask"] = segments
        if positions:
            options["position_ids"] = (segments.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return reference(tokens, **options).logits


@torch.no_grad()
def check(
    reference: Any,
    folder: Path,
    *,
    positions: bool = True,
    attn: str = "eager",
) -> Model:
    """Load, compute (whole, padded, in chunks), save and load back. Returns our model.

    ``attn`` is the reference's attention, where only one of them is right.
    """
    drawn(reference)
    reference.save_pretrained(folder / "theirs")
    ours = phylon.load(folder / "theirs", device="cpu")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in reference.parameters())
    tokens = tokens_of()
    whole = ours(tokens).logits
    close(whole, reference_logits(reference, tokens, positions=positions))
    for side in ("left", "right"):
        segments = padded(side)
        real = segments != 0
        close(
            ours(tokens, segments=segments).logits[real],
            reference_logits(reference, tokens, segments, positions=positions)[real],
        )
    streams(ours, tokens, whole)
    round_trip(ours, folder, tokens, whole, attn)
    return ours


def streams(model: Model, tokens: Tensor, whole: Tensor) -> None:
    """Chunks onto a state equal the whole, and the history matters."""
    state = model.new_state(len(tokens))
    parts = [model(chunk, state=state).logits for chunk in tokens.split([5, 1, 4, 3], dim=1)]
    close(torch.cat(parts, dim=1), whole)
    changed = tokens.clone()
    changed[:, -3:-1] = (changed[:, -3:-1] + 1) % VOCAB
    assert float((model(changed).logits - whole)[:, -1].abs().max()) > 1e-2 * float(whole.abs().max())


def round_trip(ours: Model, folder: Path, tokens: Tensor, whole: Tensor, attn: str) -> None:
    """Saved in the same format: every tensor bit for bit, a config the reference loads, and the same model again."""
    phylon.save(ours, folder / "ours", format="hf")
    theirs, back = load_file(folder / "theirs/model.safetensors"), load_file(folder / "ours/model.safetensors")
    assert theirs.keys() == back.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, back[name]), name
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "ours", attn_implementation=attn, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    close(whole, reference_logits(again.eval(), tokens, positions=True))
    reloaded = phylon.load(folder / "ours", device="cpu")
    assert reloaded.spec == ours.spec
    assert torch.equal(reloaded(tokens).logits, whole)


@contextmanager
def refuses(*words: str) -> Iterator[None]:
    """One line that names the thing."""
    with pytest.raises(phylon.UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message

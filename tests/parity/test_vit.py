"""ViT and DeiT against the reference: tasks, images of other sizes, both directions; what other systems get wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from phylon.checkpoint import open_safetensors
from phylon.families import family
from phylon.families.vit import vit_spec
from phylon.hub import load, save
from phylon.model import Model, build
from phylon.spec import UserError

from .encoders import golden, refuses
from .harness import assert_close, differs, draw, drawn, edit_config, load_reference, same_tensors

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 35}
SIZES |= {"image_size": 24, "patch_size": 8}
LOGITS = {"class": lambda out: out.logits}
CASES = {
    "class": (hf.ViTForImageClassification, LOGITS, {"num_labels": 5}),
    "grey, no bias": (hf.ViTForImageClassification, LOGITS, {"num_channels": 1, "qkv_bias": False}),
    "gelu_new": (hf.ViTForImageClassification, LOGITS, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "pooled": (hf.ViTModel, {"pooled": lambda out: out.pooler_output}, {"patch_size": 6}),
    "deit": (hf.DeiTForImageClassification, LOGITS, {"num_labels": 5}),
    "deit with teacher": (hf.DeiTForImageClassificationWithTeacher, {"distilled": LOGITS["class"]}, {"num_labels": 5}),
    "deit pooled": (hf.DeiTModel, {"pooled": lambda out: out.pooler_output}, {}),
}


def pictures(model: Model, height: int, width: int) -> Tensor:
    channels = model.spec.encoder.embed.n_channels
    return torch.randn(3, channels, height, width, generator=torch.Generator().manual_seed(height * 100 + width))


@torch.no_grad()
def same(model: Model, reference: Any, outputs: dict[str, Any]) -> None:
    """The model's own size, larger and smaller ones, wider and higher ones."""
    p = model.spec.encoder.embed.patch_size
    size = model.spec.encoder.embed.grid[0] * p
    for height, width in ((size, size), (size + p, size + p), (size - p, size + 2 * p), (size + p, p)):
        images = pictures(model, height, width)
        theirs = reference(pixel_values=images, interpolate_pos_encoding=(height, width) != (size, size))
        ours = model(images=images)
        for name, get in outputs.items():
            assert_close(ours.heads[name], get(theirs))
        assert ours.hidden.shape[1] == model.spec.encoder.embed.n_extra + height * width // p**2


def own_tokens(reference: Any) -> None:
    draw(reference)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "token" in name or "position_embeddings" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if name.endswith("projection.weight"):
                parameter *= 24**-0.5


@pytest.mark.parametrize("name", CASES)
def test_reference_to_ours(name: str, tmp_path: Path) -> None:
    cls, outputs, changes = CASES[name]
    config = cls.config_class(**(SIZES | changes))
    config._attn_implementation = "eager"
    reference = cls(config).eval()
    own_tokens(reference)
    reference.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", device="cpu")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    same(model, reference, outputs)
    save(model, tmp_path / "ours", format="hf")
    stored, resaved = open_safetensors(tmp_path / "theirs"), open_safetensors(tmp_path / "ours")
    same_tensors(((n, stored.read(n)) for n in stored.tensors), ((n, resaved.read(n)) for n in resaved.tensors))
    same(model, load_reference(tmp_path / "ours", cls), outputs)
    assert load(tmp_path / "ours", device="cpu").spec == model.spec


@pytest.mark.parametrize("case", ["vit-0", "vit-1", "deit-0", "deit-1"])
def test_ours_to_reference(case: str, tmp_path: Path) -> None:
    name, number = case.split("-")
    spec = family(name).cases()[int(number)]
    model = drawn(spec)
    save(model, tmp_path / "a", format="hf")
    distilled = "distilled" in spec.heads
    cls = {"vit": hf.ViTForImageClassification, "deit": hf.DeiTForImageClassification}[name]
    reference = load_reference(tmp_path / "a", hf.DeiTForImageClassificationWithTeacher if distilled else cls)
    embed = spec.encoder.embed
    images = pictures(model, *(n * embed.patch_size for n in embed.grid))
    with torch.no_grad():
        assert_close(model(images=images).logits, reference(pixel_values=images).logits)
    back = load(tmp_path / "a", device="cpu")
    assert back.spec.replace(init=spec.init) == spec
    same_tensors(model.state_dict().items(), back.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_golden_counts(name: str) -> None:
    golden(name)


def test_mean_pooling_without_a_class_token(tmp_path: Path) -> None:
    model = drawn(family("vit").cases()[2])
    with torch.no_grad():
        out = model(images=pictures(model, 12, 12))
        assert out.hidden.shape[1] == 9
        assert_close(out.logits, model.heads["class"].proj(out.hidden.mean(1)))
    with pytest.raises(UserError, match="no family's hf format"):
        save(model, tmp_path / "a", format="hf")


def test_positions_are_interpolated_in_fp32() -> None:
    """By target size, in fp32 whatever the model's dtype; the grid of a wide model is not taken to be square."""
    model = build(vit_spec(d_model=8, n_layers=1, n_heads=1, image_size=(8, 32)), device="cpu").eval()
    embed = model.encoder.embed
    with torch.no_grad():
        embed.positions.normal_(generator=torch.Generator().manual_seed(0))
    own = embed.positions_for(2, 8)
    assert own is embed.positions
    wide = embed.positions_for(3, 7)
    assert wide.shape == (22, 8)
    assert torch.equal(wide[0], embed.positions[0])
    grid = embed.positions[1:].view(2, 8, 8).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, (3, 7), mode="bicubic", align_corners=False)
    assert_close(wide[1:], expected[0].permute(1, 2, 0).reshape(21, 8))
    half = model.to(torch.bfloat16).encoder.embed.positions_for(3, 7)
    assert half.dtype == torch.float32


def test_batches_and_pixels() -> None:
    model = drawn(family("vit").cases()[0])
    images = pictures(model, 12, 12)
    with torch.no_grad():
        together = model(images=images).logits
        for i in range(3):
            assert_close(model(images=images[i : i + 1]).logits, together[i : i + 1])
        changed = images.clone()
        changed[:, :, -1, -1] += 3
        assert differs(model(images=changed).logits, together)


def test_losses_of_the_distilled_head() -> None:
    model = drawn(family("deit").cases()[0])
    images, targets = pictures(model, 12, 12), torch.tensor([[1, 2], [0, 0], [4, -100]])
    out = model(images=images, targets=targets)
    both = model.heads["distilled"].both(out.hidden, _context(out.hidden))
    logs = both.log_softmax(-1)
    by_hand = -(logs[0, 0, 1] + logs[0, 1, 2] + logs[1, 0, 0] + logs[1, 1, 0] + logs[2, 0, 4]) / 5
    torch.testing.assert_close(out.losses["distilled"].mean, by_hand)
    with pytest.raises(UserError, match="label, teacher"):
        model(images=images, targets=targets[:, 0])


def _context(hidden: Tensor) -> Any:
    from phylon.layers.context import Context
    from phylon.patterns import Records

    return Context(records=Records(torch.arange(hidden.shape[1])[None]), aligned=True, batch_size=len(hidden))


def test_refusals(tmp_path: Path) -> None:
    model = drawn(family("vit").cases()[0])
    images = pictures(model, 12, 12)
    for match, inputs in (
        ("reads images alone", {}),
        ("reads images alone, without tokens", {"images": images, "tokens": torch.ones(3, 4, dtype=torch.int64)}),
        ("reads images alone, without segments", {"images": images, "segments": torch.ones(3, 10, dtype=torch.int64)}),
        ("images of 12 x 11 do not cut", {"images": images[..., :11]}),
        ("images have 1 channels", {"images": images[:, :1]}),
        ("images must be float", {"images": images.long()}),
    ):
        with pytest.raises(UserError, match=match):
            model(**inputs)
    with pytest.raises(UserError, match="takes no images"):
        drawn(family("bert").cases()[0])(images=images)
    config = hf.ViTConfig(**SIZES, architectures=["ViTForImageClassification"])
    refuses(tmp_path / "a", config, {"architectures": ["ViTForMaskedImageModeling"]}, "is not supported")
    refuses(tmp_path / "b", config, {"image_size": 20}, "20 x 20 do not cut")
    refuses(tmp_path / "c", config, {"patch_size": [8, 4]}, "patches are square")
    refuses(tmp_path / "d", config, {"image_size": 2**40}, "in pixels must be")
    config.save_pretrained(tmp_path / "e")
    edit_config(tmp_path / "e", {"architectures": ["ViTModel"], "pooler_act": "relu"})
    with pytest.raises(UserError, match="pooler ends in tanh"):
        load(tmp_path / "e", device="cpu")

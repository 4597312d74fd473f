"""What the pages say: golden files, and the numbers in them against models that are built and run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phylon.cli import docs
from phylon.cli.main import COMMANDS
from phylon.cli.page import in_short, model_page
from phylon.cli.walk import walk, walk_page
from phylon.families import families, preset
from phylon.families.llama import llama_spec
from phylon.layers.norms import RMSNorm
from phylon.model import build, record
from phylon.model.spec import Block, Branch, Sublayer
from phylon.patterns import Window
from phylon.spec.errors import UserError
from phylon.spec.override import override

ROOT = Path(__file__).parents[2]
CASES = [pytest.param(case, id=f"{f.name}-{i}") for f in families() for i, case in enumerate(f.cases())]


@pytest.mark.parametrize("name", ["gpt2", "llama3.1-8b", "mistral-7b", "tinygpt"])
def test_show(golden: Callable, name: str) -> None:
    golden(f"show_{name}.txt", model_page(name, preset(name)) + "\n")


def test_show_of_blocks_that_differ(golden: Callable) -> None:
    spec = llama_spec(d_model=48, n_layers=6, n_heads=4, n_kv_heads=2, vocab_size=100, tied=True)
    spec = override(spec, {f"decoder.blocks.{i}.attn.pattern": Window(size=16) for i in (0, 1, 3, 4)})
    block = spec.decoder.blocks[0]
    norm, attn, ffn = RMSNorm(), block.op("attn"), block.op("ffn")
    parallel = Block(
        sublayers=(
            Sublayer(branches=(Branch(op=attn, gain=0.5), Branch(op=ffn, norm_branch=norm)), norm_shared=norm),
            Sublayer(branches=(Branch(op=ffn, drop=0.1),), norm_out=norm),
        )
    )
    spec = spec.replace(decoder=spec.decoder.replace(blocks=(*spec.decoder.blocks, parallel)))
    golden("show_mixed_blocks.txt", model_page("mixed", spec) + "\n")


@pytest.mark.parametrize("name", ["tinygpt", "llama-7b"])
def test_shapes(golden: Callable, name: str) -> None:
    golden(f"shapes_{name}.txt", walk_page(name, preset(name), batch=2, seq_len=8) + "\n")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(golden: Callable, command: str | None) -> None:
    golden(f"help_{command or 'phylon'}.txt", docs.help_of(command) + "\n")


def test_base_width_shapes() -> None:
    spec = llama_spec(d_model=512, n_layers=6, n_heads=8, head_dim=64, d_ff=2048, vocab_size=1000)
    found = dict(walk(spec, 2, 8))
    assert found["decoder.blocks.3.resid_pre"] == (2, 8, 512)
    assert {found[f"decoder.blocks.3.attn.{name}"] for name in "qkvz"} == {(2, 8, 8, 64)}
    assert found["decoder.blocks.3.attn.scores"] == found["decoder.blocks.3.attn.weights"] == (2, 8, 8, 8)
    assert found["decoder.blocks.3.ffn.hidden"] == (2, 8, 2048)
    assert found["heads.lm.logits"] == (2, 8, 1000)


@pytest.mark.parametrize("spec", CASES)
def test_shapes_on_the_meta_device_are_those_of_a_real_pass(spec) -> None:
    model = build(spec, device="cpu").eval()
    image = getattr(spec.last_stack.embed, "image_shape", None)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    both = spec.encoder is not None and spec.decoder is not None
    with torch.inference_mode(), record(model, "*") as taps:
        if image is not None:
            model(images=torch.zeros(2, *image))
        else:
            model(tokens, **({"source": tokens} if both else {}))
    walked = dict(walk(spec, 2, 5))
    assert list(taps) == [path for path in walked if path in taps]
    assert {path: tuple(value.shape) for path, value in taps.items()} == {path: walked[path] for path in taps}
    assert "norm" in " ".join(walked.keys() - taps.keys()) or len(walked) == len(taps) + 1


def test_shapes_of_an_image_model() -> None:
    """224 / 16 = 14 rows and columns of patches, and the class token."""
    page = walk_page("vit-b16", preset("vit-b16"), batch=3)
    assert page.startswith("vit-b16: one forward pass, batch 3, images 3 x 224 x 224")
    found = dict(walk(preset("vit-b16"), 3, None))
    assert found["images"] == (3, 3, 224, 224)
    assert found["encoder.embed.out"] == found["encoder.blocks.11.resid_post"] == (3, 197, 768)
    assert found["encoder.blocks.0.attn.scores"] == (3, 12, 197, 197)
    with pytest.raises(UserError, match="--seq-len is of tokens, and vit-b16 reads images"):
        walk_page("vit-b16", preset("vit-b16"), batch=3, seq_len=8)
    with pytest.raises(UserError, match="batch must be at least 1"):
        walk_page("vit-b16", preset("vit-b16"), batch=0)


@pytest.mark.parametrize("spec", CASES)
def test_every_family_has_its_pages(spec) -> None:
    page = model_page("case", spec)
    total = sum(p.numel() for p in build(spec, device="meta").parameters())
    assert f"{total:,} parameters" in page.splitlines()[0]
    assert all(len(line) <= 80 for line in page.splitlines())


@pytest.mark.parametrize("name", ["gpt2", "llama2-70b"])
def test_counts_of_the_page_add_up(name: str) -> None:
    page = model_page(name, preset(name)).splitlines()
    counts = {}
    for line in page:
        words = line.split()
        if words and words[-1].replace(",", "").isdigit():
            counts[words[0]] = int(words[-1].replace(",", ""))
    n_blocks = len(preset(name).decoder.blocks)
    parts = counts["attn"] + counts["attn_norm"] + counts["ffn"] + counts["ffn_norm"]
    assert parts == counts["blocks"]
    assert counts["embed"] + n_blocks * parts + counts["norm_final"] == counts["decoder"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 4, 6], "0,2,…,6"), ([0, 1, 3, 4], "0-1,3-4"), ([1, 5], "1,5")],
)
def test_places_in_short(numbers: list[int], text: str) -> None:
    assert in_short(numbers) == text


def test_the_generated_docs_are_up_to_date() -> None:
    stale = docs.stale(ROOT, docs.pages(ROOT))
    assert stale == [], "run: python -m phylon.cli.docs"


def test_a_readme_without_markers_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="marker"):
        docs.with_families("# Phylon\n", ("a", "b", "c", "d"))

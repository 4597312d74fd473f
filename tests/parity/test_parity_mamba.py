"""Mamba and Mamba-2 against transformers: logits and gradients, both directions, and where the reference is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import phylon
from phylon import UserError
from phylon.checkpoint import Layout, MemorySource, Rename
from phylon.families import family
from phylon.families.base import Config
from phylon.families.mamba import mamba_rules
from phylon.layers.context import Context
from phylon.layers.mixers.mamba import Mamba
from phylon.layers.norms import RMSNorm
from phylon.model import Model, build_meta
from phylon.patterns import Records
from phylon.spec.registry import build

transformers = pytest.importorskip("transformers", reason="the reference needs transformers")

MAMBA = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 37, "state_size": 5}
MAMBA2 = MAMBA | {"num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", MAMBA),
    "mamba-bias-odd": (
        "Mamba",
        MAMBA
        | {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 3, "expand": 3}
        | {"hidden_act": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-one-group": ("Mamba2", MAMBA2 | {"n_groups": 1, "num_heads": 3, "head_dim": 16, "conv_kernel": 2}),
    "mamba2-bias-limits": (
        "Mamba2",
        MAMBA2
        | {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.05, 0.5), "tie_word_embeddings": True},
    ),
}


def reference(kind: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A tiny reference model whose matrices are drawn with gain 2 / sqrt(fan_in), and vectors that are not trivial."""
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    draw(model)
    return model


def draw(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        leaf = name.split(".", 2)[-1]
        with torch.no_grad():
            if "embeddings" in name:
                parameter.normal_()
            elif "A_log" in leaf:
                parameter.normal_(0, 0.5)
            elif "dt" in leaf and parameter.ndim == 1:
                parameter.uniform_(-3, 0)
            elif parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0, 2 / parameter[0].numel() ** 0.5)


@pytest.fixture(params=sorted(CASES))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Model, Path]:
    return make_pair(*CASES[request.param], tmp_path)


def make_pair(kind: str, options: dict[str, Any], tmp_path: Path) -> tuple[Any, Model, Path]:
    theirs = reference(kind, options)
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    return theirs, phylon.load(folder, device="cpu"), folder


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 37, (batch, length), generator=torch.Generator().manual_seed(5))


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    error = (got - wanted).abs().max().item()
    assert error <= 1e-5 * wanted.abs().max().item(), error


def far(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).abs().max() > 1e-2 * wanted.abs().max())


@torch.no_grad()
def test_logits(pair: tuple[Any, Model, Path]) -> None:
    theirs, ours, _ = pair
    for batch, length in ((2, 11), (1, 1), (3, 67)):
        ids = tokens(batch, length)
        assert_near(ours(ids).logits, theirs(ids, use_cache=False).logits)


def test_gradients(pair: tuple[Any, Model, Path]) -> None:
    """Some of these draws are ill-conditioned, so that both sides are held against our own fp64 run."""
    theirs, ours, folder = pair
    ids = tokens(2, 9)
    theirs(ids, labels=ids, use_cache=False).loss.backward()
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    exact = phylon.load(folder, dtype="float64", device="cpu")
    for model in (ours, exact):
        model(ids, targets=targets).losses["lm"].mean.backward()
    names = {
        "backbone.embeddings.weight": "decoder.embed.tokens.weight",
        "backbone.layers.0.mixer.A_log": "decoder.blocks.0.mixer.A_log",
        "backbone.layers.1.mixer.D": "decoder.blocks.1.mixer.D",
    }
    for their_name, name in names.items():
        wanted = exact.get_parameter(name).grad
        error = (ours.get_parameter(name).grad - wanted).abs().max().item()
        their_error = (theirs.get_parameter(their_name).grad - wanted).abs().max().item()
        size = wanted.abs().max().item()
        assert their_error <= 1e-2 * size
        assert error <= max(1e-5 * size, 2 * their_error)


@torch.no_grad()
def test_saving_gives_back_every_tensor_and_a_config_that_the_reference_loads(
    pair: tuple[Any, Model, Path], tmp_path: Path
) -> None:
    theirs, ours, folder = pair
    back = phylon.save(ours, tmp_path / "back", format="hf")
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = type(theirs).from_pretrained(back)
    ids = tokens(2, 7)
    assert_near(again(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)
    native = phylon.load(phylon.save(ours, tmp_path / "native"), device="cpu")
    assert native.spec == ours.spec
    assert torch.equal(native(ids).logits, ours(ids).logits)


@torch.no_grad()
def test_left_padding(pair: tuple[Any, Model, Path]) -> None:
    theirs, ours, _ = pair
    ids, real = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[0, :4] = 0
    alone = theirs(ids[:1, 4:], use_cache=False).logits
    assert_near(ours(ids, segments=real).logits[:1, 4:], alone)
    padded = theirs(ids, attention_mask=real, use_cache=False).logits[:1, 4:]
    if theirs.config.use_bias:
        # The reference zeroes padding before the map in, whose bias then enters the convolution (law: padding).
        assert far(padded, alone)
    else:
        assert_near(padded, alone)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(4, 6), (3, 3, 4)])
def test_chunks_of_mamba_where_the_reference_starts_each_from_zero(cuts: tuple[int, ...], tmp_path: Path) -> None:
    theirs, ours, _ = make_pair(*CASES["mamba"], tmp_path)
    ids = tokens(1, 10)
    whole = theirs(ids, use_cache=False).logits
    assert_near(chunked(ours, ids, cuts), whole)
    cache, outputs = None, []
    for chunk in ids.split(cuts, 1):
        out = theirs(chunk, cache=cache, use_cache=True)
        cache = out.cache
        outputs.append(out.logits)
    wrong = torch.cat(outputs, 1)
    assert_near(wrong[:, : cuts[0]], whole[:, : cuts[0]])
    assert far(wrong[:, cuts[0] :], whole[:, cuts[0] :]), "the reference has learned chunks; use it as one"


@torch.no_grad()
def test_steps_of_mamba2_where_the_reference_forgets_the_limits(tmp_path: Path) -> None:
    """The bounds of the step sizes hold in its whole pass and not in its single steps: the law's cell of steps."""
    theirs, ours, _ = make_pair(*CASES["mamba2-bias-limits"], tmp_path)
    ids = tokens(1, 8)
    whole = theirs(ids, use_cache=False).logits
    assert_near(chunked(ours, ids, (1,) * 8), whole)
    first = theirs(ids[:, :7], use_cache=True)
    assert far(theirs(ids[:, 7:], cache=first.cache, use_cache=True).logits, whole[:, 7:])


def chunked(model: Model, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
    state = model.new_state(len(ids))
    return torch.cat([model(chunk, state=state).logits for chunk in ids.split(cuts, 1)], 1)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_presets_have_the_papers_counts(name: str) -> None:
    golden = family(name).golden
    assert set(golden) == set(family(name).presets)
    for preset, count in golden.items():
        assert sum(p.numel() for p in build_meta(phylon.preset(preset)).parameters()) == count


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mamba", {"n_groups": 2}, "not understood, and it may change the maths: 'n_groups'"),
        ("mamba", {"intermediate_size": 50}, "'intermediate_size' is 50, which is not supported"),
        ("mamba", {"hidden_act": "mish"}, "unknown activation 'mish'"),
        ("mamba", {"time_step_rank": "many"}, "'time_step_rank' must be int"),
        ("mamba", {"state_size": 2**60}, "must be from 1 to"),
        ("mamba", {"model_type": "mamba2"}, "'MambaForCausalLM', which is of family 'mamba'"),
        ("mamba", {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "lacks 'num_heads'"),
        ("mamba2", {"expand": 3}, "num_heads x head_dim must be expand x hidden_size"),
        ("mamba2", {"n_groups": 4}, "n_heads 6 must be a multiple of n_groups 4"),
        ("mamba2", {"time_step_limit": [0.1]}, "'time_step_limit' is [0.1]; it must be two numbers"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "the lower one first"),
    ],
)
def test_configurations_that_do_not_fit(kind: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    _, _, folder = make_pair(*CASES[kind], tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as error:
        phylon.load(folder, device="cpu")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


RELEASED = {"hidden_act": "silu", "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "expand": 2, "torch_dtype": "float32"}
RELEASED |= {"time_step_floor": 1e-4, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 1e-3}
RELEASED |= {"time_step_scale": 1.0, "use_bias": False, "use_cache": True, "use_conv_bias": True, "rms_norm": True}
RELEASED |= {"rescale_prenorm_residual": False, "residual_in_fp32": True, "initializer_range": 0.1}


def test_released_configurations_are_read() -> None:
    """With the keys that the first releases wrote, of the authors' format and without effect."""
    config = RELEASED | {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50_280}
    config |= {"d_inner": 1536, "d_model": 768, "n_layer": 24, "intermediate_size": 1536, "ssm_cfg": {}}
    config |= {"fused_add_norm": True, "pad_vocab_size_multiple": 8, "state_size": 16, "time_step_rank": 48}
    assert read("mamba", config) == phylon.preset("mamba-130m")
    with pytest.raises(UserError, match="'d_inner' is 1535"):
        read("mamba", config | {"d_inner": 1535})
    config = RELEASED | {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32_768}
    config |= {"chunk_size": 256, "head_dim": 64, "intermediate_size": 8192, "n_groups": 8, "num_heads": 128}
    config |= {"norm_before_gate": True, "state_size": 128, "tie_word_embeddings": False, "time_step_rank": 256}
    config |= {"time_step_limit": [0.0, float("inf")]}
    assert read("mamba2", config) == phylon.preset("mamba-codestral-7b")
    with pytest.raises(UserError, match="'rms_norm' is False"):
        read("mamba2", config | {"rms_norm": False})


def read(name: str, config: dict[str, Any]) -> phylon.ModelSpec:
    hf = family(name).hf
    assert hf is not None
    return hf.read(Config(config))


@torch.no_grad()
def test_the_mixer_of_jamba() -> None:
    """Its norms on dt, B and C are the mixer's ``inner_norm``."""
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    config = transformers.JambaConfig(
        hidden_size=24, mamba_d_state=5, mamba_d_conv=3, mamba_dt_rank=3, mamba_proj_bias=True, rms_norm_eps=1e-4
    )
    theirs = JambaMambaMixer(config, layer_idx=0).eval()
    draw(theirs)
    op = Mamba(dt_rank=3, d_state=5, d_conv=3, bias=True, inner_norm=RMSNorm(eps=1e-4))
    ours = build(op, 24)
    rules: list[Any] = list(mamba_rules("", "", 48))
    rules += [Rename(f"{n}_layernorm.weight", f"{n}_norm.weight") for n in ("dt", "b", "c")]
    layout, source, mine = Layout(rules), MemorySource(theirs.state_dict()), dict(ours.named_parameters())
    layout.load(layout.plan(source.tensors, {n: tuple(p.shape) for n, p in mine.items()}), source, mine)
    x = torch.randn(2, 9, 24)
    records = Records(torch.arange(9)[None])
    assert_near(ours(x, Context(records=records, aligned=True)), theirs(x))


def test_what_the_formats_cannot_say_is_saved_as_native_only(tmp_path: Path) -> None:
    spec = phylon.override(family("mamba").cases()[0], {"decoder.blocks.*.mixer.inner_norm": {"kind": "rms_norm"}})
    with pytest.raises(UserError, match="save it as native"):
        phylon.save(phylon.build(spec, device="cpu"), tmp_path / "x", format="hf")

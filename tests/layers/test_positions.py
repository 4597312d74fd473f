"""Rotary embeddings, their scalings against transformers, and absolute positions against their formulas."""

import math

import pytest
import torch
from torch import Tensor

from helpers import ATTENTION, assert_close, cases, draw, drawn, pre
from law import documents
from phylon.layers.positions.absolute import LearnedPositions, Sinusoids
from phylon.layers.positions.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    Rotation,
    YarnScaling,
    rotate,
)
from phylon.spec import RopeScaling, UserError, build

THETA, DIM = 10_000.0, 32


def frequencies(dim: int = DIM, theta: float = THETA) -> Tensor:
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def test_rotation_by_definition() -> None:
    """Pair (i, i + dim/2) turns by position x theta^(-2i/dim), as complex numbers do; the rest stays."""
    x = torch.randn(1, 3, 2, 12, dtype=torch.float64)
    positions = torch.tensor([[0, 5, 4095]])
    turned = rotate(x, Rotary(dim=8).tables(positions, 12))
    angle = positions.double()[..., None] * frequencies(8)
    pairs = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    assert_close(turned, torch.cat([pairs.real, pairs.imag, x[..., 8:]], -1), 1e-7)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[:, 0], x[:, 0])


@pytest.mark.parametrize("name", [n for n, _ in cases(Rotation)])
def test_scores_see_distances_only(name: str) -> None:
    rotary = dict(cases(Rotation))[name]
    q, k = torch.randn(2, 1, 6, 1, 16, dtype=torch.float64)
    positions = torch.arange(6)[None]
    scores = []
    for shift in (0, 1, 1000):
        tables = rotary.tables(positions + shift, 16)  # type: ignore[attr-defined]
        scores.append(torch.einsum("bthe,bshe->bts", rotate(q, tables), rotate(k, tables)))
    assert_close(scores[1], scores[0], 1e-6)
    assert_close(scores[2], scores[0], 1e-6)
    tables = rotary.tables(positions * 2, 16)  # type: ignore[attr-defined]
    stretched = torch.einsum("bthe,bshe->bts", rotate(q, tables), rotate(k, tables))
    assert float((stretched - scores[0]).abs().max()) > 1e-2, "control: other distances, other scores"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_turns_exactly(dtype: torch.dtype) -> None:
    """Case 5: after ``.to(bfloat16)``, position 4095 still has the cosines of fp64 angles."""
    model = draw(pre()).to(dtype)
    seen: list[tuple[Tensor, Tensor]] = []
    original = Rotary.tables

    def tables(self: Rotary, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        seen.append(original(self, positions, head_dim))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rotary, "tables", tables)
        model(torch.tensor([[1, 2]]), positions=torch.tensor([[4094, 4095]]))
    angles = 4095 * frequencies(8)
    assert len(seen) == 1, "computed once per pass"
    assert_close(seen[0][0][0, 1, 0], angles.cos(), 1e-7)
    assert_close(seen[0][1][0, 1, 0], angles.sin(), 1e-7)
    low = (torch.tensor(4095.0).to(dtype) * frequencies(8).to(dtype)).double().cos()
    assert float((low - angles.cos()).abs().max()) > 0.1, "control: cast angles are far off"


def hf(kind: str, dim: int = DIM, length: int | None = None, **scaling: object) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": THETA, **scaling}
    config = LlamaConfig(
        hidden_size=dim * 2,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=int(scaling.get("original_max_position_embeddings", 64)),  # type: ignore[call-overload]
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
NAMES = {"original_max_position_embeddings": "original_max_seq_len", "truncate": "round_ramp"}
SCALINGS = [
    ("linear", LinearScaling(factor=4.0), {"factor": 4.0}, None),
    ("dynamic", DynamicNTKScaling(factor=2.0, original_max_seq_len=64, seq_len=200), {"factor": 2.0}, 200),
    ("dynamic", DynamicNTKScaling(factor=2.0, original_max_seq_len=64, seq_len=10), {"factor": 2.0}, 10),
    *(
        ("yarn", YarnScaling(**{NAMES.get(k, k): v for k, v in given.items()}), given, None)
        for given in (
            YARN,
            YARN | {"attention_factor": 1.3},
            YARN | {"truncate": False},
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "factor": 16.0},
            YARN | {"original_max_position_embeddings": 4096},
        )
    ),
    ("llama3", Llama3Scaling(**{NAMES.get(k, k): v for k, v in LLAMA3.items()}), LLAMA3, None),
]


@pytest.mark.parametrize(("kind", "ours", "theirs", "length"), SCALINGS)
def test_scalings_equal_transformers(
    kind: str, ours: RopeScaling, theirs: dict[str, object], length: int | None
) -> None:
    pytest.importorskip("transformers")
    inv_freq, factor = ours.scale(frequencies(), THETA)
    expected, expected_factor = hf(kind, length=length, **theirs)
    assert float((inv_freq / expected - 1).abs().max()) < 1e-6
    assert factor == pytest.approx(expected_factor, abs=1e-12)


def test_ntk_by_formula() -> None:
    """The first pair keeps its frequency, the last is interpolated by the factor."""
    inv_freq, factor = NTKScaling(factor=4.0).scale(frequencies(), THETA)
    assert factor == 1.0
    assert_close(inv_freq, frequencies(theta=THETA * 4 ** (DIM / (DIM - 2))), 1e-12)
    assert float(inv_freq[0]) == 1.0
    assert float(inv_freq[-1] / frequencies()[-1]) == pytest.approx(1 / 4)


def test_yarn_factor_scales_the_tables() -> None:
    scaled = Rotary(scaling=YarnScaling(factor=4.0, original_max_seq_len=64)).tables(torch.zeros(1, 1).long(), 8)
    assert_close(scaled[0], torch.full_like(scaled[0], 0.1 * math.log(4) + 1), 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(dim=3), "even"),
        (lambda: Rotary(theta=1.0), "theta must be above 1"),
        (lambda: ATTENTION.replace(rotary=Rotary(dim=10)), "does not fit a head of 8"),
        (lambda: ATTENTION.replace(head_dim=7), "even and no larger"),
        (lambda: LinearScaling(factor=0.0), "factor must be above 0"),
        (lambda: YarnScaling(factor=2.0, original_max_seq_len=0), "original_max_seq_len"),
        (lambda: YarnScaling(factor=2.0, original_max_seq_len=8, beta_fast=1.0), "beta_fast"),
        (lambda: Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_max_seq_len=8), "above"),
        (lambda: NTKScaling(factor=2.0).scale(frequencies(2), THETA), "at least 4"),
        (lambda: Sinusoids(layout="half"), "interleaved"),
        (lambda: LearnedPositions(max_seq_len=0), "at least 1"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("width", [6, 7, 32])
@pytest.mark.parametrize("theta", [10_000.0, 100.0])
def test_sinusoids_by_formula(width: int, theta: float) -> None:
    positions = torch.tensor([[0, 1, 7, 5000]])
    for layout in ("interleaved", "halves"):
        table = build(Sinusoids(theta=theta, layout=layout), width)(positions)
        n_sines = (width + 1) // 2
        for t, position in enumerate(positions[0].tolist()):
            for column in range(width):
                sine = column % 2 == 0 if layout == "interleaved" else column < n_sines
                pair = column // 2 if layout == "interleaved" else column if sine else column - n_sines
                angle = position / theta ** (2 * pair / width)
                expected = math.sin(angle) if sine else math.cos(angle)
                assert float(table[0, t, column]) == pytest.approx(expected, abs=1e-6)


def test_learned_positions_end() -> None:
    model = drawn("learned_positions-0")
    tokens = documents(model, (65,))[0][None]
    assert model(tokens[:, :64]).logits.shape == (1, 64, 11)
    with pytest.raises(UserError, match="position 64 is beyond the 64 the model has"):
        model(tokens)
    with pytest.raises(UserError, match="position -1 is negative"):
        model(tokens[:, :2], positions=torch.tensor([[-1, 0]]))
    state = model.new_state(1)
    model(tokens[:, :60], state=state)
    with pytest.raises(UserError, match="position 64 is beyond"):
        model(tokens[:, 60:], state=state)
    assert state.lengths == [60]

"""Recording what does not exist, and devices that are not there, are one line each."""

import pytest
import torch

from helpers import gpt_like
from phylon.model import build, record, resolve_device
from phylon.spec import UserError

TOKENS = torch.arange(5)[None]


def test_a_glob_that_matches_nothing_is_named() -> None:
    model = build(gpt_like(), device="cpu")
    with (
        pytest.raises(UserError, match=r"'decoder\.blocks\.\*\.attn\.zz' .*mean 'decoder\.blocks\.\*\.attn\.z'"),
        record(model, "*.resid_post", "decoder.blocks.*.attn.zz"),
    ):
        model(TOKENS)
    with (
        pytest.raises(UserError, match=r"mean 'decoder\.blocks\.1\.attn\.scores'"),
        record(model, "decoder.blocks.1.attn.score"),
    ):
        model(TOKENS)
    with pytest.raises(UserError, match=r"mean 'decoder\.\*'"), record(model, "decodr.*"):
        model(TOKENS)
    with pytest.raises(UserError, match=r"mean '\*\.attn\.z'"), record(model, "*.atn.z"):
        model(TOKENS)
    assert model.taps is None


def test_a_glob_is_met_once_and_for_all_passes() -> None:
    model = build(gpt_like(), device="cpu")
    with record(model, "decoder.blocks.*.attn.z", "heads.lm.logits") as taps:
        model(TOKENS)
        taps.clear()
        model(TOKENS, logits="none")
    assert list(taps) == [f"decoder.blocks.{i}.attn.z" for i in range(len(model.spec.decoder.blocks))]


def test_a_failure_inside_and_no_pass_at_all_stay_as_they_are() -> None:
    model = build(gpt_like(), device="cpu")
    with record(model, "nothing") as taps:
        pass
    assert taps == {}
    with pytest.raises(UserError, match="either tokens or embeds"), record(model, "nothing"):
        model()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu", torch.device("cuda", 1)])
def test_a_device_that_is_not_there(device: str | torch.device) -> None:
    with pytest.raises(UserError, match=rf"^device '{device}' is not available: torch .* finds cpu.* here$"):
        build(gpt_like(), device=device)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", 2.5, None])
def test_what_is_no_device(device: object) -> None:
    with pytest.raises(UserError, match=f"^unknown device '{device}'"):
        resolve_device(device)


def test_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("meta") == torch.device("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"'cuda:2' is not available: .*cuda:0, cuda:1"):
        resolve_device("cuda:2")

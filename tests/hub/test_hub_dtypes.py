"""Files of several dtypes load without rounding anything."""

import torch

from phylon.hub import load, save_gguf

from .hub_data import made


def test_norms_of_a_half_precision_gguf_stay_exact(tmp_path):
    """Matrices F16, vectors F32, as GGUF writers leave them: fp32 holds both."""
    model = made()
    save_gguf(model, tmp_path / "half.gguf", quant="F16")
    back = load(tmp_path / "half.gguf", device="cpu")
    assert back.dtype == torch.float32
    for name, parameter in model.named_parameters():
        expected = parameter.half().float() if parameter.ndim > 1 else parameter
        assert torch.equal(dict(back.named_parameters())[name], expected), name

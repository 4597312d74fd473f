"""From a spec to a model: on the meta device, then in memory, then drawn."""

import torch
from torch import nn

from phylon.layers.part import InitContext, Part
from phylon.model.model import Model
from phylon.model.spec import ModelSpec
from phylon.spec.errors import UserError, check_seed

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_dtype(dtype: str | torch.dtype | None, default: torch.dtype = torch.float32) -> torch.dtype:
    """A torch dtype from its name."""
    if dtype is None:
        return default
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype '{dtype}' (known: {', '.join(DTYPES)})")
    return DTYPES[dtype]


def resolve_device(device: str | torch.device) -> torch.device:
    """A device that is there, or a ``UserError``; "auto" is CUDA, then MPS, then the CPU."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"unknown device '{device}' (for example auto, cpu, cuda, cuda:1, mps)") from None
    count = {"cpu": 1, "meta": 1, "cuda": torch.cuda.device_count() if cuda else 0, "mps": int(mps)}
    if (chosen.index or 0) >= count.get(chosen.type, 0):
        here = ["cpu", *(f"cuda:{i}" for i in range(count["cuda"])), *(["mps"] if mps else [])]
        raise UserError(f"device '{device}' is not available: torch {torch.__version__} finds {', '.join(here)} here")
    return chosen


def build_meta(spec: ModelSpec) -> Model:
    """The model without memory: names, shapes and counts."""
    try:
        with torch.device("meta"):
            return Model(spec)
    except (RuntimeError, TypeError) as error:
        if "verflow" not in str(error):
            raise
        raise UserError("a size in this spec is beyond what a tensor can have; check its dimensions") from None


def materialise(model: Model, dtype: torch.dtype, device: torch.device) -> None:
    """Give every meta parameter and buffer uninitialised memory once, ties kept."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def init_model(model: Model, seed: int) -> None:
    """Draw every parameter once, by the module that owns it, in the order of the module tree."""
    check_seed("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    spec, drawn = model.spec, set[int]()
    for path, module in model.named_modules():
        if not any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            continue
        assert isinstance(module, Part), f"{path} ({type(module).__name__}) owns tensors but draws none"
        stack = spec.stacks.get(path.split(".")[0])
        module.init_parameters(InitContext(spec.init, generator, 1 if stack is None else stack.n_branches, drawn))


def build(
    spec: ModelSpec, *, seed: int = 0, dtype: str | torch.dtype | None = None, device: str | torch.device = "auto"
) -> Model:
    """A new model, drawn from ``seed``: the same on every device. ``dtype`` of the parameters, fp32 by default."""
    model = build_meta(spec)
    target = resolve_device(device)
    materialise(model, resolve_dtype(dtype), target)
    if target.type != "meta":
        with torch.no_grad():
            init_model(model, seed)
    return model

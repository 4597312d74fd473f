"""Counts of parameters, from a model built on the meta device."""

from phylon.model import Model


def params_by_part(model: Model) -> dict[str, int]:
    """Parameters by op over all blocks, "embed", "norm", "shared" and "heads", each once; largest first."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = part_of(model, name)
        found[part] = found.get(part, 0) + parameter.numel()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def part_of(model: Model, name: str) -> str:
    """The part that a canonical parameter name belongs to."""
    root, child, *rest = name.split(".")
    if root == "heads":
        return "heads"
    if child == "blocks":
        block = model.spec.stacks[root].blocks[int(rest[0])]
        return rest[1] if rest[1] in block.ops() else "norm"
    return {"embed": "embed", "shared": "shared"}.get(child, "norm")


def params_active(model: Model) -> int:
    """All parameters but those that a token skips; a module with experts says so by ``inactive_parameters()``."""
    skipped = sum(m.inactive_parameters() for m in model.modules() if hasattr(m, "inactive_parameters"))  # type: ignore[operator]
    return sum(p.numel() for p in model.parameters()) - skipped


def tensor_bytes(model: Model) -> int:
    """Bytes of every parameter and stored buffer, a tied one once."""
    unique = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())

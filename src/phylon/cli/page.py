"""A model on one page: every part with its numbers, weights and parameters, and blocks that repeat once."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from phylon.families import families
from phylon.model import Model, ModelSpec, build_meta
from phylon.model.spec import Block, Branch, Stack, Sublayer
from phylon.spec.base import Spec

WIDTH, NAME, COUNT = 80, 18, 16


def model_page(name: str, spec: ModelSpec, labels: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """The page of a spec. Counts are of a model built on the meta device; those of a repeated block are of one.

    ``labels``: the names of the classes, by head.
    """
    return "\n".join(line.rstrip() for line in _Page(build_meta(spec), labels or {}).lines(name))


class _Page:
    """Lines of three columns: name, what it is, parameters."""

    def __init__(self, model: Model, labels: Mapping[str, tuple[str, ...]]) -> None:
        self.model, self.spec, self.labels = model, model.spec, labels
        self.sizes = {name: p.numel() for name, p in model.named_parameters()}

    def lines(self, name: str) -> Iterator[str]:
        total = f"{sum(self.sizes.values()):,} parameters"
        yield f"{name}  {total:>{max(0, WIDTH - 2 - len(name))}}"
        yield from _origin(name)
        limit = () if self.spec.max_seq_len is None else (f"at most {self.spec.max_seq_len} tokens",)
        yield ", ".join([*limit, f"drawn by {in_words(self.spec.init)}"])
        for stack_name, stack in self.spec.stacks.items():
            yield ""
            yield from self.stack(stack_name, stack)
        if self.spec.heads:
            yield from ["", "heads"]
        for head_name, head in self.spec.heads.items():
            yield from self.part(1, head_name, head, f"heads.{head_name}")  # type: ignore[arg-type]
            yield from (" " * NAME + line for line in _wrapped(_named(self.labels.get(head_name, ())), WIDTH - NAME))
        if self.spec.ties:
            yield ""
        for tie in self.spec.ties:
            yield f"{tie.name} is {tie.source}"

    def stack(self, name: str, stack: Stack) -> Iterator[str]:
        n_blocks = f"{len(stack.blocks)} block{'s' * (len(stack.blocks) > 1)}"
        yield self.row(0, name, f"{n_blocks}, d_model {stack.d_model}", self.size(name))
        yield from self.part(1, "embed", stack.embed, f"{name}.embed")  # type: ignore[arg-type]
        for shared, module in stack.shared.items():
            yield from self.part(1, f"shared.{shared}", module, f"{name}.shared.{shared}")  # type: ignore[arg-type]
        for block, indices in kinds_of_block(stack):
            path = f"{name}.blocks.{indices[0]}"
            times = f"{len(indices)} times, each" if len(indices) > 1 else ""
            yield self.row(1, f"blocks {in_short(indices)}", times, self.size(path))
            for sublayer, names in zip(block.sublayers, names_of_ops(block), strict=True):
                yield from (self.row(2, line, "", None) for line in formula(sublayer, names))
                for part_name, part in _parts(sublayer, names):
                    yield from self.part(2, part_name, part, f"{path}.{part_name}")
        if stack.norm_final is not None:
            yield from self.part(1, "norm_final", stack.norm_final, f"{name}.norm_final")  # type: ignore[arg-type]
        if stack.dropout:
            yield self.row(1, "dropout", f"{stack.dropout:g}", None)

    def part(self, depth: int, name: str, spec: Spec, path: str) -> Iterator[str]:
        """A mechanism: its numbers and its count, then what it is made of."""
        first, *more = _wrapped(_words(spec), WIDTH - NAME - COUNT)
        yield self.row(depth, name, first, self.size(path))
        below = [*more, *_nested(spec), *_wrapped(self.weights(path), WIDTH - NAME)]
        for line in below:
            yield " " * NAME + line

    def weights(self, path: str) -> list[str]:
        """``"q_proj [4096, 4096] + bias"`` for every weight below a module, in order; a norm's own are left out."""
        found: dict[str, str] = {}
        for name, parameter in self.model.get_submodule(path).named_parameters():
            owner, _, leaf = name.rpartition(".")
            if leaf == "bias" and owner in found:
                found[owner] += " + bias"
            elif owner or leaf not in ("weight", "bias"):
                found[owner if leaf == "weight" else name] = (
                    f"{owner if leaf == 'weight' else name} {list(parameter.shape)}"
                )
        return list(found.values())

    def size(self, path: str) -> int:
        """Parameters below a path, a tied one only where it is counted."""
        return sum(size for name, size in self.sizes.items() if name.startswith(f"{path}."))

    def row(self, depth: int, name: str, what: str, size: int | None) -> str:
        left = "  " * depth + name
        left = f"{left:<{NAME - 1}} {what}"
        return left if size is None else f"{left:<{WIDTH - COUNT}}{size or 'tied':>{COUNT}{',' if size else ''}}"


def in_words(spec: Any) -> str:
    """``"Rotary theta 10000"``: the class and its numbers, without what is absent."""
    return ", ".join(_words(spec))


def _words(spec: Spec) -> list[str]:
    # A long tuple may be broken between its members too.
    numbers = [piece for number in _numbers(spec) for piece in number.split(", ")]
    return [" ".join([type(spec).__name__, *numbers[:1]]), *numbers[1:]]


def _numbers(spec: Spec) -> Iterator[str]:
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, Spec) or value is None or (value == field.default and value in (0.0, False, ())):
            continue
        yield f"{field.name} {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Spec):
        return in_words(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value[:4]))}{', …' if len(value) > 4 else ''})"
    return str(value)


def _nested(spec: Spec, indent: str = "") -> Iterator[str]:
    """``"pattern Causal"`` for every mechanism inside, and what is inside of that."""
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, Spec):
            first, *words = _words(value)
            lines = _wrapped([f"{field.name}: {first}", *words], WIDTH - NAME - len(indent) - 2)
            yield from (indent + "  " * (i > 0) + line for i, line in enumerate(lines))
            yield from _nested(value, indent + "  ")


def _wrapped(items: list[str], width: int) -> list[str]:
    """Items with commas between, broken between items only."""
    lines = [""]
    for i, item in enumerate(items):
        piece = item + "," * (i < len(items) - 1)
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > width:
            lines.append("")
        lines[-1] += f" {piece}" if lines[-1] else piece
    return [line for line in lines if line]


def _named(labels: tuple[str, ...], most: int = 12) -> list[str]:
    """Classes with their numbers, the first of many."""
    shown = [f"{number} {label}" for number, label in enumerate(labels[:most])]
    return [*shown, "…"] if len(labels) > most else shown


def _origin(name: str) -> Iterator[str]:
    """Title and paper of the family whose preset this is."""
    for family in families():
        if name in family.presets:
            yield family.title
            yield family.paper


def kinds_of_block(stack: Stack) -> list[tuple[Block, list[int]]]:
    """Every kind of block once, with the places where it stands."""
    kinds: list[tuple[Block, list[int]]] = []
    for i, block in enumerate(stack.blocks):
        known = next((places for kind, places in kinds if kind == block), None)
        if known is None:
            kinds.append((block, [i]))
        else:
            known.append(i)
    return kinds


def in_short(numbers: list[int]) -> str:
    """``0-31``, ``0,2,…,30``, or the plain list."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if steps == {1}:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(steps) == 1 and len(numbers) > 3:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def names_of_ops(block: Block) -> list[list[str]]:
    """Canonical names of the ops of every sublayer."""
    names = {place: name for name, place in block.ops().items()}
    return [[names[s, b] for b in range(len(sub.branches))] for s, sub in enumerate(block.sublayers)]


def formula(sublayer: Sublayer, names: list[str]) -> Iterator[str]:
    """``x = x + drop(attn(attn_norm(x)))``: the wiring of a sublayer; ``h`` is what branches share."""
    source = "x"
    if sublayer.norm_shared is not None:
        source = "h"
        yield f"h = {names[0]}_norm_shared(x)"
    terms = [_term(branch, name, source) for branch, name in zip(sublayer.branches, names, strict=True)]
    total = " + ".join(["x", *terms])
    yield f"x = {total}" if sublayer.norm_out is None else f"x = {names[0]}_norm_out({total})"


def _term(branch: Branch, name: str, source: str) -> str:
    term = f"{name}({source if branch.norm_in is None else f'{name}_norm({source})'})"
    term = term if branch.norm_branch is None else f"{name}_norm_branch({term})"
    term = term if branch.gain is None else f"{branch.gain:g} * {term}"
    return f"drop({term}, {branch.drop:g})" if branch.drop else term


def _parts(sublayer: Sublayer, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Every module of a sublayer in the order of the formula, with its canonical name."""
    found: list[tuple[str, Any]] = [(f"{names[0]}_norm_shared", sublayer.norm_shared)]
    for branch, name in zip(sublayer.branches, names, strict=True):
        found += [(f"{name}_norm", branch.norm_in), (name, branch.op), (f"{name}_norm_branch", branch.norm_branch)]
    found.append((f"{names[0]}_norm_out", sublayer.norm_out))
    return (pair for pair in found if pair[1] is not None)

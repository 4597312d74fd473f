"""One description of a foreign layout, used both ways and complete both ways.

`Layout.plan` checks names and shapes from the headers alone, before anything is allocated: every tensor of ours is
produced exactly once, every foreign tensor is used or dropped with a reason. `Layout.load` then copies tensor by
tensor, `Layout.unmap` goes the other way.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from phylon.checkpoint.files import quoted
from phylon.checkpoint.moves import LoadPlan, Move, StoredDtypes, Unmapped
from phylon.checkpoint.rules import Checked, Computed, Constant, Copied, Drop, Other, Rename, Rule, Shape, Tied
from phylon.checkpoint.source import DTYPES, SERIAL, TensorInfo, TensorSource
from phylon.spec.errors import UserError

PLACEHOLDER = re.compile(r"\{(\w+)\}")


AnyRule = Rule | Drop | Constant | Computed | Copied


class PrefixError(UserError):
    """A misfit that a prefix of the names explains."""


@dataclass
class _Findings:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)


class Layout:
    """The rules of one layout.

    ``optional_prefix``: a prefix of foreign names that files saved from the bare model lack (GPT-2's ``transformer.``,
    BERT's ``bert.``). The rules name it; where no key of a file has it, it is not asked for. It is always written.
    """

    def __init__(self, rules: Iterable[AnyRule], optional_prefix: str = ""):
        self._every = every = list(rules)
        self.rules = [rule for rule in every if isinstance(rule, Rule)]
        self._drops = [(_regex(rule.theirs), rule) for rule in every if isinstance(rule, Drop)]
        self._given_back = [regex for regex, rule in self._drops if not isinstance(rule, Other)]
        self._constants = [(_regex(rule.ours), rule) for rule in every if isinstance(rule, Constant)]
        self._computed = [rule for rule in every if isinstance(rule, Computed)]
        self._drops += [(_regex(r.theirs), Drop(r.theirs, "computed from the configuration")) for r in self._computed]
        self._copies = [rule for rule in every if isinstance(rule, Copied)]
        self._drops += [(_regex(r.theirs), Drop(r.theirs, "kept and not read by its own code")) for r in self._copies]
        self._prefix = optional_prefix
        self._parts = [
            (_regex(name), number, k) for number, rule in enumerate(self.rules) for k, name in enumerate(rule.our_names)
        ]

    def without_heads(self, rename: Callable[[str], str], more: Iterable[AnyRule] = ()) -> "Layout":
        """The rules of the stacks, their foreign names changed by ``rename``, and ``more``; nothing of the heads."""
        kept: list[AnyRule] = []
        for rule in self._every:
            ours = (
                () if isinstance(rule, Drop | Computed) else rule.our_names if isinstance(rule, Rule) else (rule.ours,)
            )
            if any(name.startswith("heads.") for name in ours):
                continue
            kept.append(rule if isinstance(rule, Constant) else replace(rule, theirs=rename(rule.theirs)))
            if isinstance(rule, Tied):
                kept[-1] = Tied(rename(rule.theirs), rule.ours, tuple(rename(name) for name in rule.aliases))
        prefix = rename(self._prefix) if self._prefix else ""
        return Layout([*kept, *more], optional_prefix=prefix)

    def fit(self, names: Iterable[str]) -> tuple[float, float]:
        """Which part of ``names`` has a place here, and which part of the rules they use: both 1 for its own files."""
        rules = [[_regex(name) for name in rule.their_names] for rule in self.rules]
        every = [(name, self._prefix + name) if self._prefix else (name,) for name in names]

        def hits(regexes: Sequence[re.Pattern[str]], both: tuple[str, ...]) -> bool:
            return any(regex.fullmatch(name) for regex in regexes for name in both)

        drops = [regex for regex, _ in self._drops]
        placed = sum(hits(drops, both) or any(hits(rule, both) for rule in rules) for both in every)
        used = sum(any(hits(rule, both) for both in every) for rule in rules)
        return placed / max(1, len(every)), used / max(1, len(rules))

    def plan(
        self, theirs: Mapping[str, TensorInfo], ours: Mapping[str, Shape], where: str = "the checkpoint"
    ) -> LoadPlan:
        """Match the headers of a checkpoint with the tensors of a model; nothing is read or allocated.

        Raises:
            UserError: names what is missing, unexpected or of the wrong shape, and a prefix that explains it.
        """
        moves, constants = self._bind(ours)
        bare = bool(self._prefix) and not any(self._prefix in name for name in theirs)
        found = _Findings()
        used: set[str] = set()
        chosen: list[tuple[Move, tuple[str, ...]]] = []
        for move in moves:
            names: list[str] = []
            for name, shape in move.foreign:
                options = (name, *move.aliases)
                there = [n for n in (self._stripped(n, bare) for n in options) if n in theirs]
                if not there:
                    found.missing.append(self._stripped(name, bare))
                    found.beside += self._copies_of(move, theirs, bare)
                for option in there:
                    assert option not in used, f"two rules use {option}"
                    if theirs[option].shape != shape:
                        found.misshaped.append(_misshaped(option, theirs[option].shape, shape))
                used.update(there)
                names += there
            chosen.append((move, tuple(names)))
        dropped: list[tuple[str, str]] = []
        for name in theirs:
            if name not in used:
                reason = self._drop_reason(name, bare)
                if reason is None:
                    found.unexpected.append(name)
                else:
                    dropped.append((name, reason))
                    needed = [ours[copy.ours] for copy in self._copies if copy.theirs in (name, self._prefix + name)]
                    if needed and theirs[name].shape != needed[0]:
                        found.misshaped.append(_misshaped(name, theirs[name].shape, needed[0]))
        if found.missing or found.unexpected or found.misshaped:
            kind, said = _explain(found, theirs)
            raise kind(f"{where} does not fit the model: {said}")
        dtypes = Counter(info.dtype for info in theirs.values())
        return LoadPlan(tuple(chosen), tuple(constants), tuple(dropped), dtypes)

    def load(self, plan: LoadPlan, source: TensorSource, params: Mapping[str, torch.Tensor]) -> None:
        """Fill ``params`` (all tensors of the plan, any dtype and device) from ``source``, casting on the way.

        Beyond ``params`` themselves, about one tensor is in memory at a time. What tied names hold and whether
        numbers would change kind is checked before the first write.

        Raises:
            UserError: two names of a tied parameter differ, integers are stored where the model has reals, or a stored
                table is not the one that the configuration gives.
        """
        with torch.no_grad():
            self._check_computed(plan, source)
            for move, names in plan.moves:
                for name in names:
                    _check_kind(source.tensors[name], params[move.ours[0]])
                if move.aliases:
                    for other in names[1:]:
                        if not _same(source.read(names[0]), source.read(other)):
                            raise UserError(
                                f"{quoted(names[0])} and {quoted(other)} differ, but the model ties them: "
                                "untie the configuration ('tie_word_embeddings') or remove one of them"
                            )
            for move, names in plan.moves:
                move.rule.take(source, names, [params[name] for name in move.ours])
            for name, value in plan.constants:
                params[name].fill_(value)

    def unread(self, plan: LoadPlan, source: TensorSource) -> dict[str, torch.Tensor]:
        """What a file holds and the model does not, by the name it is written under; copies, which take memory.

        Only what `unmap` would not make of the model itself, bit for bit: a `Copied` tensor unlike what is read, a
        `Computed` one that is rounded otherwise, every `Checked` and every dropped one but an `Other`.
        """
        held = {name: names[0] for move, names in plan.moves for name in move.ours if names}
        dropped = {name for name, _ in plan.dropped}
        made_of_ours = {rule.theirs for rule in (*self._copies, *self._computed)}
        named = {self._written_name(name): name for name in dropped}
        back = {name: own for name, own in named.items() if name not in made_of_ours and self._goes_back(name)}
        found = {name: source.read(own).clone() for name, own in back.items()}
        for rule in (*self._copies, *self._computed):
            name = named.get(rule.theirs)
            if name is None or (isinstance(rule, Copied) and rule.ours not in held):
                continue
            stored = source.read(name)
            if not isinstance(rule, Checked):
                made = rule.make() if isinstance(rule, Computed) else source.read(held[rule.ours])
                if made.dtype == stored.dtype and made.shape == stored.shape and _same(made, stored):
                    continue
            found[rule.theirs] = stored.clone()
        return found

    def unmap(
        self,
        ours: Mapping[str, torch.Tensor],
        stored: StoredDtypes | None = None,
        unread: Mapping[str, torch.Tensor] | None = None,
    ) -> Unmapped:
        """Ours in the foreign layout: pairs ``(name, tensor)``, each tensor made when it is reached.

        A tensor that ``stored`` knows, by its foreign name or by ours, is given back in the dtype it was stored in, and
        one of ``unread`` as it is while it has the shape that the model asks for, and while the layout drops it.

        Raises:
            UserError: a tensor of ours has no place in the layout, or is not the constant the layout takes for granted.
        """
        moves, constants = self._bind({name: tuple(tensor.shape) for name, tensor in ours.items()})
        for name, value in constants:
            if not bool((ours[name] == value).all()):
                raise UserError(f"{quoted(name)} cannot be stored in this format, which takes it to be {value}")
        unread = unread or {}
        computed = [rule for rule in self._computed if not isinstance(rule, Checked) or rule.theirs in unread]
        made = {name for move in moves for name, _ in move.foreign}
        dropped = [n for n in unread if n not in made and self._goes_back(n)]
        return Unmapped(moves, ours, computed, self._copies, stored or {}, unread, dropped)

    def _bind(self, ours: Mapping[str, Shape]) -> tuple[list[Move], list[tuple[str, float]]]:
        """Every tensor of ours with the one rule that makes it."""
        groups: dict[tuple[int, tuple[tuple[str, str], ...]], dict[int, str]] = {}
        constants: list[tuple[str, float]] = []
        homeless: list[str] = []
        for name in ours:
            hits = [(n, k, m.groupdict()) for regex, n, k in self._parts if (m := regex.fullmatch(name))]
            fixed = [rule.value for regex, rule in self._constants if regex.fullmatch(name)]
            assert len(hits) + len(fixed) <= 1, f"several rules make {name}"
            if hits:
                number, k, values = hits[0]
                groups.setdefault((number, tuple(sorted(values.items()))), {})[k] = name
            elif fixed:
                constants.append((name, fixed[0]))
            else:
                homeless.append(name)
        if homeless:
            raise UserError(f"this format has no place for {_some(homeless)} of the model")
        moves: list[Move] = []
        for (number, values), parts in groups.items():
            rule, filled = self.rules[number], dict(values)
            absent = [_fill(name, filled) for k, name in enumerate(rule.our_names) if k not in parts]
            if absent:
                raise UserError(
                    f"this format stores {quoted(next(iter(parts.values())))} together with {_some(absent)}, "
                    "which the model lacks"
                )
            names = tuple(parts[k] for k in range(len(parts)))
            foreign = rule.foreign(_fill(rule.theirs, filled), [tuple(ours[name]) for name in names])
            moves.append(Move(rule, names, tuple(foreign), tuple(_fill(name, filled) for name in rule.aliases)))
        return moves, constants

    def _stripped(self, name: str, bare: bool) -> str:
        return name.removeprefix(self._prefix) if bare else name

    def _copies_of(self, move: Move, theirs: Mapping[str, TensorInfo], bare: bool) -> list[str]:
        """What ``theirs`` has beside a tensor it lacks, and its own code would not read."""
        names = [self._stripped(copy.theirs, bare) for copy in self._copies if copy.ours == move.ours[0]]
        return [quoted(name) for name in names if name in theirs]

    def _check_computed(self, plan: LoadPlan, source: TensorSource) -> None:
        for rule in self._computed:
            regex = _regex(rule.theirs)
            for name in (n for n, _ in plan.dropped if regex.fullmatch(n) or regex.fullmatch(self._prefix + n)):
                stored, made = source.read(name), rule.make()
                rounding = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
                # Large angles in single precision are off by up to 1e-4.
                near = stored.shape == made.shape and torch.allclose(
                    stored.float(), made.float(), rtol=0.0, atol=1e-3 + rounding
                )
                if not near:
                    raise UserError(
                        f"{quoted(name)} is not what the configuration gives, and it would be passed over: correct "
                        "the configuration, or remove that tensor"
                    )

    def _written_name(self, dropped: str) -> str:
        """The name that a dropped tensor has in a file with the prefix."""
        return dropped if any(regex.fullmatch(dropped) for regex, _ in self._drops) else self._prefix + dropped

    def _goes_back(self, dropped: str) -> bool:
        return any(regex.fullmatch(dropped) for regex in self._given_back)

    def _drop_reason(self, name: str, bare: bool) -> str | None:
        options = (name, self._prefix + name) if bare else (name,)
        return next((rule.reason for regex, rule in self._drops if any(map(regex.fullmatch, options))), None)


def identity(names: Iterable[str], *more: AnyRule) -> Layout:
    """The layout that is ours already, and ``more`` rules."""
    return Layout([*(Rename(name, name) for name in names), *more])


@lru_cache(maxsize=8192)
def _regex(pattern: str) -> re.Pattern[str]:
    """``{p}`` is weight or bias, other placeholders are numbers, ``*`` is anything."""
    parts = PLACEHOLDER.split(pattern)
    for k in range(0, len(parts), 2):
        parts[k] = re.escape(parts[k]).replace(r"\*", ".*")
    for k in range(1, len(parts), 2):
        parts[k] = f"(?P<{parts[k]}>{'weight|bias' if parts[k] == 'p' else '0|[1-9][0-9]*'})"
    return re.compile("".join(parts))


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    """Placeholders without a value stay: the experts of a stack."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)


def _some(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(map(quoted, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _misshaped(name: str, shape: Shape, needed: Shape) -> str:
    return f"{quoted(name)} is {shape}, the model needs {needed}"


def _explain(found: _Findings, theirs: Mapping[str, TensorInfo]) -> tuple[type[UserError], str]:
    """One line for everything that is wrong; the prefix first, because it explains the rest."""
    if not theirs:
        return UserError, f"it holds no tensors; {_some(found.missing)} were expected"
    extra = _prefix(found.unexpected, set(found.missing))
    if extra:
        share = "every key is" if all(n.startswith(extra) for n in theirs) else "many keys are"
        return PrefixError, (
            f"{share} prefixed {quoted(extra)}; strip the prefix, so that "
            f"{quoted(found.missing[0])} and the others are found"
        )
    lacking = _prefix(found.missing, set(found.unexpected))
    if lacking:
        return PrefixError, f"its keys lack the prefix {quoted(lacking)}; {_some(found.missing, 1)} was expected"
    parts = []
    if found.missing:
        other = found.beside[0] if found.beside else ""
        instead = f", in whose place {other} is not read: store a copy of it under that name" if other else ""
        parts.append(f"{len(found.missing)} missing ({_some(found.missing)}{instead})")
    if found.unexpected:
        parts.append(f"{len(found.unexpected)} unexpected ({_some(found.unexpected)})")
    if found.misshaped:
        more = f" and {len(found.misshaped) - 2} more" if len(found.misshaped) > 2 else ""
        parts.append(f"{len(found.misshaped)} of another shape ({'; '.join(found.misshaped[:2])}{more})")
    return UserError, ", ".join(parts)


def _prefix(longer: Sequence[str], wanted: set[str]) -> str:
    """The prefix without which at least half of the ``wanted`` names are found among ``longer``, or nothing."""
    counts: Counter[str] = Counter()
    for name in longer:
        for match in re.finditer(r"\.", name):
            if name[match.end() :] in wanted:
                counts[name[: match.end()]] += 1
    best = counts.most_common(1)
    return best[0][0] if best and 2 * best[0][1] >= len(wanted) else ""


def _check_kind(info: TensorInfo, param: torch.Tensor) -> None:
    stored = DTYPES.get(info.dtype)
    real = stored is None or stored.is_floating_point
    if real != param.is_floating_point():
        raise UserError(
            f"{quoted(info.name)} is stored as {info.dtype} and the model has {param.dtype}, which is another kind of "
            f"number: store it as {'F32' if param.is_floating_point() else 'I64'}"
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit where the dtypes are the same, else equal in value; a few rows at a time."""
    if a.dtype == b.dtype:
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    a, b = a.reshape(-1), b.reshape(-1)
    return all(torch.equal(a[k : k + SERIAL].double(), b[k : k + SERIAL].double()) for k in range(0, a.numel(), SERIAL))

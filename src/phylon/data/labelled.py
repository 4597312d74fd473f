"""Labelled texts, words and answers: from records to examples, each with the file and line it came from."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from phylon.data.documents import Record
from phylon.data.passed import Empty, usable
from phylon.data.table import text_of, value_of
from phylon.data.weighed import weight_of
from phylon.spec.errors import UserError, did_you_mean


class GivesRecords(Protocol):
    """What gives records: a source, or a part of one."""

    def records(self) -> Iterator[Record]: ...


class LabelledText(NamedTuple):
    """A text (or a pair of them) and its label as the record holds it; ``weight``: what it counts in a loss."""

    text: str
    pair: str | None
    label: Any
    where: str
    weight: float = 1.0


class LabelledWords(NamedTuple):
    """The words of a text and the label of each."""

    words: list[str]
    labels: list[Any]
    where: str
    weight: float = 1.0


class Answered(NamedTuple):
    """A question, a context and its answers; ``start`` is the character of the context where the first one begins.

    ``start`` is ``None`` where the context holds no answer; ``answers`` is then empty.
    """

    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None
    where: str
    weight: float = 1.0


def read_texts(
    source: GivesRecords, text: str, pair: str | None, label: str, weight: str | None = None
) -> Iterator[LabelledText]:
    """The records of a source as labelled texts; the arguments name its fields."""

    def read(row: Record) -> LabelledText:
        second = None if pair is None else text_of(row, pair)
        counts = weight_of(row, weight)
        return LabelledText(text_of(row, text), second, _label(row, label), row.name, counts)

    return usable(source, source.records(), read)


def read_words(source: GivesRecords, words: str, labels: str, weight: str | None = None) -> Iterator[LabelledWords]:
    """The records as labelled words: lists in JSON, or words between spaces with as many labels between spaces."""

    def read(row: Record) -> LabelledWords:
        found = _list(row, words), _list(row, labels)
        if len(found[0]) != len(found[1]):
            raise UserError(f"{row.name}: {len(found[0])} words and {len(found[1])} labels; there must be one for each")
        for word in found[0]:
            if not isinstance(word, str) or not word.strip():
                raise UserError(f"{row.name}: a word of '{words}' is not text: {word!r}")
        return LabelledWords(*found, row.name, weight_of(row, weight))

    return usable(source, source.records(), read)


def read_answers(
    source: GivesRecords, question: str, context: str, answer: str, start: str, weight: str | None = None
) -> Iterator[Answered]:
    """The records as questions on a context (SQuAD, arXiv:1606.05250).

    ``answer`` holds the text, ``start`` the character where it begins in the context; both empty (or null) say that
    there is none (SQuAD 2.0, arXiv:1806.03822). A JSON list of answers may hold several; ``start`` is the first one's.
    An answer that is not where ``start`` says is refused.
    """

    def read(row: Record) -> Answered:
        given = value_of(row, answer)
        answers = tuple(a for a in (given if isinstance(given, list) else [given]) if a)
        asked, passage = text_of(row, question), text_of(row, context)
        begin = _begin(row, passage, answers, answer, start) if answers else None
        return Answered(asked, passage, answers, begin, row.name, weight_of(row, weight))

    return usable(source, source.records(), read)


def _begin(row: Record, passage: str, answers: tuple[Any, ...], answer: str, start: str) -> int:
    """Where the first answer begins in the context."""
    at = value_of(row, start)
    at = at[0] if isinstance(at, list) and at else at
    begin = _whole(at)
    if begin is None:
        raise UserError(f"{row.name}: '{start}' must be the character where the answer begins, got {at!r}")
    if not all(isinstance(a, str) for a in answers):
        raise UserError(f"{row.name}: the field '{answer}' is not text")
    if begin < 0 or passage[begin : begin + len(answers[0])] != answers[0]:
        hint = passage.find(answers[0])
        fix = f"; it stands at {hint}" if hint >= 0 else "; the context does not hold it"
        raise UserError(f"{row.name}: the answer {answers[0][:40]!r} is not at character {begin}{fix}")
    return begin


class Classes:
    """Names of classes and their numbers, in order."""

    def __init__(self, names: Sequence[str]) -> None:
        if not names or len(set(names)) < len(names):
            raise UserError(f"classes must be named, each once; got {', '.join(names) or 'none'}")
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def of(cls, labels: Iterable[Any]) -> "Classes":
        """The distinct labels, whole numbers by size and others by name."""
        names = {_name(label) for label in labels}
        whole = {name: _whole(name) for name in names}
        if None in whole.values():
            return cls(sorted(names))
        return cls(sorted(names, key=lambda name: (whole[name] or 0, name)))

    def are_numbers(self, n_classes: int) -> bool:
        """Whether the names are the numbers of ``n_classes`` classes, and not names of their own.

        They are where all are whole numbers. So they are where each of those numbers is there: another name among them
        is then a mistake.
        """
        spelled = all(name.lstrip("+-").isdigit() for name in self.names)
        return spelled or all(str(number) in self._numbers for number in range(n_classes))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, label: Any, where: str) -> int:
        """The number of a label; one that is no class is refused with where it stands."""
        number = self._numbers.get(_name(label))
        if number is None:
            hint = did_you_mean(_name(label), self.names)
            raise UserError(f"{where}: the label {_name(label)!r} is none of the {len(self)} classes{hint}")
        return number


def check_head(
    names: Sequence[str],
    head: str,
    n_classes: int,
    labels: Iterable[tuple[Any, str]] = (),
    place: str = "objective.classes",
) -> None:
    """Refuse classes that are not as many as those of a head.

    Of too many the rarest is named, which may be a slip of its record: ``labels`` come with where they stand, and
    ``place`` is the setting that would name the right ones.
    """
    if len(names) == n_classes:
        return
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    slip, places = "", dict[str, list[str]]()
    for label, where in labels if len(names) > n_classes else ():
        places.setdefault(_name(label), []).append(where)
    if places:
        rarest = min(places, key=lambda name: len(places[name]))
        found = places[rarest]
        slip = f", or name the right ones in {place} ({rarest!r} is the rarest: {len(found)}, {found[0]})"
    raise UserError(
        f"the data have {len(names)} classes ({shown}) and the head '{head}' {n_classes}: "
        f"set its n_classes to {len(names)}{slip}"
    )


def class_number(label: Any, n_classes: int, where: str) -> int:
    """A label that is itself the number of a class, from 0."""
    number = _whole(label)
    if number is None or not 0 <= number < n_classes:
        raise UserError(f"{where}: the label {label!r} is out of range: classes are 0 to {n_classes - 1}")
    return number


def score(label: Any, where: str) -> float:
    """A label that is a number."""
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: the label {label!r} is not a finite number")
    return number


def _label(row: Record, field: str) -> Any:
    label = value_of(row, field)
    if label is None or (isinstance(label, str) and not label.strip()):
        raise Empty(f"{row.name}: the label in '{field}' is missing")
    if isinstance(label, list | dict):
        raise UserError(f"{row.name}: the label in '{field}' is a {type(label).__name__}, not a name or number")
    return label.strip() if isinstance(label, str) else label


def _list(row: Record, field: str) -> list[Any]:
    value = value_of(row, field)
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise UserError(f"{row.name}: the field '{field}' must hold words, got {value!r}")
    return found


def _name(label: Any) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _whole(value: Any) -> int | None:
    """The whole number that ``value`` is or spells, else ``None``."""
    if isinstance(value, bool):
        return None
    try:
        return int(value) if isinstance(value, str | int) or float(value).is_integer() else None
    except (TypeError, ValueError):
        return None

"""Chat templates: Jinja source from a model file, rendered in a sandbox with the meaning Hugging Face gives it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from phylon.spec.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MAX_STEPS = 100_000  # numbers that `range` may give in one rendering, over all loops
MAX_CHARACTERS = 10_000_000  # of output, and of one repeated string

Messages = Sequence[Mapping[str, Any]]


class TemplateError(Exception):
    """What a template raises by itself, or is refused for."""


class ChatTemplate:
    """Jinja source that turns messages into text.

    As in Hugging Face's templates: block tags leave no line behind (``trim_blocks``, ``lstrip_blocks``), ``break`` and
    ``continue`` work, ``raise_exception`` and ``strftime_now`` are functions, ``tojson`` keeps ``<`` as it is, and
    ``{% generation %}`` blocks render their body. The sandbox is immutable: attributes that start with an underscore
    and methods that change an argument are out of reach; endless ranges and huge repetitions are refused.
    """

    def __init__(self, source: str) -> None:
        import jinja2

        self.source = source
        try:
            self._template: Template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from None

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of a conversation. Each message needs ``role``, and ``content`` unless it calls tools."""
        return self._render(checked_messages(messages), add_generation_prompt=add_generation_prompt, **extra)

    def _render(self, messages: list[dict[str, Any]], **extra: Any) -> str:
        extra = {"tools": None, "documents": None} | extra
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(messages=messages, range=_budgeted_range(), **extra):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
        except TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {_line(error)}") from None
        except Exception as error:
            raise UserError(f"the chat template failed: {type(error).__name__}: {_line(error)}") from None
        return "".join(parts)

    def spans(self, messages: Messages, **extra: Any) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text and the character span of each assistant message in it.

        A span begins where the generation prompt ends and reaches to the end of the message's turn, both found by
        rendering the beginning of the conversation. Where a template does not continue its own beginnings (it drops
        earlier reasoning, say), the span is that of the content alone, found by rendering another one in its place.
        """
        whole = checked_messages(messages)
        text = self._render(whole, add_generation_prompt=False, **extra)
        spans = []
        for i, message in enumerate(whole):
            if message["role"] != "assistant":
                continue
            before = self._render(whole[:i], add_generation_prompt=True, **extra) if i else ""
            after = self._render(whole[: i + 1], add_generation_prompt=False, **extra)
            if before and len(before) < len(after) and after.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
            else:
                spans.append(self._content_span(whole, i, text, extra))
        return text, spans

    def _content_span(
        self, messages: list[dict[str, Any]], i: int, text: str, extra: dict[str, Any]
    ) -> tuple[int, int]:
        mark = "\ue000phylon\ue001"
        other = [*messages[:i], messages[i] | {"content": mark}, *messages[i + 1 :]]
        head, found, tail = self._render(other, add_generation_prompt=False, **extra).partition(mark)
        if not found or not text.startswith(head) or not text.endswith(tail) or len(head) + len(tail) >= len(text):
            raise UserError(f"message {i}: the chat template leaves out this reply or rewrites what is around it")
        return len(head), len(text) - len(tail)


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages as plain dicts, each with a role and a content."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UserError('messages are a list like [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise UserError("the conversation has no messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f'message {i} has no role: write {{"role": "user", "content": "…"}}')
        if message.get("content") is None and not message.get("tool_calls"):
            raise UserError(f"message {i} ({message['role']}) has no content")
    return [dict(message) for message in messages]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _budgeted_range() -> Callable[..., Iterator[int] | range]:
    left = MAX_STEPS

    def budgeted(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        # A range too long for len() raises OverflowError, which is one more way to be too long.
        try:
            left -= len(numbers)
        except OverflowError:
            left = -1
        if left < 0:
            raise TemplateError(f"it loops over more than {MAX_STEPS:,} numbers")
        return numbers

    return budgeted


@cache
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant writes; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
                raise TemplateError("a power is too large")
            if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", left):
                raise TemplateError("a formatted field is too wide")
            if operator == "*":
                for sequence, times in ((left, right), (right, left)):
                    if isinstance(sequence, (str, list, tuple)) and len(sequence) * times > MAX_CHARACTERS:
                        raise TemplateError("a repetition is too long")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment

"""The text of a row while its tokens come in: whole characters, and nothing that may still become a stop string."""

from collections.abc import Sequence
from typing import Any


class StopFinder:
    """Looks for the first stop string to be complete; ``found`` says that there was one.

    The outcome is that of reading character by character, however the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is safe to show: no part of it belongs to a stop string, or can come to."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = self._open(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back; no more text follows."""
        text, self._held = self._held, ""
        return text

    def _open(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string starts with."""
        longest = min(len(text), max((len(stop) for stop in self.stops), default=0) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops if len(stop) > length):
                return length
        return 0


class RowText:
    """Tokens in, text out. The decoder has read the prompt, so that prompt and text join as one text would read."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decoder = tokenizer.stream(skip_special=True)
        for token in prompt:
            self._decoder.push(token)
        self._finder = StopFinder(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._finder.found

    def push(self, token: int) -> str:
        """The text that ``token`` makes safe to show."""
        return self._finder.push(self._decoder.push(token))

    def flush(self) -> str:
        """The rest, when no more tokens follow."""
        return self._finder.push(self._decoder.flush()) + self._finder.flush()

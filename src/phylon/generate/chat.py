"""A conversation: the history of its turns, and a state that is kept between them as far as the text is the same."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from phylon.generate.decode import Batch, Generation
from phylon.generate.request import Options, Request, check_continues, make_requests, needed_tokenizer
from phylon.layers.state import State
from phylon.model import Model
from phylon.spec import UserError

_MAX_NEW_TOKENS = 512


class ChatSession:
    """Talks with a model through its tokenizer's own chat template.

    ``history`` holds every message as ``{"role", "content"}``. ``options`` are those of ``generate`` for one row
    (``max_new_tokens`` is 512 unless given). When the conversation outgrows the model's ``max_seq_len``, the oldest
    turns are left out of what the model reads, the system message stays, and ``n_forgotten`` says how many messages
    were left out. ``generation`` is the last reply with its tokens.
    """

    def __init__(self, model: Model, system: str | None = None, **options: Any) -> None:
        check_continues(model, "chat")
        self._tokenizer = needed_tokenizer(model)
        self.model = model
        options.setdefault("max_new_tokens", _MAX_NEW_TOKENS)
        self.options = Options(**options)
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation with the same system message."""
        self.history: list[dict[str, str]] = []
        if self.system is not None:
            self.history = [{"role": "system", "content": self.system}]
        self.n_forgotten = 0
        self.generation: Generation | None = None
        self._turn = 0
        self._state: State | None = None
        self._ids: list[int] = []

    def send(self, text: str) -> Iterator[str]:
        """Say ``text``; the pieces of the reply as they come.

        A turn that cannot be read raises a ``UserError`` at once. Message and reply enter the history when the reply
        begins; of one that is broken off, what was said so far stays.
        """
        messages = [*self.history, {"role": "user", "content": text}]
        return self._reply(messages, *self._request(messages))

    def _reply(self, messages: list[dict[str, str]], request: Request, forgotten: int) -> Iterator[str]:
        before, self.n_forgotten = self.history, forgotten
        state, known = self._take_state(request.prompt)
        batch = Batch(self.model, [request], state=state, known=known)
        row, shown = batch.rows[0], 0
        reply = {"role": "assistant", "content": ""}
        self.history = [*messages, reply]
        try:
            while batch.open:
                batch.step()
                reply["content"] = "".join(row.pieces)
                while shown < len(row.pieces):
                    shown += 1
                    yield row.pieces[shown - 1]
        finally:
            if row.tokens:
                # The last token was chosen, but not read. A pass that failed left the state as it was.
                self._state, self._ids = batch.state, [*request.prompt, *row.tokens[:-1]]
                self.generation = row.generation()
                self._turn += 1
            else:
                self.history = before

    def _request(self, messages: list[dict[str, str]]) -> tuple[Request, int]:
        """The request of the next turn, and how many messages had to be left out of it."""
        limit, first = self.model.spec.max_seq_len, int(messages[0]["role"] == "system")
        least = 1 if limit is None else max(1, min(self.options.max_new_tokens, limit // 4))
        n_ids = 0
        starts = [i for i, message in enumerate(messages) if i >= first and message["role"] == "user"]
        for start in starts:
            ids = self._tokenizer.chat_ids([*messages[:first], *messages[start:]])
            n_ids = len(ids)
            if limit is None or n_ids + (1 if start == starts[-1] else least) <= limit:
                request = make_requests(self.model, [ids], self.options)[0]
                return replace(request, stream=self._turn), start - first
        raise UserError(f"the message makes a prompt of {n_ids} tokens and the model takes {limit}; shorten it")

    def _take_state(self, prompt: tuple[int, ...]) -> tuple[State, int]:
        """A state, and how many tokens of ``prompt`` it holds: their longest common beginning with the last turn."""
        known = 0
        for mine, new in zip(self._ids, prompt[:-1], strict=False):
            if mine != new:
                break
            known += 1
        state, self._state, self._ids = self._state, None, []
        if state is None or known == 0:
            return self.model.new_state(1), 0
        try:
            with torch.inference_mode():
                state.crop(known)
        except UserError:
            return self.model.new_state(1), 0
        return state, known

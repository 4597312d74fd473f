"""Conversations: the kept state changes nothing but the time, and the history is what was said."""

import gen_toys as toys
import pytest
import torch

from phylon.generate import ChatSession, generate
from phylon.patterns import Window
from phylon.spec import UserError


class Counting:
    """Counts the tokens that pass through a model."""

    def __init__(self, made):
        self.n, self.fail = 0, False
        made.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.n += args[0].numel()
        if self.fail:
            raise KeyboardInterrupt


@pytest.mark.parametrize("pattern", [None, Window(size=16), Window(size=200)])
def test_a_kept_state_gives_what_a_fresh_one_gives(pattern):
    options = {} if pattern is None else {"pattern": pattern}
    made = toys.model(**options)
    counter = Counting(made)
    chat = ChatSession(made, "be brief", max_new_tokens=9, temperature=0)
    for n, text in enumerate(("hello", "and the Answer?", "司é")):
        prompt = made.tokenizer.chat_ids([*chat.history, {"role": "user", "content": text}])
        counter.n = 0
        reply = "".join(chat.send(text))
        read = counter.n
        expected = generate(made, [prompt], max_new_tokens=9, temperature=0)[0]
        assert chat.generation["tokens"] == expected["tokens"]
        assert reply == expected["text"] == chat.history[-1]["content"]
        if n and options.get("pattern") != Window(size=16):
            assert read < len(prompt)
    assert [m["role"] for m in chat.history] == ["system", *["user", "assistant"] * 3]


def test_turns_draw_differently_and_sessions_repeat():
    made = toys.model()
    first, second = ChatSession(made, max_new_tokens=8, seed=3), ChatSession(made, max_new_tokens=8, seed=3)
    replies = [["".join(chat.send(text)) for text in ("hi", "hi")] for chat in (first, second)]
    assert replies[0] == replies[1]
    assert replies[0][0] != replies[0][1]
    first.reset()
    assert "".join(first.send("hi")) == replies[0][0]


def test_a_reply_that_is_broken_off_stays_as_far_as_it_came():
    made = toys.model()
    chat = ChatSession(made, max_new_tokens=20, temperature=0)
    reply = chat.send("hello")
    shown = next(reply)
    reply.close()
    assert chat.history[-1] == {"role": "assistant", "content": shown}
    after = "".join(chat.send("go on"))
    prompt = made.tokenizer.chat_ids(chat.history[:-1])
    assert after == generate(made, [prompt], max_new_tokens=20, temperature=0)[0]["text"]


def test_a_turn_that_fails_before_a_token_leaves_the_history():
    made = toys.model()
    counter = Counting(made)
    chat = ChatSession(made, max_new_tokens=5, temperature=0)
    "".join(chat.send("hello"))
    before = list(chat.history)
    counter.fail = True
    with pytest.raises(KeyboardInterrupt):
        next(chat.send("more"))
    assert chat.history == before
    counter.fail = False
    reply = "".join(chat.send("more"))
    prompt = made.tokenizer.chat_ids(chat.history[:-1])
    assert reply == generate(made, [prompt], max_new_tokens=5, temperature=0)[0]["text"]


def test_old_turns_are_forgotten_when_the_text_is_full():
    made = toys.model(max_seq_len=80)
    chat = ChatSession(made, "sys", max_new_tokens=20, temperature=0, eos_ids=())
    for text in ("first message", "second message", "third message"):
        "".join(chat.send(text))
    assert chat.n_forgotten in (2, 4)
    assert len(chat.history) == 7
    assert chat.history[1]["content"] == "first message"
    kept = [chat.history[0], *chat.history[1 + chat.n_forgotten : -1]]
    prompt = made.tokenizer.chat_ids(kept)
    assert (
        chat.generation["tokens"]
        == generate(made, [prompt], max_new_tokens=20, temperature=0, eos_ids=(), logprobs=False)[0]["tokens"]
    )
    with pytest.raises(UserError, match=r"prompt of \d+ tokens and the model takes 80"):
        chat.send("x" * 80)
    assert len(chat.history) == 7


def test_bad_input():
    made = toys.model(tokenizer=False)
    with pytest.raises(UserError, match="tokenizer"):
        ChatSession(made)
    with pytest.raises(TypeError, match="temprature"):
        ChatSession(toys.model(), temprature=1)
    assert torch.is_grad_enabled()

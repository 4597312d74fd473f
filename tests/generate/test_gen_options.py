"""Options of the wrong kind are refused in one line before anything runs; ids need no tokenizer."""

import gen_toys as toys
import pytest
import torch

from phylon.generate import Sampling, beam_search, generate, score, stream
from phylon.spec import UserError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, got 2.5"),
        ({"max_new_tokens": "9"}, "max_new_tokens must be a whole number, got '9'"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, got True"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite"),
        ({"top_p": [0.5]}, "top_p must be a number"),
        ({"min_p": "0.1"}, "min_p must be a number, got '0.1'"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number, got True"),
        ({"seed": "a"}, "seed takes whole numbers, got 'a'"),
        ({"seed": 1.5}, "seed takes whole numbers, got 1.5"),
        ({"seed": ["a"]}, "seed takes whole numbers, got 'a'"),
        ({"stop": 5}, "stop takes texts, got 5"),
        ({"stop": [["a", 5]]}, "stop takes texts, got 5"),
        ({"stop_ids": "a"}, "stop_ids takes whole numbers, got 'a'"),
        ({"stop_ids": [2.5]}, "stop_ids takes whole numbers, got 2.5"),
        ({"eos_ids": 2.5}, "eos_ids takes whole numbers, got 2.5"),
        ({"eos_ids": [None]}, "eos_ids takes whole numbers, got None"),
        ({"logprobs": 5}, "logprobs must be true or false, got 5"),
        ({"prefill_chunk": 2.5}, "prefill_chunk must be a whole number, got 2.5"),
    ],
)
@pytest.mark.parametrize("call", [generate, stream])
def test_options_of_the_wrong_kind(call, options: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        call(toys.model(), [1, 2], **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda made: generate(made, 5), "prompts must be texts or lists of token ids, got 5"),
        (lambda made: generate(made, [[1.5, 2]]), "a prompt must be a text or a list of token ids, got"),
        (lambda made: generate(made, [None]), "a prompt must be a text or a list of token ids, got None"),
        (lambda made: generate(made, [[1]], batch_size=1.5), "batch_size must be a whole number, got 1.5"),
        (lambda made: score(made, [[1, 2.5]]), "a prompt must be a text or a list of token ids"),
        (lambda made: score(made, [[1, 2]], batch_size="2"), "batch_size must be a whole number, got '2'"),
        (lambda made: beam_search(made, [[1]], n_beams=2.5), "n_beams must be a whole number, got 2.5"),
        (lambda made: beam_search(made, [[1]], length_penalty="x"), "length_penalty must be a number, got 'x'"),
        (lambda made: Sampling(seed="a"), "seed must be a whole number, got 'a'"),
    ],
)
def test_arguments_of_the_wrong_kind(call, words: str) -> None:
    with pytest.raises(UserError) as caught:
        call(toys.model())
    assert words in str(caught.value)


def test_a_tensor_of_ids_is_a_prompt() -> None:
    made = toys.model()
    (of_tensor,) = generate(made, [torch.tensor([1, 2])], max_new_tokens=2, temperature=0)
    assert of_tensor == generate(made, [1, 2], max_new_tokens=2, temperature=0)[0]


def test_a_stream_of_ids_needs_no_tokenizer() -> None:
    bare = toys.model(tokenizer=False)
    pieces, seen = stream(bare, [5, 6], max_new_tokens=3, temperature=0, eos_ids=()), []
    for piece in pieces:
        assert piece == ""
        seen.append(len(pieces.generation["tokens"]))
    assert seen == [1, 2, 3]
    assert pieces.generation == generate(bare, [5, 6], max_new_tokens=3, temperature=0, eos_ids=())[0]
    with pytest.raises(UserError, match="no tokenizer"):
        stream(bare, "text")

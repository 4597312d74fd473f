"""Streaming decode: whole characters only, and the same text as decode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.spec.errors import UserError

NAMES = ["smollm2", "gpt2", "bert_uncased", "sp_botchan_en_unigram_1000", "sp_botchan_en_bpe_1000", "mistral_v1_spm"]


def test_case_15_byte_pieces(real):
    mistral = real("mistral_v1_spm")
    ids = [mistral.id(f"<0x{byte:02X}>") for byte in "é司".encode()]
    stream = mistral.stream()
    assert [stream.push(id) for id in ids] == ["", "é", "", "", "司"]
    assert stream.flush() == ""


def test_case_15_byte_level(real):
    gpt2 = real("gpt2")
    from phylon.text.stream import byte_alphabet

    spelled = {byte: char for char, byte in byte_alphabet().items()}
    ids = [gpt2.id(spelled[byte]) for byte in "é司".encode()]
    stream = gpt2.stream()
    assert [stream.push(id) for id in ids] == ["", "é", "", "", "司"]


def test_an_unfinished_character_shows_only_at_the_end(real):
    gpt2 = real("gpt2")
    ids = gpt2.encode("👩")
    assert len(ids) > 1
    stream = gpt2.stream()
    assert [stream.push(id) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd" == gpt2.decode(ids[:-1])
    assert stream.push(ids[0]) == ""  # as new
    with pytest.raises(UserError, match="cannot decode id -1"):
        stream.push(-1)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=80)
@given(draws=st.lists(st.integers(0, 2**20), max_size=20))
def test_pushes_add_up_to_decode(name, skip, real, draws):
    tokenizer = real(name)
    ids = [draw % tokenizer.vocab_size if draw % 3 else draw % min(300, tokenizer.vocab_size) for draw in draws]
    stream = tokenizer.stream(skip_special=skip)
    parts = [stream.push(id) for id in ids]
    assert "".join([*parts, stream.flush()]) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_real_text_never_shows_a_replacement(name, real, text):
    tokenizer = real(name)
    ids = tokenizer.encode(text, special=False)
    whole = tokenizer.decode(ids)
    stream = tokenizer.stream()
    parts = [stream.push(id) for id in ids]
    assert "".join(parts) + stream.flush() == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("name", ["gpt2", "smollm2"])
@settings(deadline=None, max_examples=80)
@given(draws=st.lists(st.integers(0, 40_000), max_size=20))
def test_byte_level_decode_is_the_librarys(name, real, draws):
    assert real(name).decode(draws) == real(name).backend.decode(draws, skip_special_tokens=False)

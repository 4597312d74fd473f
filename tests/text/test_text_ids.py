"""Exact ids on real tokenizers, and what happens to them on the way through files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.spec.errors import UserError
from phylon.text import gguf_from_tokenizer, load_tokenizer, tokenizer_from_gguf, tokens_in_span

NAMES = ["smollm2", "gpt2", "bert_uncased", "sp_botchan_en_unigram_1000", "sp_botchan_en_bpe_1000", "mistral_v1_spm"]
FOX = "The quick brown fox jumps over the lazy dog."
HARD = [
    "",
    " ",
    "a  b   c ",
    "\n\n  \t x\r\n",
    "I'll, you'd; it's 12345.67",
    "naïve café — “quotes” … ½ ﬁ",
    "中文 한국어 ไทย हिन्दी",
    "👩‍👩‍👧 🏳️‍🌈 \x00\x07\ufeff\u200b",
]


@pytest.mark.parametrize("name", NAMES)
def test_gold_ids(name, real, gold):
    tokenizer = real(name)
    assert [tokenizer.encode(text) for text in gold["texts"]] == gold[name]
    assert tokenizer.encode_batch(gold["texts"]) == gold[name]


@pytest.mark.parametrize("name", NAMES[3:5])
def test_gold_pieces(name, real, gold):
    tokenizer = real(name)
    assert [tokenizer.token(id) for id in tokenizer.encode(FOX)] == gold[f"{name}_pieces0"]


def test_vocabulary_sizes(real, gold):
    assert real("mistral_v1_spm").vocab_size == gold["mistral_v1_vocab"]
    assert real("gpt2").vocab_size == 50257
    assert real("bert_uncased").vocab_size == 30522


def test_gguf_vocabulary_equals_tokenizer_json(smollm2_header, real, gold):
    tokenizer = tokenizer_from_gguf(smollm2_header)
    assert [tokenizer.encode(text) for text in gold["texts"]] == gold["smollm2"]
    for text in HARD:
        assert tokenizer.encode(text) == real("smollm2").encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.add_bos) == (1, (2,), 2, False)


def test_gguf_header_round_trip(smollm2_header):
    written = gguf_from_tokenizer(tokenizer_from_gguf(smollm2_header))
    original = {key: value for key, value in smollm2_header.items() if key.startswith("tokenizer.")}
    del original["tokenizer.ggml.add_space_prefix"]  # means nothing to byte-level BPE
    assert {key: written[key] for key in original} == original


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bert_uncased"])
def test_gguf_round_trip_keeps_ids(name, real, gold):
    tokenizer = real(name)
    again = tokenizer_from_gguf(gguf_from_tokenizer(tokenizer))
    for text in gold["texts"] + HARD + ["   ".join("abcdefghij") * 3, " " * 37]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.bos_id, again.eos_ids, again.add_bos) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos)


def test_llama3_cutting_matches_its_published_rule(real):
    header = gguf_from_tokenizer(real("gpt2")) | {"tokenizer.ggml.pre": "llama-bpe"}
    backend = tokenizer_from_gguf(header).backend
    text = "Hello  WORLD's 12345\n\n x=1"
    words = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert words == ["Hello", " ", " WORLD", "'s", " ", "123", "45", "\n\n", " x", "=", "1"]


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_keep_ids(name, real, gold, tmp_path):
    tokenizer = real(name)
    tokenizer.save(tmp_path / "t")
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    again = load_tokenizer(tmp_path / "t")
    for text in gold["texts"] + HARD:
        assert again.encode(text) == tokenizer.encode(text)
    for attribute in ("bos_id", "eos_ids", "pad_id", "unk_id", "add_bos", "add_eos", "chat_template", "vocab_size"):
        assert getattr(again, attribute) == getattr(tokenizer, attribute)


@pytest.mark.parametrize("name", ["smollm2", "bert_uncased", "mistral_v1_spm"])
def test_transformers_reads_what_we_save(name, real, gold, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = real(name)
    tokenizer.save(tmp_path)
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path),
    ):
        for text in gold["texts"] + HARD:
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.eos_token_id == (tokenizer.eos_ids[0] if tokenizer.eos_ids else None)


def test_bert_pair_and_files_own_truncation(real, tmp_path):
    bert = real("bert_uncased")
    ids, types = bert.encode_pair("Hello world", "two")
    assert ids == [101, 7592, 2088, 102, 2048, 102]
    assert types == [0, 0, 0, 0, 1, 1]
    bert.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["decoder"]["cleanup"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    assert len(again.encode("one two three four five")) == 7
    assert again.decode(again.encode("hello !", special=False)) == "hello !"
    assert again.decode(again.encode("hello !", special=False), clean_up=True) == "hello!"


def test_end_ids_come_from_the_generation_config_too(real, tmp_path):
    real("gpt2").save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [50256, 13]}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == (50256, 13)
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").eos_ids == (50256, 13)


@pytest.mark.parametrize("name", ["smollm2", "gpt2", "mistral_v1_spm"])
@settings(deadline=None, max_examples=150)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_decode_inverts_encode(name, real, text):
    tokenizer = real(name)
    if name == "smollm2":  # its vocabulary lacks some bytes
        text = "".join(char for char in text if all(_has_byte(tokenizer, byte) for byte in char.encode()))
    if name == "mistral_v1_spm":  # writes its space mark as a space
        text = text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def _has_byte(tokenizer, byte):
    from phylon.text.stream import byte_alphabet

    char = next(c for c, b in byte_alphabet().items() if b == byte)
    return tokenizer.id(char) is not None


def test_case_33_a_choice_is_scored_by_its_characters(real):
    gpt2 = real("gpt2")
    for start, choice in [("Ans", "wer"), ("hello wor", "ld"), ("The capital of France is", " Paris"), ("", "Hi")]:
        ids, spans = gpt2.encode_with_offsets(start + choice)
        assert ids == gpt2.encode(start + choice)
        found = tokens_in_span(spans, len(start), len(start + choice))
        assert len(found) > 0
        assert found.stop == len(ids)
        text = (start + choice)[spans[found.start][0] :]
        assert text.endswith(choice)
        assert gpt2.decode(ids[found.start :]) == text
    ids, spans = gpt2.encode_with_offsets("Answer")
    assert ids == [33706]
    assert list(tokens_in_span(spans, 3, 6)) == [0]


def test_offsets_cover_characters_that_span_tokens(real):
    for name in ("gpt2", "mistral_v1_spm", "bert_uncased"):
        text = "a 司機 b"
        ids, spans = real(name).encode_with_offsets(text)
        for i in range(len(text)):
            if not text[i].isspace():
                assert len(tokens_in_span(spans, i, i + 1)) > 0
        assert len(ids) == len(spans)
    with pytest.raises(UserError, match="dropped all"):
        tokens_in_span([(0, 1)], 3, 4)
    with pytest.raises(UserError, match="at least one character"):
        tokens_in_span([(0, 1)], 1, 1)


def test_bad_ids_and_text(real):
    gpt2 = real("gpt2")
    with pytest.raises(UserError, match="ids run from 0 to 50256"):
        gpt2.token(50257)
    with pytest.raises(UserError, match="cannot decode id -100"):
        gpt2.decode([1, -100])
    with pytest.raises(UserError, match="surrogate pair at character 1"):
        gpt2.encode("a\ud800")
    assert gpt2.id("nonsense token") is None
    assert gpt2.decode([15496, 60000, 995]) == "Hello world"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in"),
        ({"tokenizer.json": "{nonsense"}, "is not JSON: .* at line 1"),
        ({"tokenizer.json": "[1, 2]"}, "holds no JSON object"),
        ({"tokenizer.json": '{"vocab": 1}'}, "it has no model"),
        ({"tokenizer.json": '{"model": {"type": "Magic"}}'}, "is not a tokenizer.json this library reads"),
        ({"vocab.json": '{"a": 0}'}, "merges.txt is missing"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c\n"}, "a merge is two tokens"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n"}, "merges.txt does not fit vocab.json"),
        ({"vocab.txt": "hello\nworld\n"}, r"has no \[UNK\], \[CLS\], \[SEP\]"),
        ({"tokenizer.model": "hello"}, "is not a whole SentencePiece model"),
        ({"tokenizer.model": ""}, "it has no pieces"),
        (
            {"vocab.txt": "[UNK]\n[CLS]\n[SEP]\n", "tokenizer_config.json": '{"eos_token": "<e>"}'},
            "eos token '<e>' is not",
        ),
    ],
)
def test_damaged_folders_are_refused_in_one_line(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


KINDS = {
    "add_bos_token": ("yes", 1, []),
    "add_prefix_space": ("no",),
    "strip_accents": (2,),
    "legacy": ("x",),
    "bos_token": (3, True, [], {"content": 3}, {}),
    "pad_token": (["[PAD]"],),
    "tokenizer_class": (3,),
    "chat_template": (3, [3], [{"name": "default"}], {"default": "x"}),
    "added_tokens_decoder": ([], "x"),
    "eos_token_ids": ("x", True, [1, "x"]),
}


@pytest.mark.parametrize("key", KINDS)
def test_values_of_the_wrong_kind_are_refused_by_file_and_key(key, tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: None}))
    load_tokenizer(tmp_path)
    for value in KINDS[key]:
        for name in ("tokenizer_config.json", "special_tokens_map.json")[: 1 if key == "eos_token_ids" else 2]:
            for other in ("tokenizer_config.json", "special_tokens_map.json"):
                (tmp_path / other).write_text(json.dumps({key: value} if other == name else {}))
            with pytest.raises(UserError, match=f"'{key}' must be") as caught:
                load_tokenizer(tmp_path)
            assert str(caught.value).startswith(str(tmp_path / name))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", [{"true": {"content": "a"}}, {"-1": {"content": "a"}}, {"5": {"content": 3}}, {"5": 3}]
)
def test_added_tokens_of_the_wrong_kind(entry, tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entry}))
    with pytest.raises(UserError, match="the added tokens are not written as Hugging Face writes them"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"a": True}))
    with pytest.raises(UserError, match="the added tokens are not written"):
        load_tokenizer(tmp_path)


def test_end_ids_of_the_generation_settings(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(UserError, match=r"generation_config.json: 'eos_token_id' must be a token id .* got 'x'"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, -1]}')
    assert load_tokenizer(tmp_path).eos_ids == (2,)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match="is no tokenizer file"):
        load_tokenizer(tmp_path / "weights.bin")


def test_bad_gguf_headers(real):
    header = gguf_from_tokenizer(real("gpt2"))
    for change, message in [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"pre": "smolm"}, r"'smolm' is not known \(did you mean 'smollm'\?\); gpt-2, smollm"),
        ({"eos_token_id": 60000}, "eos_token_id is 60000, but there are 50257 tokens"),
        ({"token_type": [1]}, "50257 tokens but 1 of tokenizer.ggml.token_type"),
        ({"merges": ["qqqq zzzz"]}, "the merges do not fit"),
        ({"merges": ["a b", "abc"]}, "a merge is two tokens with a space in between, got 'abc'"),
    ]:
        broken = header | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(UserError, match=message):
            tokenizer_from_gguf(broken)
    with pytest.raises(UserError, match="no vocabulary"):
        tokenizer_from_gguf({"general.name": "x"})


SMALL = {
    "gpt2": {"model": "gpt2", "tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"], "token_type": [1, 1, 1, 3]},
    "llama": {
        "model": "llama",
        "tokens": ["<unk>", "a", "b", "ab"],
        "scores": [0.0, -3.0, -2.0, -1.0],
        "token_type": [2, 1, 1, 1],
    },
}


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("gpt2", "tokens", ("abcd", [1, 2, 3, 4], None)),
        ("gpt2", "merges", ("a b", [1])),
        ("gpt2", "token_type", ([1, 1, 1, 3.7], [1, 1, 1, True])),
        ("gpt2", "bos_token_id", (1.7, "1", True, [1])),
        ("gpt2", "add_bos_token", ("no", 1)),
        ("llama", "scores", ([0.0, -3.0, -2.0, "-1"], [0.0, -3.0, -2.0, True])),
        ("llama", "token_type", ([2, 1, 1, 1.9],)),
        ("llama", "add_space_prefix", ("x", 0)),
        ("llama", "remove_extra_whitespaces", (3,)),
        ("llama", "precompiled_charsmap", ([1.5], "x")),
    ],
)
def test_values_of_another_kind_in_gguf_headers(kind, key, values):
    """Refused by the key, never cut to a whole number nor read as "yes"."""
    header = {f"tokenizer.ggml.{name}": value for name, value in SMALL[kind].items()}
    assert tokenizer_from_gguf(header).vocab_size == 4
    for value in values:
        with pytest.raises(UserError, match=f"tokenizer.ggml.{key} must be"):
            tokenizer_from_gguf(header | {f"tokenizer.ggml.{key}": value})
    with pytest.raises(UserError, match="chat_template must be a text"):
        tokenizer_from_gguf(header | {"tokenizer.chat_template": 3})


def test_a_flag_of_an_added_token_is_no_text(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n")
    for value in ("false", 1, None):
        entry = {"content": "<x>", "lstrip": value}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": entry}}))
        with pytest.raises(UserError, match=r"tokenizer_config.json: 'lstrip' of the added token '5' must be true or"):
            load_tokenizer(tmp_path)


def test_a_failed_save_leaves_nothing(real, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot save the tokenizer"):
        real("gpt2").save(tmp_path / "file" / "inside")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

"""Chat templates: Hugging Face's meaning, one BOS, spans of replies, and a sandbox that holds."""

import pytest

from phylon.spec.errors import UserError
from phylon.text import ChatTemplate, load_tokenizer, tokenizer_from_gguf, tokens_in_span, train_bpe

HI = [{"role": "user", "content": "Hi <b> & 'co'"}]
TALK = [*HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
TALK += [{"role": "assistant", "content": "See you."}]


@pytest.mark.parametrize("messages", [HI, TALK, [{"role": "system", "content": "Be brief."}, *TALK]])
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_template_equals_transformers(messages, prompt, smollm2_header, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizer_from_gguf(smollm2_header)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert tokenizer.apply_chat(messages, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    assert tokenizer.chat_ids(messages, add_generation_prompt=prompt) == ids


FEATURES = [
    "{% for m in messages %}\n  {% if loop.index0 == 1 %}{% continue %}{% endif %}\n  {{ m['content'] }}\n{% endfor %}",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ '中' | tojson }}",
    "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + m.content | length %}{% endfor %}{{ s.n }}",
    "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% break %}{% endfor %}",
    "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ nothing }}{{ strftime_now('%Y') | length }}",
    "{% if tools is not none %}{{ tools[0].name }}{% endif %}{{ '%s=%02d' % ('a', 3) }}{{ 'ab' * 3 }}{{ 2 ** 8 }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_features_equal_transformers(source):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    for extra in ({"bos_token": "<s>"}, {"bos_token": "<s>", "tools": [{"name": "f"}]}):
        theirs, _ = utilities.render_jinja_template(
            conversations=[TALK], chat_template=source, **({"tools": None, "documents": None} | extra)
        )
        assert ChatTemplate(source).render(TALK, **extra) == theirs[0]


def bos_tokenizer(template):
    from phylon.text.tokenizer import set_affixes

    tokenizer = train_bpe(["some text for a small vocabulary"], 300, specials=("<s>", "</s>"))
    set_affixes(tokenizer.backend, "<s>", None)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", ["{{ bos_token }}[{{ messages[0].content }}]", "[{{ messages[0].content }}]"])
def test_case_16_exactly_one_bos(template):
    tokenizer = bos_tokenizer(template)
    assert tokenizer.add_bos
    assert tokenizer.encode("x")[0] == 0
    ids = tokenizer.chat_ids(HI)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "<s>[Hi <b> & 'co']"


def test_case_28_no_reply_is_lost_to_merging():
    # No mark stands between prompt and reply, so that the last character of one and the first of the other merge.
    text = "xaaay " * 50
    tokenizer = train_bpe([text], 270)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% if loop.last and add_generation_prompt %}"
        "{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "aay"}]
    rendered, spans = tokenizer.chat_spans(messages)
    assert (rendered, spans) == ("xaaay", [(2, 5)])
    ids, offsets = tokenizer.chat_text_ids(rendered)
    assert ids == tokenizer.chat_ids(messages, add_generation_prompt=False)
    assert len(ids) == 1  # all merged, and yet:
    assert list(tokens_in_span(offsets, *spans[0])) == [0]


def test_case_28_spans_through_the_real_template(smollm2_header):
    tokenizer = tokenizer_from_gguf(smollm2_header)
    text, spans = tokenizer.chat_spans(TALK)
    assert [text[a:b] for a, b in spans] == ["Hello!<|im_end|>\n", "See you.<|im_end|>\n"]
    ids, offsets = tokenizer.chat_text_ids(text)
    hits = [tokens_in_span(offsets, a, b) for a, b in spans]
    assert [tokenizer.decode(ids[h.start : h.stop]) for h in hits] == ["Hello!<|im_end|>\n", "See you.<|im_end|>\n"]


def test_spans_where_the_template_rewrites_earlier_turns():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}A:{{ m.content }};"
        "{% else %}{{ m.role }}={{ m.content }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    text, spans = ChatTemplate(source).spans(TALK)
    assert [text[a:b] for a, b in spans] == ["Hello!", "See you.;"]


def test_template_forms_in_folders(tmp_path):
    tokenizer = bos_tokenizer("config {{ messages[0].content }}")
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).apply_chat(HI) == "config Hi <b> & 'co'"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert load_tokenizer(tmp_path).apply_chat(HI) == "file Hi <b> & 'co'"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('x') }}",
        "{% for i in range(10 ** 15) %}{% endfor %}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ lipsum(n=1000000) }}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
    ],
)
def test_hostile_templates_are_refused(source):
    with pytest.raises(UserError, match="chat template") as caught:
        ChatTemplate(source + "{{ nothing.at.all }}").render(TALK)
    assert "\n" not in str(caught.value)


def test_bad_conversations_and_templates():
    template = ChatTemplate("{{ raise_exception('no\nsystem role') }}")
    with pytest.raises(UserError, match="refuses the conversation: no system role"):
        template.render(HI)
    with pytest.raises(UserError, match="not valid Jinja, line 2"):
        ChatTemplate("\n{% if %}")
    for messages, message in [
        ([], "no messages"),
        ("Hi", "messages are a list"),
        ({"role": "user", "content": "x"}, "messages are a list"),
        ([{"content": "x"}], "message 0 has no role"),
        ([*HI, {"role": "user"}], r"message 1 \(user\) has no content"),
        (["Hi"], "message 0 has no role"),
    ]:
        with pytest.raises(UserError, match=message):
            template.render(messages)
    with pytest.raises(UserError, match=r"no chat template: set tokenizer.chat_template .* chat_template.jinja"):
        train_bpe(["abc"], 257).apply_chat(HI)

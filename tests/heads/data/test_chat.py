"""The mask covers what the assistant wrote and nothing else: compared as literal text, for many kinds of template."""

import logging

import pytest
from repository import DEMO
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads.data.chat import VICUNA_TEMPLATE, ChatEncoder, choose_template, mask_tokens, warn_once
from heads.data.conversations import BadRowError, EmptyRowError, alpaca_messages, read_conversation

BASE = DEMO / "base"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
SAME_WORDS = [  # three turns in which users and assistant say the same
    {"role": "user", "content": "yes yes"},
    {"role": "assistant", "content": "yes yes"},
    {"role": "user", "content": "yes yes"},
    {"role": "assistant", "content": "yes yes"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "yes yes"},
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with the end-of-turn token outside the markers, as many published templates have it.
CHATML_MARKED_SHORT = CHATML_MARKED.replace(
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
    "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
)
VICUNA_UNMARKED = VICUNA_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
# Like Qwen3: the last reply gets an empty thought in front, earlier ones do not.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A thought in front of every reply, and an end of the whole text that is no end of a turn.
ALWAYS_THINKING = (
    THINKING.replace(" and loop.last", "") + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
# A template that ignores add_generation_prompt: the reply's header must not be taken for the reply.
NO_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt %}")]
# Like Mistral: no generation prompt, contents trimmed, the reply ends with eos.
INSTRUCT = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content|trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content|trim + eos_token }}{% endif %}{% endfor %}"
)
NO_SPECIAL_END = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def demo_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo_tokenizer()


@pytest.fixture(scope="module")
def trimming_tokenizer() -> PreTrainedTokenizerFast:
    """Leaves leading spaces out of its offsets, as GPT-2's and GPT-NeoX's do."""
    tokenizer = demo_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def supervised_stretches(tokenizer, template, messages) -> list[str]:
    ids, mask = ChatEncoder(tokenizer, template).encode(messages)
    assert len(ids) == len(mask)
    stretches, open_stretch = [], False
    for token, supervised in zip(ids, mask, strict=True):
        if supervised and not open_stretch:
            stretches.append([])
        if supervised:
            stretches[-1].append(token)
        open_stretch = supervised
    return [tokenizer.decode(stretch) for stretch in stretches]


def test_vicuna_reads_as_its_papers_have_it(tokenizer):
    ids, mask = ChatEncoder(tokenizer, VICUNA_TEMPLATE).encode(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    )
    end = tokenizer.eos_token
    assert tokenizer.decode(ids) == f"{end}{SYSTEM} USER: Hi ASSISTANT: Hello.{end}"
    assert tokenizer.decode([token for token, chosen in zip(ids, mask, strict=True) if chosen]) == f" Hello.{end}"


def test_vicuna_over_three_turns_and_with_a_system_prompt(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, *SAME_WORDS]
    ids, _ = ChatEncoder(tokenizer, VICUNA_TEMPLATE).encode(messages)
    end = tokenizer.eos_token
    assert tokenizer.decode(ids) == (
        f"{end}Be brief. USER: yes yes ASSISTANT: yes yes{end}"
        f"USER: yes yes ASSISTANT: yes yes{end}USER: no ASSISTANT: yes yes{end}"
    )


def test_vicuna_asks_for_a_reply_where_the_supervised_span_begins(tokenizer):
    prompt, _ = ChatEncoder(tokenizer, VICUNA_TEMPLATE).render(SAME_WORDS[:1], add_generation_prompt=True)
    whole, spans = ChatEncoder(tokenizer, VICUNA_TEMPLATE).marked_spans(SAME_WORDS[:2])
    assert whole[: spans[0][0]] == prompt


@pytest.mark.parametrize("words", ["tokenizer", "trimming_tokenizer"])
@pytest.mark.parametrize(
    ("template", "stretch"),
    [
        (VICUNA_TEMPLATE, " yes yes<|endoftext|>"),
        (VICUNA_UNMARKED, " yes yes<|endoftext|>"),
        (CHATML, "yes yes<|im_end|>"),
        (CHATML_MARKED, "yes yes<|im_end|>"),
        (CHATML_MARKED_SHORT, "yes yes<|im_end|>"),
        (NO_PROMPT, "yes yes<|im_end|>"),
        (INSTRUCT, " yes yes<|endoftext|>"),
        (NO_SPECIAL_END, " yes yes\n\n"),
    ],
    ids=[
        "vicuna",
        "vicuna-unmarked",
        "chatml",
        "chatml-marked",
        "chatml-marked-short",
        "no-prompt",
        "instruct",
        "no-special-end",
    ],
)
def test_repeated_words_are_supervised_in_the_assistants_mouth_only(template, stretch, words, request):
    assert supervised_stretches(request.getfixturevalue(words), template, SAME_WORDS) == [stretch] * 3


@pytest.mark.parametrize(("marked", "unmarked"), [(VICUNA_TEMPLATE, VICUNA_UNMARKED), (CHATML_MARKED, CHATML)])
def test_markers_and_prefixes_give_the_same_mask(tokenizer, trimming_tokenizer, marked, unmarked):
    for words in (tokenizer, trimming_tokenizer):
        one, other = ChatEncoder(words, marked), ChatEncoder(words, unmarked)
        for content in ("a", " a", "a ", "\n\na\n", "  def f():\n    return 1\n", "é日本 🙂", "x" * 50):
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": content},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": content + content},
            ]
            with_markers = one.encode(messages)
            assert with_markers == other.encode(messages), content
            assert 0 < sum(with_markers[1]) < len(with_markers[1]), content


def test_ids_and_mask_are_those_of_apply_chat_template_where_that_is_right(tokenizer):
    expected = tokenizer.apply_chat_template(
        SAME_WORDS, chat_template=CHATML_MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = ChatEncoder(tokenizer, CHATML_MARKED).encode(SAME_WORDS)
    assert ids == expected["input_ids"]
    assert mask == [bool(item) for item in expected["assistant_masks"]]


def test_a_thought_before_the_last_reply_only_does_not_shift_earlier_masks(tokenizer):
    stretches = supervised_stretches(tokenizer, THINKING, SAME_WORDS)
    assert stretches == ["yes yes<|im_end|>", "yes yes<|im_end|>", "<think>\n\n</think>\n\nyes yes<|im_end|>"]


def test_a_thought_before_every_reply_is_part_of_each(tokenizer):
    stretches = supervised_stretches(tokenizer, ALWAYS_THINKING, SAME_WORDS)
    assert stretches[:2] == ["<think>\n\n</think>\n\nyes yes<|im_end|>"] * 2
    assert stretches[2] == "<think>\n\n</think>\n\nyes yes<|im_end|>\n<|endoftext|>"


def test_a_template_that_drops_earlier_turns_is_refused(tokenizer):
    forgetful = CHATML.replace("in messages", "in messages[-2:]")
    with pytest.raises(BadRowError, match="drops or rewrites turn 2"):
        ChatEncoder(tokenizer, forgetful).encode(SAME_WORDS)
    assert supervised_stretches(tokenizer, forgetful, SAME_WORDS[:2]) == ["yes yes<|im_end|>"]


def test_a_template_that_objects_makes_the_row_bad_with_its_own_words(tokenizer):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    with pytest.raises(BadRowError, match="no system role"):
        ChatEncoder(tokenizer, template).encode([{"role": "system", "content": "x"}, *SAME_WORDS])
    with pytest.raises(BadRowError, match="vicuna template knows"):
        ChatEncoder(tokenizer, VICUNA_TEMPLATE).encode([*SAME_WORDS, {"role": "tool", "content": "x"}, *SAME_WORDS])


def test_tokens_share_a_character_with_a_span():
    assert mask_tokens([(0, 4), (4, 6), (6, 9)], [(5, 7)]) == [False, True, True]
    # Zero width: a trimmed space, which lies between its neighbours.
    assert mask_tokens([(0, 4), (5, 5), (6, 9)], [(4, 9)]) == [False, True, True]
    assert mask_tokens([(0, 4), (5, 5), (6, 9)], [(5, 9)]) == [False, False, True]
    assert mask_tokens([(0, 4), (5, 5), (6, 9)], [(4, 5)]) == [False, True, False]


def test_sharegpt_and_messages_read_alike():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert read_conversation(turns) == expected
    assert read_conversation(expected) == expected
    assert read_conversation({"from": ["human", "gpt"], "value": ["Hi", "Hello."]}) == expected
    assert read_conversation([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, expected[1]]) == expected


@pytest.mark.parametrize("role", ["gpt", "assistant", "chatgpt", "bard", "bing"])
def test_every_name_for_the_assistant(role):
    assert read_conversation([{"from": "user", "value": "a"}, {"from": role, "value": "b"}])[1]["role"] == "assistant"


def test_conversations_are_tidied():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "gpt", "value": "a reply to nothing"},
        {"from": "human", "value": "one"},
        {"from": "human", "value": "two"},
        {"from": "gpt", "value": "  "},
        {"from": "gpt", "value": "three"},
        {"from": "gpt", "value": "four"},
        {"from": "human", "value": "never answered"},
    ]
    assert read_conversation(turns) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three\nfour"},
    ]


def test_a_conversation_without_a_reply_is_empty():
    for turns in ([], [{"from": "human", "value": "Hi"}], [{"from": "gpt", "value": "Hi"}]):
        with pytest.raises(EmptyRowError):
            read_conversation(turns)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (None, "missing"),
        ("Hi", "a str"),
        (["Hi"], "turn 1 is a str"),
        ([{"from": "alien", "value": "Hi"}], "'alien'"),
        ([{"from": ["human"], "value": "Hi"}], "role"),
        ([{"from": "human", "value": 3}], "turn 1 has a int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "turn 1 has a list"),
    ],
)
def test_malformed_turns_are_bad_rows(turns, reason):
    with pytest.raises(BadRowError, match=reason):
        read_conversation(turns)


def test_alpaca():
    assert alpaca_messages({"instruction": "Add.", "input": "1 2", "output": "3"}) == [
        {"role": "user", "content": "Add.\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert alpaca_messages({"instruction": "Add.", "input": "", "output": "3"})[0]["content"] == "Add."
    with pytest.raises(BadRowError, match="'output' is missing"):
        alpaca_messages({"instruction": "Add."})
    with pytest.raises(EmptyRowError):
        alpaca_messages({"instruction": "Add.", "output": " "})


def test_the_template_is_the_tokenizers_a_file_or_vicuna(tokenizer, tmp_path, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert choose_template(tokenizer, None) == choose_template(tokenizer, None) == VICUNA_TEMPLATE
    assert len(caplog.records) == 1  # said, and said once
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert choose_template(tokenizer, str(file)) == CHATML
    with_template = demo_tokenizer()
    with_template.chat_template = INSTRUCT
    assert choose_template(with_template, None) == INSTRUCT
    assert choose_template(with_template, "vicuna") == VICUNA_TEMPLATE
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jinja"):
        choose_template(tokenizer, "nowhere.jinja")


def test_what_cannot_be_masked_is_refused_in_a_sentence(tokenizer):
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatEncoder(tokenizer, "{% for message in %}")
    no_end = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="eos_token"):
        choose_template(no_end, "vicuna")

    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="SlowTokenizer"):
        ChatEncoder(SlowTokenizer(), CHATML)


def test_a_tokenizer_that_drops_spaces_from_its_text_is_masked_by_words():
    """Word tokens with gaps between them: no gap may pull a user's word in."""
    words = ["user:", "assistant:", "yes", "no", "[end]"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="no"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]")
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content }}"
        "{{ ' [end] ' if message.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids, mask = ChatEncoder(tokenizer, template).encode(SAME_WORDS[:4])
    assert ids == [0, 2, 2, 1, 2, 2, 4, 0, 2, 2, 1, 2, 2, 4]
    assert mask == [False] * 4 + [True] * 3 + [False] * 4 + [True] * 3

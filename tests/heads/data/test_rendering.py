"""Templates that fail, loop or grow without bound end in a refusal of a conversation, and then in one sentence."""

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest
from byte_tokenizer import byte_tokenizer

from heads.data import rendering
from heads.data.chat import ChatEncoder, choose_template, encode_chat
from heads.data.conversations import BadRowError
from heads.data.rendering import RefusedByTemplateError, Renderer

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.1)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ range(10**9) }}", "OverflowError: Range too big"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('no such role') }}", "^no such role$"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{{ 'a' * 10**11 }}", "it takes more than .* s of computing, 512 MiB or 16,777,216 characters"),
        ("{{ 'a' * 10**8 }}", "it takes more than"),
        ("{{ '%099999999999d' % 1 }}", "it takes more than"),
        (DOUBLING, "it takes more than"),
        (ENDLESS, "it takes more than"),
        ("{{ 7 ** 100000000 }}", "it takes more than"),
    ],
)
def test_what_goes_wrong_in_a_template_refuses_the_conversation(hurried, template, says):
    renderer = Renderer(template)
    with pytest.raises(RefusedByTemplateError, match=says):
        renderer.render(TURNS)


def test_a_template_that_takes_too_much_is_given_up(hurried, tokenizer):
    encoder = ChatEncoder(tokenizer, ENDLESS)  # tries it once
    with pytest.raises(BadRowError, match="the chat template refuses the conversation: it takes more than"):
        encoder.encode(TURNS)
    with pytest.raises(ValueError, match=r"took more than .* for 3 conversations; use another template") as given_up:
        encoder.encode(TURNS)
    assert not isinstance(given_up.value, BadRowError)
    with pytest.raises(BadRowError, match=r"refuses turns of user, assistant \(ZeroDivisionError"):
        encode_chat(tokenizer, "{{ 1/0 }}", TURNS)


def test_a_renderer_goes_on_after_a_refusal_and_after_its_child_left():
    renderer = Renderer("{% if messages|length > 2 %}{{ 1/0 }}{% endif %}" + PLAIN)
    wanted = ("user: Hi\nassistant: Hello.\n", [])
    assert renderer.render(TURNS) == wanted
    with pytest.raises(RefusedByTemplateError):
        renderer.render(TURNS * 2)
    first = renderer._child.pid
    os.kill(first, signal.SIGKILL)  # as the system does that runs out of memory: no fault of the next conversation
    assert renderer.render(TURNS) == wanted
    assert renderer._child.pid != first
    assert pickle.loads(pickle.dumps(renderer)).render(TURNS) == wanted


def test_a_child_with_nothing_to_do_leaves_and_another_one_comes(monkeypatch):
    monkeypatch.setattr(rendering, "IDLE_SECONDS", 0.01)
    renderer = Renderer(PLAIN)
    renderer.render(TURNS)
    first = renderer._child.pid
    time.sleep(0.2)
    assert renderer.render(TURNS)[0] == "user: Hi\nassistant: Hello.\n"
    assert renderer._child.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_threads_and_forked_workers_render(tokenizer):
    encoder = ChatEncoder(tokenizer, PLAIN)
    questions = [[{"role": "user", "content": f"question {n}"}, TURNS[1]] for n in range(40)]
    wanted = [encoder.encode(question) for question in questions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoder.encode, questions)) == wanted
    rows = datasets.Dataset.from_dict({"n": list(range(40))})
    mapped = rows.map(
        lambda row: {"ids": encoder.encode(questions[row["n"]])[0]}, num_proc=2, load_from_cache_file=False
    )
    assert mapped["ids"] == [ids for ids, _ in wanted]


def test_a_template_in_another_encoding_ends_in_a_sentence(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"t.jinja' is no text in UTF-8 .*give a Jinja file"):
        choose_template(tokenizer, str(tmp_path / "t.jinja"))


def test_an_interrupted_request_leaves_no_reply_for_the_next():
    """The request takes long enough for a signal to arrive before its reply."""
    long = "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    renderer = Renderer("{{ messages[0].content }}{% if messages[0].content == 'y' %}" + long + "{% endif %}")
    asked = [[{"role": "user", "content": text}] for text in "xyz"]
    assert renderer.render(asked[0]) == ("x", [])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt):
            renderer.render(asked[1])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert renderer.render(asked[2]) == ("z", [])


def test_a_child_that_others_ended_is_started_again():
    renderer = Renderer("{{ messages[0].content }}")
    for text in "xy":
        assert renderer.render([{"role": "user", "content": text}]) == (text, [])
        os.kill(renderer._child.pid, signal.SIGTERM)
        time.sleep(0.05)
    assert renderer.render([{"role": "user", "content": "z"}]) == ("z", [])
    assert renderer.overruns == 0

"""Data that a server writes: the lines that this process would write, in order; refusals and errors in a sentence."""

import json
import random
import time

import pytest
from regenerated_runs import CHATML, ENDS, rows, say, write
from served import RefusedError, served
from tiny_run import write_config

from heads.data.chat import choose_template, encode_chat
from train.__main__ import run_command
from train.regenerate.output import is_finished

GREEDY = ("--temperature", "0")


class Speaker:
    """The folder's backbone behind the server's API, as vLLM answers: with token ids where it is asked for them."""

    def __init__(self, backbone, gives_ids=True):
        self.model, self.tokenizer = backbone
        self.template = choose_template(self.tokenizer, None)
        self.gives_ids = gives_ids
        self.asked = []

    def __call__(self, asked):
        self.asked.append(asked)
        time.sleep(random.Random(str(asked)).random() / 50)  # answers overtake each other
        is_chat = asked["path"].endswith("chat/completions")
        prompt = encode_chat(self.tokenizer, self.template, asked["messages"]) if is_chat else asked["prompt"]
        found = say(self.model, prompt, asked["max_tokens"])
        ended = found[-1] in ENDS
        text = self.tokenizer.decode(found, skip_special_tokens=True)
        choice = {"finish_reason": "stop" if ended else "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if self.gives_ids and asked.get("return_token_ids"):
            choice |= {"token_ids": found, "prompt_token_ids": prompt}
        return choice


def ask(folder, out, url, *flags, data="text", concurrency=5):
    """The command with a server."""
    config = write_config(folder, "run", backbone={"dtype": "float64"}, data={"train": [{"path": str(folder / data)}]})
    sizes = ("--prompt-tokens", "12", "--max-new-tokens", "10", "--concurrency", str(concurrency))
    server = ("--server", url, "--model", "tiny", "--data.train", json.dumps([{"path": f"{folder / data}.jsonl"}]))
    run_command(["regenerate-data", "--config", config, "--out", str(folder / out), *sizes, *server, *flags])
    return (folder / out).read_bytes()


def test_texts_are_those_of_this_process(folder, backbone):
    speaker = Speaker(backbone)
    with served(speaker, ["tiny"]) as url:
        assert ask(folder, "served.jsonl", url, *GREEDY) == write(folder, "own.jsonl", *GREEDY)
    assert is_finished(folder / "served.jsonl")
    assert {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "seed"} <= set(speaker.asked[0])


@pytest.mark.parametrize("as_tokens", [False, True])
def test_conversations_are_those_of_this_process(folder, backbone, as_tokens):
    (folder / "t.jinja").write_text(backbone[1].chat_template or CHATML)
    flags = ("--data.chat_template", str(folder / "t.jinja")) if as_tokens else ()
    speaker = Speaker(backbone)
    with served(speaker) as url:
        found = ask(folder, "served.jsonl", url, *GREEDY, *flags, data="chat")
    assert found == write(folder, "own.jsonl", *GREEDY, *flags, data="chat")
    assert {"prompt" in asked for asked in speaker.asked} == {as_tokens}
    assert {len(row["messages"]) for row in rows(found)} >= {0, 2, 4}


def test_a_run_whose_server_went_down_goes_on_to_the_same_bytes(folder):
    def answer(question):
        return {"text": f"{question['seed']}", "finish_reason": "stop"}

    with served(answer) as url:
        whole = ask(folder, "whole.jsonl", url, concurrency=1)
        ask(folder, "cut.jsonl", url, "--limit", "20")
    assert len({row["text"][12:] for row in rows(whole)}) == len(rows(whole))
    with pytest.raises(ValueError, match="cannot be reached; start the server there, or correct --server"):
        ask(folder, "cut.jsonl", url)
    (folder / "cut.jsonl").write_bytes((folder / "cut.jsonl").read_bytes()[:-5])
    with served(answer) as url:
        assert ask(folder, "cut.jsonl", url) == whole
        with pytest.raises(ValueError, match="begun with other settings: server's model 'tiny'"):
            ask(folder, "cut.jsonl", url, "--model", "other")


def test_a_server_that_dies_keeps_whole_lines(folder):
    def answer(question):
        if len(asked) == 12:
            raise RefusedError(401, "the key has expired")
        asked.append(question)
        return {"text": "a", "finish_reason": "stop"}

    asked = []
    with served(answer) as url, pytest.raises(ValueError, match=r"wants another key \(status 401\)"):
        ask(folder, "out.jsonl", url, concurrency=3)
    found = rows((folder / "out.jsonl").read_bytes())
    assert 9 <= len(found) <= 12
    assert [row["line"] for row in found] == list(range(len(found)))


def test_a_server_that_fails_on_everything_loses_no_rows(folder):
    """A proxy answers for a server that has gone: no row is written without its text, and the same command resumes."""

    def answer(question):
        if down and question["prompt"] not in answered:
            raise RefusedError(503, "no backend")
        answered.append(question["prompt"])
        return {"text": "a", "finish_reason": "stop"}

    answered, down = [], []
    with served(answer, status_of_models=lambda: 503 if down else 200) as url:
        ask(folder, "out.jsonl", url, "--limit", "6", concurrency=2)
        down.append(True)
        with pytest.raises(ValueError, match=r"fails on every request \(status 503: no backend\)"):
            ask(folder, "out.jsonl", url, concurrency=2)
        assert len(rows((folder / "out.jsonl").read_bytes())) == 6
        down.clear()
        assert all(row["input_ids"] for row in rows(ask(folder, "out.jsonl", url, concurrency=2)))


def test_a_prompt_on_which_a_server_fails_is_refused(folder, capsys):
    def answer(question):
        if not failed or question["prompt"] == failed[0]:
            failed[:] = [question["prompt"]]
            raise RefusedError(500, "out of memory")
        return {"text": "a", "finish_reason": "stop"}

    failed = []
    with served(answer) as url:
        found = rows(ask(folder, "out.jsonl", url, "--limit", "6", concurrency=1))
    assert [row["input_ids"] == [] for row in found] == [True, *[False] * 5]
    assert "status 500: out of memory" in capsys.readouterr().out


def test_what_a_server_refuses_is_counted_by_its_reason(folder, backbone, capsys):
    letters = [chr(100 + i) for i in range(10)]
    first = [backbone[1](letter)["input_ids"][0] for letter in letters]

    def answer(question):
        if "seed" in question or "min_p" in question:
            raise RefusedError(400, "what is a seed?")
        place = first.index(question["prompt"][1])
        if place % 5 == 0:
            raise RefusedError(400, f"maximum context length is {place} tokens")
        return {
            "text": "abc",
            "finish_reason": "content_filter" if place % 5 == 1 else "length" if place % 5 == 2 else "stop",
        }

    (folder / "text.jsonl").write_text("".join(json.dumps({"text": letter * 30}) + "\n" for letter in letters))
    with served(answer) as url:
        found = rows(ask(folder, "out.jsonl", url, concurrency=2))
    assert [row["input_ids"] == [] for row in found] == [i % 5 in (0, 1) for i in range(10)]
    told = capsys.readouterr().out
    assert (
        "2 answers were refused by the server, and their rows end there: status 400: maximum context length is …"
        in told
    )
    assert "2 answers were refused by the server, and their rows end there: finish_reason content_filter" in told
    assert "2 texts were ended by --max-new-tokens" in told
    assert "6 texts came without token ids" in told
    assert "does not take seed, return_token_ids, stop_token_ids, top_k, min_p, repetition_penalty" in told
    assert all(row["text"].endswith("abc") for row in found if row["input_ids"])


def test_a_busy_server_is_asked_again(folder):
    tries = []

    def answer(question):
        tries.append(str(question["prompt"]))
        if tries.count(tries[-1]) < 4:
            raise RefusedError(429 if len(tries) % 2 else 500, "busy")
        return {"text": "a", "finish_reason": "stop"}

    with served(answer) as url:
        assert all(row["input_ids"] for row in rows(ask(folder, "out.jsonl", url, "--limit", "6")))


def test_other_templates_and_lost_reasoning_are_told(folder, capsys):
    def answer(question):
        message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it?"}
        return {"message": message, "finish_reason": "stop", "prompt_token_ids": [1, 2]}

    with served(answer) as url:
        ask(folder, "out.jsonl", url, data="chat")
    told = capsys.readouterr().out
    assert "13 prompts were other tokens on the server than in training" in told
    assert "13 answers lack their reasoning" in told


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "other"), r"--model other was given; http://.* has a, tiny\."),
        (("--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY was given, and that variable is not set"),
        (("--batch-size", "4"), "makes its own batches; give --concurrency"),
        (("--heads", "folder"), "--heads was given with --server"),
        (("--server", "localhost:8000"), "give a URL such as"),
        (("--concurrency", "0"), "concurrency=0 was given"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(folder, backbone, flags, sentence):
    with served(Speaker(backbone), ["tiny", "a"]) as url, pytest.raises(ValueError, match=sentence):
        ask(folder, "out.jsonl", url, *flags)
    assert not (folder / "out.jsonl").exists()
    with pytest.raises(ValueError, match="--model was given without --server"):
        write(folder, "out.jsonl", "--model", "tiny")


def test_a_server_that_refuses_everything_ends_the_command(folder):
    def answer(question):
        raise RefusedError(400, "no.")

    with (
        served(answer) as url,
        pytest.raises(ValueError, match=r"refused the first 20 requests; the last: status 400: no"),
    ):
        ask(folder, "out.jsonl", url)


def test_tokens_of_another_model_are_refused(folder):
    sentence = r"the token 9999, and the backbone of the config knows 257"
    unknown = {"text": "a", "token_ids": [9999], "finish_reason": "stop"}
    with served(lambda question: unknown) as url, pytest.raises(ValueError, match=sentence):
        ask(folder, "out.jsonl", url)

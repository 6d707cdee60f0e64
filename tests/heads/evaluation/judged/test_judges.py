"""Judges: verdicts are read or counted as unreadable, places are drawn, answers are kept, and errors are sentences."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from served import RefusedError, served
from tiny import tiny_model

from heads.evaluation.judged.judge import LikelihoodJudge
from heads.evaluation.judged.llm_judges import EndpointJudge, LocalJudge

PAIRS = [("Say it.", f"good {i}", f"bad {i}") for i in range(12)]


def prefers_good(question):
    """A judge who finds what begins with "good" better, wherever it stands."""
    if "in order" in question:
        texts = question.split("\nText ")[1:]
        good = [i for i, text in enumerate(texts, start=1) if "good" in text]
        return f"[[{', '.join(map(str, [*good, *(i for i in range(1, len(texts) + 1) if i not in good)]))}]]"
    if "Text A:" in question:
        return "Well. [[A]]" if "Text A:\ngood" in question else "[[B]]"
    return "[[9]]" if "good" in question else "no number"


@pytest.fixture
def server():
    """A server that answers with `server.answer`, refuses the first `server.refuse` requests, and counts all."""

    found = SimpleNamespace(answer=prefers_good, refuse=0, requests=0)

    def answer(asked):
        found.requests += 1
        if found.requests <= found.refuse:
            raise RefusedError(503, "busy")
        return {"message": {"role": "assistant", "content": found.answer(asked["messages"][0]["content"])}}

    with served(answer) as found.url:
        yield found


def judge_at(server, **given):
    return EndpointJudge(name="local", url=server.url, model="m", **given)


def test_winners_do_not_depend_on_places(server):
    judge = judge_at(server)
    assert judge.winners(PAIRS, seed=3) == ["A"] * 12
    assert judge.winners([(prompt, b, a) for prompt, a, b in PAIRS], seed=4) == ["B"] * 12
    server.answer = lambda question: "[[A]]"  # prefers the first place: wins and losses by the coin
    assert set(judge_at(server).winners(PAIRS, seed=3)) == {"A", "B"}


def test_scores_and_orders(server):
    judge = judge_at(server)
    assert judge.scores([("p", "good"), ("p", "bad")]) == [9, None]
    assert judge.unreadable == 1
    orders = judge.orders([("p", ["bad", "worse", f"good {i}"]) for i in range(4)], seed=0)
    assert [order[0] for order in orders] == [2] * 4
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    server.answer = lambda question: "[[2, 2, 1]]"
    assert judge_at(server).orders([("p", ["a", "b", "c"])], seed=0) == [None]


def test_answers_are_kept_so_that_a_repeated_call_asks_nothing(server, tmp_path, capsys):
    cache = tmp_path / "answers.jsonl"
    judge_at(server, cache=cache, prices=(1.0, 2.0)).scores([("p", f"good {i}") for i in range(5)])
    assert "asked 5 questions of about" in capsys.readouterr().err
    assert judge_at(server, cache=cache).scores([("p", f"good {i}") for i in range(6)]) == [9] * 6
    assert server.requests == 6


def test_a_model_of_the_same_name_on_another_server_is_another_judge(server, tmp_path):
    judge = judge_at(server, cache=tmp_path / "answers.jsonl")
    assert judge.scores([("p", "good")]) == [9]
    moved = EndpointJudge(name="local", url=f"{server.url}/", model="m", cache=tmp_path / "answers.jsonl")
    assert moved.scores([("p", "good")]) == [9]
    assert server.requests == 2
    assert moved.identity != judge.identity


def test_an_answer_without_a_verdict_is_asked_again_by_the_next_call(server, tmp_path):
    cache = tmp_path / "answers.jsonl"
    first = judge_at(server, cache=cache)
    assert first.scores([("p", "good"), ("p", "bad")]) == [9, None]
    assert first.unreadable == 1
    server.answer = lambda question: "Now I know. [[2]]"
    second = judge_at(server, cache=cache)
    assert second.scores([("p", "good"), ("p", "bad")]) == [9, 2]
    assert (second.unreadable, server.requests) == (0, 3)


def test_all_that_is_asked_is_priced_before_the_first_question(server, capsys):
    server.refuse = 1
    judge = judge_at(server, tries=1, prices=(1.0, 2.0))
    with pytest.raises(ValueError, match="gave no answer"):
        judge.verdicts([("p", f"good {i}") for i in range(5)], PAIRS, seed=0)
    assert capsys.readouterr().err.count("is asked 17 questions") == 1
    scores, winners = judge.verdicts([("p", f"good {i}") for i in range(5)], PAIRS, seed=0)
    assert (scores, winners) == ([9] * 5, ["A"] * 12)


def test_a_busy_server_is_asked_again(server):
    server.refuse = 1
    assert judge_at(server, tries=2).scores([("p", "good")]) == [9]
    assert server.requests == 2


def test_a_server_that_cannot_be_reached_is_a_sentence_and_what_it_said_is_kept(server, tmp_path):
    cache = tmp_path / "answers.jsonl"
    judge = judge_at(server, cache=cache, tries=1, concurrency=1)
    judge.scores([("p", "good")])
    server.refuse = 10
    with pytest.raises(
        ValueError, match=r"^The judge m at http://127.* gave no answer \(.*busy.*Answers so far are kept"
    ):
        judge.scores([("p", "good"), ("p", "good 2")])
    assert judge_at(server, cache=cache).scores([("p", "good")]) == [9]
    gone = EndpointJudge(name="m", url="http://127.0.0.1:9/v1", model="m", tries=1)
    with pytest.raises(ValueError, match="cannot be reached after 1 tries"):
        gone.scores([("p", "t")])


def test_the_environment_names_the_judge(monkeypatch):
    monkeypatch.delenv("HEADWAY_JUDGE_URL", raising=False)
    monkeypatch.setenv("HEADWAY_JUDGE_MODEL", "m")
    with pytest.raises(ValueError, match=r"^HEADWAY_JUDGE_URL is not set"):
        EndpointJudge.from_environment()
    monkeypatch.delenv("HEADWAY_JUDGE_MODEL")
    with pytest.raises(ValueError, match=r"^HEADWAY_JUDGE_URL and HEADWAY_JUDGE_MODEL are not set"):
        EndpointJudge.from_environment()
    monkeypatch.setenv("HEADWAY_JUDGE_MODEL", "m")
    monkeypatch.setenv("HEADWAY_JUDGE_URL", "http://localhost:1/v1")
    assert EndpointJudge.from_environment(tries=2).tries == 2
    monkeypatch.setenv("HEADWAY_JUDGE_URL", "localhost")
    with pytest.raises(ValueError, match="URL 'localhost' was given"):
        EndpointJudge.from_environment()


def test_a_local_model_without_a_chat_template_cannot_be_asked():
    with pytest.raises(ValueError, match="has no chat template"):
        LocalJudge(name="m", loaded=tiny_model("llama"), tokenizer=byte_tokenizer())


def test_two_empty_texts_are_a_tie():
    tokenizer = byte_tokenizer()
    model, decoded = (tiny_model("llama", vocab_size=len(tokenizer), seed=seed) for seed in (0, 1))
    judge = LikelihoodJudge(model, tokenizer, decoded)
    assert judge.winners([("p", "", ""), ("p", "a", ""), ("p", "", "a")]) == ["tie", "A", "B"]


def test_log_likelihood_is_another_model_s_mean_over_the_text_alone():
    tokenizer = byte_tokenizer()
    model, decoded = (tiny_model("llama", vocab_size=len(tokenizer), seed=seed) for seed in (0, 1))
    judge = LikelihoodJudge(model, tokenizer, decoded)
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd", "xyz")}
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    log_p_TV = model(torch.tensor([[*begin, *ids["ab"], *ids["cd"]]])).logits[0].double().log_softmax(-1)
    start = len(begin) + len(ids["ab"])
    expected = [log_p_TV[start - 1 + i, token].item() for i, token in enumerate(ids["cd"])]
    assert judge.score("ab", "cd") == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    scores = {text: judge.score("ab", text) for text in ("cd", "xyz")}
    best = max(scores, key=scores.get)
    assert judge.winners([("ab", "cd", "xyz")]) == ["A" if best == "cd" else "B"]
    assert judge.orders([("ab", ["cd", "xyz"])]) == [(0, 1) if best == "cd" else (1, 0)]
    assert judge.score("ab", "") == -float("inf")


def named(model, name):
    model.config.name_or_path = str(name)
    return model


def test_no_name_hides_that_a_judge_wrote_the_texts(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "dtype": torch.float32}
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    writer, other = named(tiny_model("llama", **sizes, seed=1), "base"), tiny_model("llama", **sizes, seed=0)
    judges = [named(copy.deepcopy(other), name) for name in ("base/", "./base", tmp_path / "base", "link")]
    unlike = tiny_model("llama", **sizes, seed=2)
    copied = named(copy.deepcopy(writer), "elsewhere")
    for judge in (writer, *judges, copied, copy.deepcopy(copied).bfloat16()):
        with pytest.raises(ValueError, match=r"^.+ was given as the judge of its own texts"):
            LikelihoodJudge(judge, tokenizer, unlike, writer)
    LikelihoodJudge(named(copy.deepcopy(other), "elsewhere"), tokenizer, writer)


def test_a_local_judge_keeps_each_answer_as_it_comes_and_is_asked_nothing_twice(tmp_path, monkeypatch):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}"
    asked = []

    def ask(judge, question):
        asked.append(question)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return prefers_good(question)

    monkeypatch.setattr(LocalJudge, "ask", ask)

    def judge(**given):
        model = tiny_model("llama", vocab_size=len(tokenizer))
        return LocalJudge(name="m", loaded=model, tokenizer=tokenizer, cache=tmp_path / "answers.jsonl", **given)

    texts = [("p", "good 1"), ("p", "bad"), ("p", "good 2")]
    with pytest.raises(KeyboardInterrupt):
        judge().scores(texts)
    again = judge()
    assert (again.scores(texts), again.unreadable) == ([9, None, 9], 1)
    assert len(asked) == 4, "the one that was interrupted; the unreadable one would be the same again"
    judge(answer_tokens=7).scores(texts)
    assert len(asked) == 7, "another judge"


def test_a_server_that_lists_no_models_is_there_and_one_that_is_gone_is_a_sentence():
    for status in (200, 404):
        with served(lambda asked: {}, status_of_models=lambda status=status: status) as url:
            EndpointJudge(name="m", url=url, model="m", tries=1).reach()
    with pytest.raises(ValueError, match=r"^The judge m at http://127.* cannot be reached after 1 tries"):
        EndpointJudge(name="m", url=url, model="m", tries=1).reach()


def test_a_local_judge_s_template_is_rendered_within_limits():
    """`{{ 1/0 }}` and endless templates come with downloaded models."""
    tokenizer = copy.deepcopy(byte_tokenizer())  # all tests share it
    tokenizer.chat_template = "{{ 1/0 }}"
    judge = LocalJudge(name="m", loaded=tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="The chat template refuses turns of user"):
        judge.ask("Which text is better?")
    tokenizer.chat_template = "{{ messages[0].content }}"
    judge.answer_tokens = 2
    assert isinstance(judge.ask("Which text is better?"), str)

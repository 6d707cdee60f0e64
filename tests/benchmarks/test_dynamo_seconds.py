"""Seconds are measured in turn, so that load slows plain and dynamic decoding alike, and are never kept."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import tiny_model

from benchmarks.paper import dynamo_seconds
from benchmarks.paper.dynamo_seconds import never_ending, time_texts
from heads.evaluation.suites.sentence_completion import Config


class Timed:
    """A clock and texts that take seconds of it; load grows with every text, and starts late."""

    def __init__(self):
        self.now, self.load, self.written = 0.0, 1.0, []

    def write(self, model, tokenizer, prompt, new_tokens, draws, decoding=None):
        self.load *= 1.02
        self.now += self.load * (1.0 if decoding is None else 0.5)
        self.written.append("plain" if decoding is None else "dynamic")


class Demo:
    model, token_heads, tokenizer, console = tiny_model("llama"), None, None, None


TASK: Any = Demo()


@pytest.fixture
def timed(monkeypatch):
    found = Timed()
    monkeypatch.setattr(dynamo_seconds, "write", found.write)
    monkeypatch.setattr(dynamo_seconds, "open_baseline", lambda task: (task.model, "before"))
    monkeypatch.setattr(dynamo_seconds, "DynamicDecoding", lambda *given, **settings: object())
    return found


def test_growing_load_does_not_change_the_speed_up(timed):
    """If all plain texts came first, later load would slow dynamic decoding alone."""
    plain_EP, dynamic_EP = time_texts(TASK, Config(prompts="code"), [0.0, 0.5, 1.0], 3, lambda: timed.now)
    assert plain_EP.shape == dynamic_EP.shape == (3, 10)
    assert np.allclose(plain_EP.sum(axis=1) / dynamic_EP.sum(axis=1), 2.0, rtol=0.03)
    assert plain_EP[-1, -1] > 10 * plain_EP[0, 0]


def test_each_call_measures_and_takes_turns(timed):
    for calls in (1, 2):
        time_texts(TASK, Config(prompts="code"), [0.5], 2, lambda: timed.now)
        assert len(timed.written) == calls * 2 * (1 + 10 * 2)  # a warm-up and two repeats of ten pairs
    pairs = [timed.written[i : i + 2] for i in range(0, len(timed.written), 2)]
    assert all(set(pair) == {"plain", "dynamic"} for pair in pairs)
    assert {pair[0] for pair in pairs} == {"plain", "dynamic"}


def test_the_table_of_n_grams_is_opened_once_and_no_text_s_time_holds_its_preparation(timed, monkeypatch):
    opened = []

    def slow(*given, **settings):
        timed.now += 100.0
        return object()

    monkeypatch.setattr(dynamo_seconds, "NgramTable", SimpleNamespace(open=opened.append))
    monkeypatch.setattr(dynamo_seconds, "DynamicDecoding", slow)
    config = Config(prompts="code", cooccurrence="ngrams")
    plain_EP, dynamic_EP = time_texts(TASK, config, [0.0, 0.5], 1, lambda: timed.now)
    assert opened == ["ngrams"]
    assert plain_EP.max() + dynamic_EP.max() < 100


def test_ends_are_put_back():
    model = Demo.model
    model.generation_config.eos_token_id = 5
    with never_ending(model):
        assert model.generation_config.eos_token_id is None
    assert model.generation_config.eos_token_id == 5

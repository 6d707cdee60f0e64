"""The adapters for outside harnesses give what those ask for; figures that are not equal are an error."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from throwaway_families import make_heads
from tiny import EOS, random_tokens, shared_model

from benchmarks.outside import spec_bench, specdec_bench
from benchmarks.outside.harnesses import (
    HarnessFigures,
    check_equal,
    in_turns,
    main,
    of_lengths,
    of_spec_bench,
    of_specdec_bench,
    over,
)
from heads.backbone.model import Backbone
from heads.decoding.tree_decoding import TreeDecoding

PROMPT_1T = random_tokens(1, 6)
NEW = 12


@pytest.fixture(scope="module")
def model():
    return shared_model("llama", "sdpa", torch.float64)


@pytest.fixture(scope="module")
def decoding(model):
    return TreeDecoding(make_heads("medusa", Backbone(model)), 4, lookup=6)


def test_spec_bench_gets_sequences_and_the_tokens_of_each_pass(model, decoding):
    inputs = SimpleNamespace(input_ids=PROMPT_1T)
    plain_1L, tokens, steps, lengths = spec_bench.forward(inputs, model, None, NEW)
    assert plain_1L.equal(model.generate(PROMPT_1T, max_new_tokens=NEW, do_sample=False))
    assert (tokens, steps, lengths) == (plain_1L.shape[1] - 6, len(lengths), [1] * tokens)
    ours_1L, ours_tokens, ours_steps, ours_lengths = spec_bench.forward(inputs, model, None, NEW, decoding=decoding)
    assert ours_1L.equal(plain_1L)
    assert ours_tokens == tokens == sum(ours_lengths)
    assert ours_steps == len(ours_lengths) < steps


def test_specdec_bench_gets_chunks_and_times(model, decoding):
    found = asyncio.run(specdec_bench.HeadwayModel(model, decoding).run(PROMPT_1T[0].tolist(), NEW, EOS, 0, 0))
    (chunks,) = found["output_ids"]
    plain = model.generate(PROMPT_1T, max_new_tokens=NEW, do_sample=False)[0, 6:].tolist()
    assert [token for chunk in chunks for token in chunk] == [token for token in plain if token != EOS]
    assert all(chunks)
    assert found["token_times"] == sorted(found["token_times"])
    assert len(found["token_times"]) >= len(chunks) + 1


def test_counts_of_both_harnesses_are_read_and_compared():
    own = of_lengths("ours", "heads", [[1, 3], [1, 1, 1]], [1.0, 1.0])
    answers = [
        {"choices": [{"accept_lengths": [1, 3], "new_tokens": [4], "decoding_steps": [2], "wall_time": [1.0]}]},
        {"choices": [{"accept_lengths": [1, 1, 1], "new_tokens": [3], "decoding_steps": [3], "wall_time": [1.0]}]},
    ]
    check_equal(own, of_spec_bench("heads", answers))
    acceptance = {"Acceptance_Length_Histogram": {1: 4, 3: 1}, "Average_AL": 1.5}
    theirs = of_specdec_bench("heads", {"acceptance": acceptance, "tokens": [4, 3], "seconds": [1.0, 1.0]})
    check_equal(own, theirs)
    with pytest.raises(ValueError, match="specdec_bench counts 6 tokens for heads, we count 7"):
        check_equal(own, replace(theirs, tokens=6))


def test_plain_and_heads_take_turns_and_the_ratio_is_of_medians():
    order, seconds = [], {"plain": iter([4.0, 40.0, 4.0]), "heads": iter([20.0, 2.0, 2.0])}

    def run(method: str) -> HarnessFigures:
        order.append(method)
        taken = next(seconds[method])
        return of_lengths("ours", method, [[1, 1, 1, 1]] * 4, [taken] * 4)

    found = in_turns(run, ["plain", "heads"], 3)
    assert order == ["plain", "heads"] * 3
    assert str(over(found["heads"], found["plain"])) == "2.00 (2.00–2.00)"  # the disturbed turns change nothing
    assert found["plain"].tokens_per_second == 1.0


def test_the_stand_in_conversation_is_the_prompts_alone(tmp_path: Path):
    conversation = spec_bench.PromptAlone()
    conversation.append_message("user", "def f(")
    conversation.append_message("assistant", None)
    assert conversation.get_prompt() == "def f("
    conversation.messages[-1][-1] = "x): ..."
    conversation.append_message("user", "\n")
    assert conversation.get_prompt() == "def f(x): ...\n"
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question_id": i}) for i in range(4)), encoding="utf-8")
    assert [row["question_id"] for row in spec_bench.load_questions(str(path), 1, 3)] == [1, 2]


def test_missing_checkouts_end_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWAY_HARNESSES", raising=False)
    with pytest.raises(ValueError, match="No checkouts were given; set HEADWAY_HARNESSES"):
        main([])
    with (
        pytest.raises(ValueError, match=r"holds no evaluation/eval.py; give a checkout"),
        spec_bench.imported(tmp_path),
    ):
        pass
    with pytest.raises(ValueError, match=r"holds no examples/specdec_bench/run.py"), specdec_bench.imported(tmp_path):
        pass

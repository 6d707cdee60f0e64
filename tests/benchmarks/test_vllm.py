"""The comparison with vLLM, without vLLM: our chain, and that whatever differs is an error that says where."""

from __future__ import annotations

import copy

import pytest
import torch
from family_checks import fit
from tiny import random_tokens, tiny_model

import heads
from benchmarks.outside.chain import run_chain
from benchmarks.outside.vllm.__main__ import VLLM, check_generated
from benchmarks.outside.vllm.comparing import check_equal, count

K, NEW = 3, 14


@pytest.fixture(scope="module")
def chains():
    token_heads = heads.create("gru", tiny_model("llama", attn="sdpa", dtype=torch.float64), num_heads=K)
    fit(token_heads, torch.cat([random_tokens(1, 5, seed=seed) for seed in range(50, 54)]), steps=30)
    prompts = [random_tokens(1, n, seed=50) for n in (5, 4)]
    return token_heads.eval(), prompts, [run_chain(token_heads, prompt, NEW, K) for prompt in prompts]


def test_generate_counts_what_the_chain_does_up_to_the_last_token(chains):
    token_heads, prompts, ours = chains
    found = check_generated("gru", token_heads, prompts, ours, NEW)
    assert found["accepted"] > 0
    assert found["passes"] == sum(len(chain.drafts) for chain in ours)


def as_vllm(ours):
    """What an engine without a fault reports."""
    rows = [{"text": chain.text[:NEW], "drafts": [*chain.drafts, [0] * K]} for chain in ours]
    batch = [list(row["text"]) for row in rows]
    return {"rows": rows, "batch": batch, "counts": count(ours, K)}


def test_an_equal_engine_passes(chains):
    _, _, ours = chains
    check_equal("gru", as_vllm(ours), as_vllm(ours), ours, K)


FAULTS = {
    "a text": (lambda engine: engine["rows"][0]["text"].__setitem__(4, -1), "prompt 1: .* text in a batch part at 4"),
    "a batch": (lambda engine: engine["batch"][1].__setitem__(0, -1), "prompt 2: .* text in a batch part at 0"),
    "a draft": (lambda engine: engine["rows"][1]["drafts"][1].__setitem__(2, -1), "prompt 2, pass 2: drafted ids"),
    "a pass": (lambda engine: engine["rows"][0]["drafts"].extend([[0] * K] * 2), "we .* times"),
    "a count": (lambda engine: engine["counts"].update(accepted=0), "counts accepted 0, we"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_differs_is_said(fault, chains):
    _, _, ours = chains
    engine = copy.deepcopy(as_vllm(ours))
    change, said = FAULTS[fault]
    change(engine)
    with pytest.raises(ValueError, match=said):
        check_equal("gru", engine, as_vllm(ours), ours, K)


def test_nothing_of_ours_reaches_the_engine_s_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "here")
    assert "PYTHONPATH" not in VLLM.all_variables()
    assert VLLM.all_variables()["VLLM_TARGET_DEVICE"] == "cpu"

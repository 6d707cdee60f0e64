"""bfloat16 and float16: where a text parts from plain generate's, a float32 copy rules whether rounding excuses it.

The judge is shown both: tree decoding, whose differences are rounding, and decoding that is wrong, which must not be
excused.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from matrices import covering
from throwaway_families import fitted_heads, make_heads
from tiny import PAD, VOCAB, random_tokens, shared_model, tiny_model

import heads
from heads.backbone.model import Backbone
from heads.decoding.trees.static import Tree
from heads.evaluation.methods import GreedySettings
from heads.evaluation.same_text import Float32Judge, SameText
from heads.evaluation.throughput import describe_verdicts

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
REQUEST = GreedySettings(new_tokens=24)
PROMPTS = [random_tokens(1, 6, seed=seed) for seed in range(6)]


def model_of(name: str, dtype: torch.dtype) -> Any:
    return shared_model(name, "eager" if name in ("codegen", "gemma2") else "sdpa", dtype)


def texts(model: Any, decoding: Any, prompt: Any) -> tuple[list[int], list[int]]:
    """Plain generate's new tokens and the decoding's."""
    asked = {"eos_token_id": None, "pad_token_id": PAD}
    plain = REQUEST.generate(model, prompt, **asked)
    ours = REQUEST.generate(model, prompt, custom_generate=decoding, **asked)
    return tuple(tokens[0, prompt.shape[1] :].tolist() for tokens in (plain, ours))  # type: ignore[return-value]


@covering(family=["grounded", "dynamo", "eagle"], dtype=[torch.bfloat16, torch.float16])
def test_texts_part_within_rounding_only(family, dtype, capsys):
    rulings = []
    for name in ("llama", "gpt_neox", "mistral_windowed", "gemma2", "gemma3"):
        model = model_of(name, dtype)
        decoding = heads.TreeDecoding(make_heads(family, Backbone(model)), TREE)
        judge = Float32Judge(model=model, settings=REQUEST)
        for prompt in PROMPTS[:2]:
            ruling = judge(prompt, *texts(model, decoding, prompt))
            if ruling is not None:
                rulings.append(ruling)
                assert ruling.within_rounding, (name, ruling)
                assert ruling.plain != ruling.other
                assert math.isfinite(ruling.gap)
    with capsys.disabled():
        ours = sum(ruling.preferred == "other" for ruling in rulings)
        print(f"\n{family} {dtype}: {len(rulings)} of 10 texts part; float32 prefers ours {ours} times")


@LOW
def test_texts_part_and_are_excused_where_every_token_has_a_twin(dtype):
    """Without a difference the test above would show nothing. Half of the vocabulary copies the other half's logits
    but for rounding, and each twin has an embedding of its own."""
    model = tiny_model("llama", attn="sdpa", dtype=dtype)
    weight, half = model.lm_head.weight.data, VOCAB // 2
    noise = torch.randn(half, weight.shape[1], generator=torch.Generator().manual_seed(0))
    weight[half : 2 * half] = weight[:half] * (1 + torch.finfo(dtype).eps * noise).to(dtype)
    decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model)), TREE)
    judge = Float32Judge(model=model, settings=REQUEST)
    found = [judge(prompt, *texts(model, decoding, prompt)) for prompt in PROMPTS]
    parted = [ruling for ruling in found if ruling is not None]
    assert parted
    assert all(ruling.within_rounding for ruling in parted)
    assert all(abs(ruling.plain - ruling.other) == half for ruling in parted)


@LOW
def test_wrong_positions_are_not_excused(dtype, monkeypatch):
    """All nodes at the root's position: text goes wrong at once, and by far more than rounding."""
    model = model_of("llama", dtype)
    token_heads = fitted_heads("grounded", "llama").in_dtype(dtype)
    token_heads.backbone = Backbone(model)
    monkeypatch.setattr(Tree, "depth_tensor", lambda self, device: torch.zeros(self.num_nodes, dtype=torch.long))
    decoding = heads.TreeDecoding(token_heads, heads.Tree([[0], [0, 0], [0, 0, 0]]), lookup=0)
    judge = Float32Judge(model=model, settings=REQUEST)
    found = [judge(prompt, *texts(model, decoding, prompt)) for prompt in PROMPTS]
    assert any(ruling is not None and not ruling.within_rounding for ruling in found)


@LOW
def test_the_ruling_names_both_tokens_and_the_float32_gap(dtype):
    model = model_of("qwen3", dtype)
    prompt = PROMPTS[0]
    plain, _ = texts(model, None, prompt)
    high = copy.deepcopy(model).float()
    at = 7
    with torch.no_grad():
        logits = high(torch.cat([prompt, torch.tensor([plain[:at]])], dim=1)).logits[0, -1]
    worst = int(logits.argmin())
    ruling = Float32Judge(model=model, settings=REQUEST)(prompt, plain, [*plain[:at], worst, *plain[at + 1 :]])
    assert ruling is not None
    assert (ruling.position, ruling.plain, ruling.other) == (at, plain[at], worst)
    assert ruling.gap == pytest.approx(float(logits[plain[at]] - logits[worst]), rel=1e-4)
    assert ruling.preferred == "plain"
    assert not ruling.within_rounding
    assert 0 < ruling.rounding < ruling.gap / 2

    class Letters:
        def decode(self, tokens: list[int]) -> str:
            return f"t{tokens[0]}"

    said = ruling.describe(Letters())
    assert said.startswith(f"token 8: plain 't{plain[at]}', here 't{worst}'; float32 prefers 't{plain[at]}' by ")
    assert said.endswith("NOT within rounding")


def test_same_text_and_a_text_that_ended():
    judge = Float32Judge(model=model_of("llama", torch.bfloat16), settings=REQUEST)
    assert judge(PROMPTS[0], [5, 6], [5, 6]) is None
    ended = judge(PROMPTS[0], [5, 6], [5])
    assert ended is not None
    assert (ended.plain, ended.other, ended.within_rounding) == (6, None, False)


def test_a_float32_model_is_its_own_judge():
    with pytest.raises(ValueError, match="given a model in float32; allowed are bfloat16 and float16"):
        Float32Judge(model=shared_model("llama", "sdpa", torch.float32), settings=REQUEST)


def judged(model: Any) -> SameText:
    return SameText(model=model, settings=REQUEST, float32=Float32Judge(model=model, settings=REQUEST))


def test_the_judge_decides_against_a_wrong_token():
    model = model_of("llama", torch.bfloat16)
    plain, _ = texts(model, None, PROMPTS[1])
    wrong = [*plain[:3], (plain[3] + 1) % 29, *plain[4:]]
    found = judged(model)(PROMPTS[1], plain, wrong)
    assert found.differs_at == 3
    assert [ruling.within_rounding for ruling in found.rulings] == [False]
    assert describe_verdicts([found]) == "no: prompt 1, token 4"


@LOW
def test_the_judge_excuses_what_plain_itself_stands_between(dtype):
    """Every token has a twin whose logit is its own: the twin's text is excused, and what follows it is plain's."""
    model = tiny_model("llama", attn="sdpa", dtype=dtype)
    weight, half = model.lm_head.weight.data, VOCAB // 2
    weight[half : 2 * half] = weight[:half]
    weight[2 * half :] = 0
    plain, _ = texts(model, None, PROMPTS[0])
    at = next(i for i, token in enumerate(plain) if i and token < half)
    other = [*plain[:at], plain[at] + half]
    asked = {"max_new_tokens": REQUEST.new_tokens - len(other), "eos_token_id": None, "pad_token_id": PAD}
    text = torch.cat([PROMPTS[0], torch.tensor([other])], dim=1)
    other = REQUEST.generate(model, text, **asked)[0, PROMPTS[0].shape[1] :].tolist()
    found = judged(model)(PROMPTS[0], plain, other)
    assert [ruling.within_rounding for ruling in found.rulings] == [True]
    assert describe_verdicts([found]) == "yes (1 excused)"
    worse = [*other[:-1], (other[-1] + 1) % half]  # one excuse does not cover what follows it
    assert describe_verdicts([judged(model)(PROMPTS[0], plain, worse)]) == f"no: prompt 1, token {len(other)}"

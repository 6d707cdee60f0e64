"""Decoding on an accelerator gives plain generate's text there, in every way that a user can ask for.

The CPU takes the same tests, so that a machine without a GPU shows that they say what they should. float64 leaves no
ties between the two best logits; what compiles runs in float32, whose kernels CUDA graphs capture.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrices import covering
from plain_text import plain_generate
from throwaway_families import fitted_heads
from tiny import PAD, random_tokens, tiny_model

import heads

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
FAMILIES = ("medusa", "grounded", "gru", "eagle", "mtp", "dynamo")
ROOM: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}


def on(device: str, family: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model and fitted heads of its own on a device."""
    model = copy.deepcopy(fitted_heads(family, "llama").backbone.model).to(device, dtype)
    token_heads = heads.create(family, model, num_heads=3)
    token_heads.load_state_dict(fitted_heads(family, "llama").state_dict())
    return model, token_heads.to(device, dtype)


@DEVICES
@covering(family=FAMILIES, options=[{}, {"repetition_penalty": 1.1}, {"do_sample": True, "top_k": 1}])
def test_text_is_plain_generates(device, family, options):
    model, token_heads = on(device, family)
    prompt = random_tokens(1, 5, seed=50).to(device)
    given = {"max_new_tokens": 24, "do_sample": False, **ROOM, **options}
    plain = plain_generate(model, prompt, seed=0, **given)
    for decoding in (heads.TreeDecoding(token_heads), heads.TreeDecoding(token_heads, 6, lookup=0)):
        assert torch.equal(model.generate(prompt, custom_generate=decoding, **given), plain)


@DEVICES
def test_a_ragged_batch_is_decoded_row_by_row(device):
    model, token_heads = on(device, "grounded")
    prompt = random_tokens(3, 6, seed=51).to(device)
    mask = torch.ones_like(prompt)
    for row in range(3):
        prompt[row, :row], mask[row, :row] = PAD, 0
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, **ROOM}
    ours = model.generate(prompt, custom_generate=heads.TreeDecoding(token_heads), **given)
    assert torch.equal(ours, plain_generate(model, prompt, **given))


@DEVICES
def test_a_conversation_keeps_its_caches(device):
    model, token_heads = on(device, "grounded")
    decoding = heads.TreeDecoding(token_heads, keep_caches=True)
    text = random_tokens(1, 5, seed=52).to(device)
    for turn in range(3):
        plain = plain_generate(model, text, max_new_tokens=8, do_sample=False, **ROOM)
        text = model.generate(text, custom_generate=decoding, max_new_tokens=8, do_sample=False, **ROOM)
        assert torch.equal(text, plain), f"turn {turn}"
        text = torch.cat([text, random_tokens(1, 3, seed=60 + turn).to(device)], dim=1)


@DEVICES
def test_a_draft_model_changes_nothing(device):
    model, _ = on(device, "medusa")
    draft = tiny_model("gpt_neox").to(device, torch.float64)
    prompt = random_tokens(1, 5, seed=53).to(device)
    given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, **ROOM}
    ours = model.generate(prompt, custom_generate=heads.DraftModelDecoding(draft), **given)
    assert torch.equal(ours, plain_generate(model, prompt, **given))


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_passes_and_drafting_give_the_same_text(family):
    model, token_heads = on("cuda", family, torch.float32)
    prompt = random_tokens(1, 5, seed=50).cuda()
    plain = plain_generate(model, prompt, max_new_tokens=64, do_sample=False, **ROOM)
    decoding = heads.TreeDecoding(token_heads, 6, compile=True)
    for _ in range(2):  # the second call replays what the first one captured
        ours = model.generate(prompt, custom_generate=decoding, max_new_tokens=64, do_sample=False, **ROOM)
        assert torch.equal(ours, plain)

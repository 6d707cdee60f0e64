"""The key-value cache of a call is returned as `generate` returns it, so that plain generation can go on with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from throwaway_families import fitted_heads
from tiny import PAD, random_tokens

import heads

PROMPT = random_tokens(1, 11, seed=1)
ASKED: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, "return_dict_in_generate": True}


@pytest.mark.parametrize(
    ("family", "name"), [("grounded", "llama"), ("dynamo", "llama"), ("medusa", "mistral_windowed"), ("gru", "gemma3")]
)
def test_plain_generation_goes_on_from_it(family, name):
    token_heads = fitted_heads(family, name)
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads, 8, keep_caches=True)
    mask = torch.ones(1, 40)
    plain = model.generate(PROMPT, attention_mask=mask[:, :11], max_new_tokens=12, **ASKED)
    ours = model.generate(PROMPT, attention_mask=mask[:, :11], max_new_tokens=12, custom_generate=decoding, **ASKED)
    assert len(ours.past_key_values.layers) == len(plain.past_key_values.layers)
    for one, other in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(one) is type(other)
        torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-5)
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length() == 22
    texts = [
        model.generate(
            out.sequences, attention_mask=mask[:, :23], past_key_values=out.past_key_values, max_new_tokens=9, **ASKED
        ).sequences
        for out in (plain, ours)
    ]
    assert torch.equal(*texts)


def test_several_rows_and_calls_without_a_cache_return_none():
    token_heads = fitted_heads("grounded", "llama")
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads, 8)
    for tokens, asked in ((random_tokens(2, 5), {}), (PROMPT, {"use_cache": False})):
        out = model.generate(tokens, max_new_tokens=4, custom_generate=decoding, **asked, **ASKED)
        assert out.past_key_values is None

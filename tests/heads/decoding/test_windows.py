"""Windows and soft caps: greedy text is generate's with prompts longer than the window and text that goes on beyond it.

Hugging Face's caches drop what has left the window; ours keep every slot and mask by position. Both must give the same
text, for one row and for left-padded rows, whose positions and slots differ. In float64 with a window of eight; Gemma 2
caps attention scores too, which sdpa cannot, so it runs eagerly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import covering
from plain_text import plain_generate
from throwaway_families import fitted_heads
from tiny import PAD, left_padded, random_tokens
from torch import Tensor

import heads
from heads.backbone import model as backbone_module

NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0], [1, 0, 0], [2]])
WINDOW = 8
MODELS = [
    ("mistral_windowed", "sdpa"),
    ("phi3_windowed", "sdpa"),
    ("qwen3_windowed", "sdpa"),
    ("gemma3", "sdpa"),
    ("gemma2", "eager"),
    ("mistral_windowed", "eager"),
]


def plain_texts(model: Any, prompt: Tensor, valid: Tensor, attn: str, asked: dict[str, Any]) -> Tensor:
    """Plain generate's text. With eager attention in float64 its logits are NaN for padded rows of windowed models (its
    mask's lowest float64 is -inf to a float32 softmax): there each row is generated alone, without its padding."""
    if attn == "sdpa":
        texts: Tensor = plain_generate(model, prompt, **asked)
        return texts
    rows = []
    for row, real in zip(prompt, valid.bool(), strict=True):
        alone = plain_generate(model, row[real][None], **{**asked, "attention_mask": torch.ones_like(row[real][None])})
        rows.append(torch.cat([row[~real], alone[0]]))
    return torch.stack(rows)


@covering(model=MODELS, family=["grounded", "dynamo"])
def test_text_beyond_the_window_is_generates(model, family, monkeypatch):
    name, attn = model
    token_heads = fitted_heads(family, name, attn)
    model = token_heads.backbone.model
    assert token_heads.backbone.mask_style.window == WINDOW
    accepted = 0
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (4, 21, 11)])
    for chunk, lookup in ((backbone_module.PREFILL_TOKENS, 10), (6, 0)):
        monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", chunk)
        decoding = heads.TreeDecoding(token_heads, TREE, lookup=lookup)
        for prompt, valid in ((tokens, mask), (tokens[1:2], mask[1:2]), (tokens[:1, -4:], mask[:1, -4:])):
            asked = {"attention_mask": valid, "max_new_tokens": 4 * WINDOW, **NO_EOS}
            plain = plain_texts(model, prompt, valid, attn, asked)
            ours = model.generate(prompt, custom_generate=decoding, return_dict_in_generate=True, **asked)
            assert torch.equal(ours.sequences, plain)
            accepted += sum(ours.stats.accepted_per_depth)
    assert accepted > 0


@pytest.mark.parametrize(("name", "attn"), MODELS)
def test_the_window_decides_the_text(name, attn):
    """Without its window the same model writes another text, so the equality above shows something."""
    token_heads = fitted_heads("grounded", name, attn)
    model, prompt = token_heads.backbone.model, random_tokens(1, 21, seed=91)
    wide = type(model)(model.config.__class__(**{**model.config.to_dict(), "sliding_window": 512})).to(torch.float64)
    wide.load_state_dict(model.state_dict())
    wide.set_attn_implementation(attn)
    asked = {"max_new_tokens": 4 * WINDOW, "attention_mask": torch.ones_like(prompt), **NO_EOS}
    assert not torch.equal(wide.eval().generate(prompt, **asked), model.generate(prompt, **asked))

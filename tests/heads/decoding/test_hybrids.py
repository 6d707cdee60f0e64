"""Hybrid backbones (attention and recurrent layers): greedy text is `generate`'s, sampled text draw for draw.

In float32, so that torch's grouped product of experts runs; LFM2 in float64. Gaps between the two best logits of these
models are far above float32 rounding, so no difference is excused. benchmarks/speed/hybrids.py has the wide matrix.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import covering
from throwaway_families import fitted_heads, make_heads
from tiny import HYBRIDS, PAD, left_padded, random_tokens, shared_model, tiny_model
from tree_runs import both

import heads
from heads.backbone.model import Backbone

TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
PADDED = left_padded([random_tokens(n, seed=n).tolist() for n in (7, 3, 11)])
ASKED: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": PAD, "do_sample": False}


def dtype_of(name: str) -> torch.dtype:
    return torch.float64 if name == "lfm2" else torch.float32


def decoding_of(name: str, family: str = "grounded", **options: Any) -> tuple[Any, Any]:
    token_heads = fitted_heads(family, name, "sdpa", dtype_of(name))
    return token_heads.backbone.model, heads.TreeDecoding(token_heads, TREE, **options)


@pytest.mark.parametrize("name", [*HYBRIDS, "kimi_linear", "bamba", "jamba"])
def test_text_is_generates(name):
    model, decoding = decoding_of(name)
    plain, ours = both(model, decoding, random_tokens(1, 5, seed=50), eos_token_id=None, pad_token_id=PAD)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.stats.tokens_per_pass > 1.2, "equality shows too little where nothing is accepted"
    plain, ours = both(model, decoding, **{**ASKED, "do_sample": True, "temperature": 0.8})
    assert torch.equal(ours.sequences, plain.sequences)


@covering(name=HYBRIDS, family=["medusa", "gru", "eagle", "dynamo"])
def test_every_family(name, family):
    token_heads = make_heads(family, Backbone(shared_model(name, "sdpa", dtype_of(name))))
    tokens_BT, mask_BT = PADDED
    asked = {"attention_mask": mask_BT, "max_new_tokens": 12}  # rows end at different times
    plain, ours = both(token_heads.backbone.model, heads.TreeDecoding(token_heads, TREE), tokens_BT, **asked)
    assert torch.equal(ours.sequences, plain.sequences)


def test_a_dynamic_tree_has_levels_of_its_own_in_each_row():
    token_heads = fitted_heads("grounded", "qwen3_5", "sdpa", torch.float32)
    decoding = heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=8))
    tokens_BT, mask_BT = PADDED
    plain, ours = both(token_heads.backbone.model, decoding, tokens_BT, attention_mask=mask_BT, **ASKED)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize(("name", "draft"), [("qwen3_5", "qwen3_5"), ("nemotron_h", "llama"), ("llama", "falcon_h1")])
def test_draft_models(name, draft):
    """A hybrid model as the backbone, as the draft and as both; its own copy with noise accepts and rejects."""
    model, draft_model = (tiny_model(n, attn="sdpa", dtype=torch.float32) for n in (name, draft))
    with torch.no_grad():
        for parameter in draft_model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    decoding = heads.DraftModelDecoding(draft_model, k=4, lookup=3)
    tokens_BT, mask_BT = PADDED
    plain, ours = both(model, decoding, tokens_BT, attention_mask=mask_BT, **ASKED)
    assert torch.equal(ours.sequences, plain.sequences)
    if name == draft:
        assert ours.stats.tokens_per_pass > 1.5


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_kept_caches(name):
    """Turns that go on from the last text read what is new, and an edited one is read from its beginning."""
    model, decoding = decoding_of(name, keep_caches=True)
    text, read = random_tokens(1, 9, seed=50), []
    for turn in range(3):
        plain, ours = both(model, decoding, text, attention_mask=torch.ones_like(text), **ASKED)
        assert torch.equal(ours.sequences, plain.sequences), turn
        read.append(ours.stats.prompt_tokens)
        text = torch.cat([ours.sequences, random_tokens(1, 4, seed=60 + turn)], dim=1)
    assert read == [9, 5, 5]
    edited = torch.cat([text[:, :12], random_tokens(1, 5, seed=7)], dim=1)
    plain, ours = both(model, decoding, edited, attention_mask=torch.ones_like(edited), **ASKED)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.stats.prompt_tokens == 17


def test_the_returned_cache_goes_on():
    model, decoding = decoding_of("falcon_h1")
    _, ours = both(model, decoding, **ASKED)
    asked = {**ASKED, "attention_mask": torch.ones_like(ours.sequences)}
    again = model.generate(ours.sequences, past_key_values=ours.past_key_values, **asked)
    assert torch.equal(again, model.generate(ours.sequences, **asked))


def test_what_cannot_be_kept_is_refused():
    """Nemotron-H's steps do not hold time steps above its limit, and its forward over a whole text does."""
    token_heads = make_heads("medusa", Backbone(shared_model("nemotron_h", "sdpa", torch.float32)))
    with pytest.raises(ValueError, match=r"one-token steps of NemotronHForCausalLM give logits that differ by .*e-0"):
        heads.TreeDecoding(token_heads, keep_caches=True)
    hybrid = shared_model("lfm2", "sdpa")
    with pytest.raises(ValueError, match="Lfm2ForCausalLM as the draft model"):
        heads.DraftModelDecoding(hybrid, keep_caches=True)
    with pytest.raises(ValueError, match="recurrent layers"):
        heads.TreeDecoding(make_heads("medusa", Backbone(hybrid)), compile=True)

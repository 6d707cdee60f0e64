"""Long prompts are read in chunks: the states are those of one pass, and nothing grows with the prompt's square.

The plain reference is `Backbone.prefill`, one pass over the whole prompt. Chunks of a few tokens stand for those
of 1024; one test reads 8192 tokens as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backbone_passes import reads
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import PAD, left_padded, random_tokens, shared_model, tiny_model

import heads
from heads.backbone import model as backbone_module
from heads.backbone.cache import GROWTH_SLOTS, TreeCacheLayer
from heads.backbone.masks import MaskStyle
from heads.backbone.model import PREFILL_TOKENS, Backbone, CommitPlan

NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
NAMES = ["llama", "gpt_neox", "codegen", "mistral_windowed", "gemma3", "qwen3_windowed"]
# CodeGen's eager softmax is a float32 one over rows of another length (tests/heads/backbone/test_backbone.py).
TOLERANCE = {"codegen": 1e-4}


def backbone_of(name: str) -> Backbone:
    return Backbone(shared_model(name, "eager" if name == "codegen" else "sdpa", torch.float64))


# Heads with keys and values of their own meet windows in chunks that cross them.
@covering(
    family=FAMILIES,
    name=NAMES,
    chunk=[1, 5, 7, 21, 64],
    repeats=3,
    always=lambda family, name, chunk: family in ("kv", "eagle") and name == "mistral_windowed",
)
@torch.no_grad()
def test_chunks_leave_the_states_of_one_pass(family, name, chunk):
    """Rows of 3, 21 and 9 tokens: whole chunks of some rows are padding."""
    token_heads = make_heads(family, backbone_of(name))
    backbone = token_heads.backbone
    tokens, mask = left_padded([random_tokens(n, seed=n).tolist() for n in (3, 21, 9)])
    valid = mask.bool()
    heads_state = None

    def commit(output: Any, plan: CommitPlan) -> None:
        nonlocal heads_state
        heads_state = token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)

    with reads(backbone) as seen:
        state, last = backbone.read(tokens, valid, token_heads.taps, commit=commit, chunk=chunk)
    assert seen == [min(chunk, 21 - start) for start in range(0, 21, chunk)]
    whole, output = backbone.prefill(tokens, valid, token_heads.taps)
    plan = CommitPlan.whole(valid)
    whole_heads = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)

    close = {"atol": TOLERANCE.get(name, 1e-9), "rtol": 0.0}
    torch.testing.assert_close(last.final_BND[:, -1], output.final_BND[:, -1], **close)
    for mine, theirs in zip(state.cache.layers, whole.cache.layers, strict=True):
        where = valid[:, None, :, None]
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(a[:, :, :21] * where, b[:, :, :21] * where, **close)
    assert torch.equal(state.valid_BS, whole.valid_BS)
    assert torch.equal(state.positions_BS[valid], whole.positions_BS[valid])
    assert torch.equal(state.next_position_B, whole.next_position_B)
    level, whole_level = token_heads.first_level(heads_state), token_heads.first_level(whole_heads)
    roots, rows = random_tokens(3, seed=9), torch.arange(3)
    for k in (1, 2):
        hidden, level = token_heads.step(k, level, roots, rows)
        wanted, whole_level = token_heads.step(k, whole_level, roots, rows)
        torch.testing.assert_close(hidden, wanted, **close)


@covering(family=FAMILIES, name=["llama", "mistral_windowed", "gemma3"])
def test_text_behind_chunks_is_generates(family, name, monkeypatch):
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", 5)
    token_heads = fitted_heads(family, name)
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads, TREE)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 23, 9)])
    for prompt, valid in ((tokens, mask), (tokens[1:2], mask[1:2])):
        plain = plain_generate(model, prompt, attention_mask=valid, max_new_tokens=12, **NO_EOS)
        with reads(token_heads.backbone) as seen:
            ours = model.generate(prompt, attention_mask=valid, max_new_tokens=12, custom_generate=decoding, **NO_EOS)
        assert torch.equal(ours, plain)
        assert seen[:5] == [5, 5, 5, 5, 3]


def test_dynamic_decoding_reads_in_chunks_too(monkeypatch):
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", 5)
    token_heads = fitted_heads("dynamo", "llama", num_heads=2)
    model, tokens = token_heads.backbone.model, random_tokens(1, 13, seed=3)
    texts = []
    for size in (5, 100):
        monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", size)
        decoding = heads.DynamicDecoding(token_heads, threshold=0.0)
        with reads(token_heads.backbone) as seen:
            texts.append(model.generate(tokens, max_new_tokens=12, custom_generate=decoding, **NO_EOS))
        assert seen[0] == min(size, 13)
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "mistral_windowed"])
def test_eight_thousand_tokens(name, monkeypatch):
    """Text is generate's, no mask has more than 1024 rows, and logits are computed where a token is chosen only.

    In float32 and with two layers, since plain generate itself takes seconds here; no two best logits are near.
    """
    length = 8192
    model = tiny_model(name, attn="sdpa", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=length + 64)
    token_heads = make_heads("dynamo", Backbone(model), num_heads=2)
    masks: list[tuple[int, ...]] = []
    projected: list[int] = []
    finish, logits = MaskStyle.finish, Backbone.logits

    def counted_finish(self: MaskStyle, may_attend_BQS: Any, *arguments: Any) -> Any:
        masks.append(tuple(may_attend_BQS.shape))
        return finish(self, may_attend_BQS, *arguments)

    def counted_logits(self: Backbone, final_ND: Any) -> Any:
        projected.append(final_ND.flatten(0, -2).shape[0])
        return logits(self, final_ND)

    monkeypatch.setattr(MaskStyle, "finish", counted_finish)
    monkeypatch.setattr(Backbone, "logits", counted_logits)
    tokens = random_tokens(1, length, seed=1)
    plain = model.generate(tokens, max_new_tokens=8, **NO_EOS)
    decoding = heads.TreeDecoding(token_heads, [[0], [0, 0]], lookup=0)
    ours = model.generate(tokens, max_new_tokens=8, custom_generate=decoding, **NO_EOS)
    assert torch.equal(ours, plain)
    assert max(rows for _, rows, _ in masks) == PREFILL_TOKENS
    assert max(columns for _, _, columns in masks) >= length, "the last chunk saw the whole prompt"
    assert projected[0] == 1
    assert max(projected) == decoding.tree.num_nodes


# --- the cache's room ------------------------------------------------------------------------------------------------


def test_a_prompts_room_is_made_at_once():
    backbone = backbone_of("llama")
    tokens = random_tokens(1, 300, seed=2)
    with torch.no_grad():
        state, _ = backbone.read(tokens, torch.ones_like(tokens).bool(), chunk=20)
    assert {layer.keys.shape[-2] for layer in state.cache.layers} == {300 + GROWTH_SLOTS}


def test_buffers_grow_by_half_and_copy_each_slot_twice_on_average():
    layer, copied, room = TreeCacheLayer(), 0, []
    for _ in range(5000):
        one = torch.ones(1, 1, 1, 1)
        before = layer.keys.shape[-2] if layer.is_initialized else 0
        layer.update(one, one)
        layer.commit(None, 1)
        if layer.keys.shape[-2] != before:
            copied += before
            room.append(layer.keys.shape[-2])
        assert layer.keys.shape[-2] <= 1.5 * layer.length + GROWTH_SLOTS + 1
    assert len(room) < 10
    assert copied <= 2 * 5000
    assert layer.keys[0, 0, :5000].eq(1).all()

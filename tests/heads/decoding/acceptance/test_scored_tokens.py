"""Decoding with heads that score a part of the vocabulary: text is `generate`'s, other tokens included; drafts are ids.

That rejection stays lossless is enumerated in test_lossless.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import PAD, random_tokens, shared_model
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.proposers.static_tree import SampledTreeIndex, best_tokens, sample_tree
from heads.decoding.trees.dynamic import offer
from heads.evaluation.lossy.joint_picture import predict_two
from heads.tuning.acceptance_rates import count_passes
from heads.tuning.replay import NEVER, RANKS, pad_left, replay, write_texts
from heads.tuning.timing import PassTimer

FEW = tuple(range(1, 29, 2))
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0], [2], [2, 0]])
PROMPTS = [random_tokens(1, 5, seed=50), random_tokens(1, 5, seed=51), random_tokens(1, 17, seed=2)]


def few_heads(family: str, name: str = "llama") -> Any:
    return fitted_heads(family, name, draft_tokens=FEW)


@covering(family=FAMILIES, tree=[TREE, heads.DynamicTree(nodes=12)])
def test_greedy_text_is_generates_and_holds_tokens_that_are_not_scored(family, tree):
    token_heads = few_heads(family)
    model, accepted, outside = token_heads.backbone.model, 0, 0
    for tokens in PROMPTS:
        options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **NO_EOS}
        plain = plain_generate(model, tokens, **options).sequences
        for rule in ("exact", "rejection") if tree is TREE else ("exact",):
            decoding = heads.TreeDecoding(token_heads, tree, lookup=0, rule=rule)
            out = model.generate(tokens, custom_generate=decoding, **options)
            assert torch.equal(out.sequences, plain)
        drafted = torch.tensor(out.stats.drafted[0])
        new = out.sequences[0, tokens.shape[1] :]
        assert torch.isin(new[drafted], torch.tensor(FEW)).all()
        accepted += int(drafted.sum())
        outside += int((~torch.isin(new, torch.tensor(FEW))).sum())
    assert accepted > 3, "drafts were accepted"
    assert outside > 3, "and tokens emitted that no head can draft"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_candidates_are_the_best_of_the_scored_tokens(family):
    """Static, dynamic and sampled drafts against full heads whose other logits are forbidden."""
    full = make_heads(family, Backbone(shared_model("llama", "sdpa")), num_heads=2)
    few = heads.prune_vocabulary(full, FEW)
    h = torch.randn(6, full.backbone.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    forbidden = torch.ones(len(full.backbone.projection.weight), dtype=torch.bool)
    forbidden[list(FEW)] = False
    logits = full.projection(2)(h).masked_fill(forbidden, -torch.inf)
    for count in (1, 4, 99):
        wanted = logits.argsort(dim=1, descending=True)[:, : min(count, len(FEW))]
        assert torch.equal(best_tokens(few.projection(2), h, count), wanted)
    log_probs, tokens = offer(few.projection(2), h, 4, batch=2)
    assert torch.equal(tokens.view(6, 4), logits.argsort(dim=1, descending=True)[:, :4])
    # Sums of 14 terms in another order.
    torch.testing.assert_close(log_probs, logits.log_softmax(dim=1).gather(1, tokens.view(6, 4)).view(2, 3, 4))


@pytest.mark.parametrize("family", ["medusa", "own_output"])
@torch.no_grad()
def test_q_is_a_distribution_over_the_scored_tokens(family):
    token_heads = few_heads(family)
    tokens_BT = random_tokens(2, 6, seed=7)
    valid = torch.ones_like(tokens_BT, dtype=torch.bool)
    _, output = token_heads.backbone.prefill(tokens_BT, valid, token_heads.taps)
    plan = CommitPlan.whole(valid)
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    index = SampledTreeIndex(TREE, 2, "cpu", grounded=token_heads.grounded)
    projections, cool = [token_heads.projection(k) for k in (1, 2, 3)], TemperatureLogitsWarper(0.7)
    drafted, q = sample_tree(
        token_heads, projections, state, tokens_BT[:, -1], index, LogitsProcessorList([cool]), torch.Generator()
    )
    assert q.shape[-1] == token_heads.backbone.vocab_size
    outside = torch.ones(q.shape[-1], dtype=torch.bool)
    outside[list(FEW)] = False
    assert q[..., outside].eq(0).all()
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(q.shape[:2]))
    for row, node in [(row, node) for row in (0, 1) for node in range(1, TREE.num_nodes)]:
        assert q[row, index.sampled_from[node], drafted[row, node]] > 0, "drafts are ids of the whole vocabulary"


@pytest.mark.parametrize("family", ["medusa", "dynamo", "kv"])
def test_dynamic_decoding_draws_from_the_scored_tokens(family):
    token_heads = few_heads(family)
    model, tokens = token_heads.backbone.model, PROMPTS[0]
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **NO_EOS}
    one = model.generate(tokens, custom_generate=heads.DynamicDecoding(token_heads, threshold=1.0), **options)
    assert torch.equal(one.sequences, model.generate(tokens, **options).sequences)
    penalised = {**options, "repetition_penalty": 1.2}  # reads logits at the text's own tokens
    every = model.generate(tokens, custom_generate=heads.DynamicDecoding(token_heads, threshold=0.0), **penalised)
    drafted = torch.tensor(every.stats.drafted[0])
    assert int(drafted.sum()) == 24 * 3 // 4
    assert torch.isin(every.sequences[0, tokens.shape[1] :][drafted], torch.tensor(FEW)).all()
    assert torch.isin(predict_two(token_heads, tokens)[1].tokens_Bk, torch.tensor(FEW)).all()


def test_a_rank_beyond_the_scored_tokens_is_refused():
    token_heads = make_heads("medusa", Backbone(shared_model("llama", "sdpa")), draft_tokens=[4, 5, 6])
    heads.TreeDecoding(token_heads, [[2]])
    assert max(rank for path in heads.TreeDecoding(token_heads, 16).tree.paths for rank in path) == 2
    with pytest.raises(ValueError, match="asks for rank 3 but the heads score 3 tokens"):
        heads.TreeDecoding(token_heads, [[3]])


@pytest.mark.parametrize("family", ["grounded", "medusa"])
def test_replay_for_tuning_is_what_decoding_accepts(family):
    """Tokens per pass of a tree by replay and by decoding; a token that is not scored has no rank."""
    token_heads = few_heads(family)
    options = {"max_new_tokens": 24, "do_sample": False}
    (texts,) = write_texts(token_heads.backbone.model, PROMPTS, options, rows=3, advance=lambda: None)
    found = replay(token_heads, texts, widths=[4], nodes=8, advance=lambda: None)
    prompt = pad_left(PROMPTS)[0].shape[1]
    outside = ~torch.isin(texts.tokens_BL[:, prompt + 1 :], torch.tensor(FEW))
    assert outside.any()
    for row, one in enumerate(found):
        here = outside[row, : len(one.ranks_PK)].numpy()
        assert (one.ranks_PK[here, 0] == RANKS).all()
        assert (one.ranks_PK[~here, 0] < RANKS).any()
        accepted = (one.dynamic[4][:, -1] < 8).sum(axis=1)
        decoding = heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=8), lookup=0)
        out = token_heads.backbone.model.generate(
            PROMPTS[row], custom_generate=decoding, return_dict_in_generate=True, **options
        )
        assert count_passes(accepted) == out.stats.row_passes - 1, "the prompt's pass is left out"
    assert any((one.dynamic[4] != NEVER).any() for one in found)


def test_the_parts_of_a_pass_are_timed():
    token_heads = make_heads("grounded", Backbone(shared_model("llama", "sdpa")), draft_tokens=FEW)
    bench = PassTimer(token_heads, random_tokens(1, 9), lambda: 0.0, {"do_sample": False})
    assert bench.step(2, 4)() == 0.0
    assert bench.grow(2, 4)() == 0.0

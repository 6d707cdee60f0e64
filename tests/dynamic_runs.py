"""Dynamic decoding of tiny models: how tests run it, and what statistics have to add up to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from plain_joint import DenseTable
from throwaway_families import fitted_heads
from tiny import PAD, VOCAB, random_tokens
from torch import Tensor

from heads.backbone.model import CommitPlan
from heads.decoding.dynamo.candidates import take_candidates
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.request.output import DecodingStats
from heads.interface.token_heads import TokenHeads

NUM_HEADS = 3
PROMPT = random_tokens(1, 5, seed=50)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
NAMES = ("llama", "gpt_neox", "mistral_windowed", "gemma")
INDEPENDENT = ("medusa", "kv")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 50}


@functools.cache
def table(order: int = NUM_HEADS + 1) -> DenseTable:
    return DenseTable(VOCAB, order=order, zeros=0.0)


def decoding_of(family: str = "medusa", name: str = "llama", **options: Any) -> tuple[Any, DynamicDecoding]:
    token_heads = fitted_heads(family, name)
    return token_heads.backbone.model, DynamicDecoding(token_heads, **{"top_k": 8, **options})


def run(model: Any, decoding: Any, tokens: Tensor = PROMPT, seed: int = 0, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **NO_EOS, **options}
    torch.manual_seed(seed)
    return model.generate(tokens, custom_generate=decoding, **options)


def check_stats(stats: DecodingStats, sequences: Tensor, prompt_length: int) -> None:
    """The counts agree with one another and with the text."""
    emitted = [len(row) for row in stats.drafted]
    assert stats.tokens == sum(emitted)
    assert max(emitted) == sequences.shape[1] - prompt_length
    drafted = sum(sum(row) for row in stats.drafted)
    assert drafted == sum(stats.accepted_per_depth)
    assert stats.row_passes == stats.tokens - drafted, "each pass of a row begins with a token of the backbone's own"
    assert sorted(stats.accepted_per_depth, reverse=True) == stats.accepted_per_depth
    assert stats.tokens_per_pass == pytest.approx(stats.tokens / stats.row_passes, rel=1e-12)
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert all(row[0] is False for row in stats.drafted)


def orders_of(stats: DecodingStats) -> list[list[int]]:
    """The tokens of each pass, row by row: a pass begins where a token is not the heads'."""
    orders = []
    for row in stats.drafted:
        starts = [i for i, drafted in enumerate(row) if not drafted]
        orders.append([b - a for a, b in itertools.pairwise([*starts, len(row)])])
    return orders


@torch.no_grad()
def first_places(token_heads: TokenHeads, tokens: Tensor) -> list[Any]:
    """The candidates of the first pass over a prompt, without processors."""
    backbone, valid = token_heads.backbone, torch.ones_like(tokens, dtype=torch.bool)
    _, output = backbone.prefill(tokens, valid, token_heads.taps)
    plan = CommitPlan.whole(valid)
    state = token_heads.commit(None, tokens, output.taps, output.positions_BN, plan)
    logits, level = [backbone.logits(output.final_BND[:, -1])], token_heads.first_level(state)
    for k in range(1, token_heads.num_heads + 1):
        hidden_BD, level = token_heads.step(k, level, tokens[:, -1], torch.arange(len(tokens)))
        logits.append(token_heads.projection(k)(hidden_BD))
    return [take_candidates(torch.softmax(x.float(), dim=1), 8) for x in logits]

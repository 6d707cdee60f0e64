"""Grounded heads draft through levels that keep what was read; `head` on whole paths is the plain reference."""

from __future__ import annotations

import pytest
import torch
from tiny import random_tokens, shared_model

import heads
from heads.interface import PositionWiseHeads


@pytest.mark.parametrize("normalize", [True, False])
def test_levels_give_what_the_head_gives_on_whole_paths(normalize):
    token_heads = heads.create("grounded", shared_model("llama"), num_heads=3, normalize_embeddings=normalize).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    state = torch.randn(2, 32, generator=generator, dtype=torch.float64)
    parents = [torch.tensor([0, 1]), torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1, 1])]
    fast, plain = token_heads.first_level(state), PositionWiseHeads.first_level(token_heads, state)
    for k, parents_M in enumerate(parents, start=1):
        tokens_M = random_tokens(len(parents_M), seed=k)
        hidden_MD, fast = token_heads.step(k, fast, tokens_M, parents_M)
        expected_MD, plain = PositionWiseHeads.step(token_heads, k, plain, tokens_M, parents_M)
        assert torch.equal(hidden_MD, expected_MD)  # the same operations on the same numbers

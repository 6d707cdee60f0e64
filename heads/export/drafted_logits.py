"""Compare the logits that two sets of heads draft after the same random texts, as every export is checked."""
# B row, T position, V scored token, D model width

from __future__ import annotations

import torch
from torch import Tensor

from heads.backbone.model import CommitPlan
from heads.interface.token_heads import TokenHeads

ROWS, TOKENS = 2, 12
"""Random texts that both heads draft after."""


@torch.no_grad()
def largest_difference(one: TokenHeads, other: TokenHeads) -> float:
    """The largest difference of the logits that two sets of heads draft as in decoding; inf if their shapes differ."""
    if one.num_heads != other.num_heads:
        return float("inf")
    pairs = zip(drafted_logits(one), drafted_logits(other), strict=True)
    return max(float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs)


@torch.no_grad()
def largest_logit(token_heads: TokenHeads) -> float:
    return max(float(logits_BV.abs().max()) for logits_BV in drafted_logits(token_heads))


@torch.no_grad()
def drafted_logits(token_heads: TokenHeads) -> list[Tensor]:
    """(B, V) of each head after ROWS random texts, along random drafted tokens."""
    backbone = token_heads.backbone
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, TOKENS + token_heads.num_heads)
    tokens_BT = torch.randint(backbone.vocab_size, shape, generator=generator).to(backbone.device)
    valid_BT = torch.ones(ROWS, TOKENS, dtype=torch.bool, device=backbone.device)
    _, output = backbone.prefill(tokens_BT[:, :TOKENS], valid_BT, token_heads.taps)
    plan = CommitPlan.whole(valid_BT)
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    level, rows_B = token_heads.first_level(state), torch.arange(ROWS, device=backbone.device)
    logits = []
    for k in range(1, token_heads.num_heads + 1):
        hidden_BD, level = token_heads.step(k, level, tokens_BT[:, TOKENS + k - 1], rows_B)
        logits.append(token_heads.projection(k)(hidden_BD))
    return logits

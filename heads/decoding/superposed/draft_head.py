"""A grounded head that scores what follows each draft's own newest token, beside the superposed distribution.

The backbone reads one superposed embedding for each prompt, so p_θ does not depend on the draft that is extended. The
paper's n-grams do, by counts. So does head 1 of grounded heads, without stored counts: it reads the last state f before
the superposed slot together with the draft's newest token.

    p_θ(x | M, x̃)^(1 − β) · p_head(x | f, x_{t−1}^i)^β       replaces p_θ in equation 6, both at temperature τ

This goes beyond the paper; docs/decisions.md says what it gains.
"""
# R prompt that still runs, K draft, M candidate token, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.backbone.model import CommitPlan, Pass, Tap
from heads.backbone.state import StackTap
from heads.decoding.request.entry import check_token_heads
from heads.decoding.superposed.step import log_probabilities
from heads.interface.representation import PositionWiseHeads
from heads.interface.token_heads import TokenHeads


class DraftHead:
    """Head 1 in one `generate` call, with its state after the last committed slot."""

    def __init__(self, token_heads: TokenHeads, weight: float, temperature: float) -> None:
        self.token_heads, self.weight, self.temperature = token_heads, weight, temperature
        self.taps: tuple[Tap, ...] = token_heads.taps
        self.projection = token_heads.projection(1)
        self.state: Any = None

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        self.state = self.token_heads.commit(self.state, output.tokens_BN, output.taps, output.positions_BN, plan)

    def keep_rows(self, rows_R: Tensor) -> None:
        self.state = self.token_heads.keep_rows(self.state, rows_R)

    def log_p(self, newest_RK: Tensor) -> Tensor:
        """(R, K, V): log p_head after each draft's newest token, which must not be committed yet."""
        rows, drafts = newest_RK.shape
        parents_N = torch.arange(rows, device=newest_RK.device).repeat_interleave(drafts)
        hidden_ND, _ = self.token_heads.step(
            1, self.token_heads.first_level(self.state), newest_RK.flatten(), parents_N
        )
        return log_probabilities(self.projection(hidden_ND), self.temperature).view(rows, drafts, -1)

    def mix(self, log_p_RKM: Tensor, tokens_RKM: Tensor, head_RKV: Tensor) -> Tensor:
        """(R, K, M): the candidates' log p_θ and log p_head, weighted by 1 − β and β and added."""
        return (1 - self.weight) * log_p_RKM + self.weight * head_RKV.gather(2, tokens_RKM)


def check_grounded(token_heads: Any) -> None:
    """
    Raises:
        ValueError: no heads, heads of a family that does not read the newest token beside a state of the backbone, or
            heads with prefix layers or a draft vocabulary.
    """
    check_token_heads(token_heads)
    if not (token_heads.grounded and isinstance(token_heads, PositionWiseHeads)):
        raise ValueError(
            f"Heads of the family {token_heads.family!r} were given, which do not tell drafts apart by their newest "
            f"token and a state of the backbone; give grounded heads, or leave token_heads out."
        )
    if token_heads.draft_vocabulary is not None or any(isinstance(tap, StackTap) for tap in token_heads.taps):
        raise ValueError(
            "Heads with a draft vocabulary or with prefix layers were given, and superposed decoding asks the first "
            "head for any token after any state; give grounded heads without either, or leave token_heads out."
        )

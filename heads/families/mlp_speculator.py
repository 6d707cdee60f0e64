"""MLP speculator heads: a recurrent state that reads the drafted tokens one by one (Wertheimer et al., 2024).

    s_0 = f, or f / (√2 rms(f)) where `scale_input` is set
    s_k = GELU(N_k(α P_k s_{k-1} + β √(W / 2) E_k(x_{t+k})))         logits_k = U_k s_k
    α = 2^(-1 / 2K)     β = √(1 - α²): after K heads the backbone's state makes up half of the sum

f is the final hidden state at t; E_k are embeddings of the heads' own, P_k is linear, N_k an RMS norm with scale and
shift. With `tie_weights` all heads share E, U, N and, but for the first, P. Unlike `gru`'s, the state need not have the
backbone's width, and every head may have weights of its own.

Source: "Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv:2404.19124), and IBM's
fms_extras/models/speculator.py, whose released heads `headway import` reads.
"""
# B batch, T position, N = B·T, R row, M tree node, D model width, W width of the state, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.interface.representation import PositionWiseHeads
from heads.interface.token_heads import HeadsConfig, TeacherForcing
from heads.validation import validated, within

EPS = 1e-6


@validated
@dataclass(kw_only=True)
class Config(HeadsConfig):
    """Fields of `mlp_speculator` heads.

    Attributes:
        inner_width: width of the state, in units; the backbone's hidden size where it is not given.
        tie_weights: all heads share embedding, unembedding and norm, and all but the first share P.
        scale_input: the final hidden state is scaled to a root mean square of 1 / √2.
    """

    inner_width: int | None = within(1, 1 << 17, default=None, advice="the widest backbones have 16384")
    tie_weights: bool = False
    scale_input: bool = False


class ShiftedNorm(nn.Module):
    """x / rms(x) · w + b, rounded to x's dtype before w, as the original does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_RW: Tensor) -> Tensor:
        return self.weight * scaled(x_RW) + self.bias


def scaled(x_RW: Tensor) -> Tensor:
    """x / rms(x)."""
    return nn.functional.rms_norm(x_RW, x_RW.shape[-1:], eps=EPS)


class Heads(PositionWiseHeads):
    """K heads; head k's state is computed from head k - 1's."""

    grounded = True
    tap = "final"
    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        width, vocab = config.inner_width or backbone.hidden_size, len(backbone.projection.weight)
        sets = 1 if config.tie_weights else config.num_heads
        transitions = min(config.num_heads, 2) if config.tie_weights else config.num_heads
        self.embeddings = nn.ParameterList(started(vocab, width, width) for _ in range(sets))
        self.transitions = nn.ParameterList(
            started(width, width if i else backbone.hidden_size, width) for i in range(transitions)
        )
        self.norms = nn.ModuleList(ShiftedNorm(width) for _ in range(sets))
        scored = config.draft_vocabulary or vocab
        self.unembeddings = nn.ParameterList(started(scored, width, width) for _ in range(sets))
        self.state_share = 0.5 ** (0.5 / config.num_heads)
        self.token_share = math.sqrt(1 - self.state_share**2) * math.sqrt(width / 2)

    def projection(self, k: int) -> Projection:
        return self.scored(self.backbone.projection.with_weight(self.unembeddings[self.place(k)]))

    def place(self, k: int) -> int:
        return 0 if self.config.tie_weights else k - 1

    def start(self, tap_RD: Tensor) -> Tensor:
        """s_0."""
        return scaled(tap_RD) / math.sqrt(2) if self.config.scale_input else tap_RD

    def advance(self, k: int, state_RW: Tensor, tokens_R: Tensor) -> Tensor:
        """s_k from s_{k-1} and the tokens x_{t+k}."""
        transition = self.transitions[min(k - 1, len(self.transitions) - 1)]
        token_RW = nn.functional.embedding(tokens_R, self.embeddings[self.place(k)]) * self.token_share
        summed_RW = nn.functional.linear(state_RW, transition) * self.state_share + token_RW
        return nn.functional.gelu(self.norms[self.place(k)](summed_RW))

    def head(self, k: int, tap_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
        """The reference form: a path's tokens one after another."""
        state_RW = self.start(tap_RD)
        for i, tokens_R in enumerate(tokens_Rk.unbind(1), start=1):
            state_RW = self.advance(i, state_RW, tokens_R)
        return state_RW

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        """All positions go on by one token for each head, as `gru`'s do: s_k at n reads the token at n + k."""
        state_NW, tokens_N = self.start(batch.taps[self.tap].flatten(0, 1)), batch.tokens_BT.flatten()
        for k in range(1, self.num_heads + 1):
            state_NW = self.advance(k, state_NW[:-1], tokens_N[k:])
            yield state_NW[batch.rows[k - 1]]

    def first_level(self, state: Tensor) -> Tensor:
        return self.start(state)

    def step(self, k: int, level: Tensor, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenHeads.step`; a level holds the nodes' states."""
        state_MW = self.advance(k, level.index_select(0, parents_M), tokens_M)
        return state_MW, state_MW


def started(rows: int, columns: int, width: int) -> nn.Parameter:
    """Random weights with the original's standard deviation, 1 / √W."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(rows, columns), std=width**-0.5))

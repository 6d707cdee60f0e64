"""Recurrent heads: one GRU cell that reads the drafted tokens one after another (Ankner et al., section 5.3.4).

              E(x_{t+1})     E(x_{t+2})     E(x_{t+3})
                  ↓              ↓              ↓
f(x_≤t) = h_0 ─ cell ── h_1 ─ cell ── h_2 ─ cell ── h_3        head k's hidden state is h_k; it predicts x_{t+1+k}

All heads share the cell. With the backbone's unembedding no parameter belongs to a single head, so such heads can draft
deeper than the K tokens they were trained on. Each further level of a tree costs one call of the cell.
"""
# B batch, T position, N = B·T, R row, M tree node, D model width, G = 3·D gates

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.interface.layers import Unembedding, Unembeddings, embed
from heads.interface.representation import RepresentationConfig, RepresentationHeads
from heads.interface.token_heads import MAX_HEADS, TeacherForcing
from heads.validation import validated

RESET_BIAS, UPDATE_BIAS = 2.0, -1.0
"""Biases of the gates at the start: σ(2) = 88 % of the state enters the candidate, σ(-1) = 27 % of it is copied."""


@validated
@dataclass(kw_only=True)
class Config(RepresentationConfig):
    """Fields of `gru` heads, beside those of every family that reads f.

    Attributes:
        normalize_embeddings: scale each token's embedding to a root mean square of 1, as for `grounded`.
        unembedding: "own" (one a head, started from the backbone's) or "shared" (the backbone's; such heads can draft
            deeper than they were trained).
    """

    normalize_embeddings: bool = True
    unembedding: Unembedding = "own"


class Heads(RepresentationHeads):
    """K heads that share one GRU cell."""

    grounded = True
    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.cell = starting_cell(backbone.hidden_size)
        self.unembeddings = Unembeddings(config.unembedding, config.num_heads, backbone, config.draft_vocabulary)

    @property
    def max_depth(self) -> int:
        return self.num_heads if self.config.unembedding == "own" else MAX_HEADS

    def projection(self, k: int) -> Projection:
        return self.scored(self.unembeddings.projection(k, self.backbone))

    def head(self, k: int, tap_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
        """The reference form: the cell reads a path's tokens one after another."""
        hidden_RD = tap_RD
        for tokens_R in tokens_Rk.unbind(1):
            hidden_RD = self.cell(self.read(tokens_R, hidden_RD.dtype), hidden_RD)
        return hidden_RD

    def heads_on(self, f_BTD: Tensor, batch: TeacherForcing) -> Iterator[Tensor]:
        """All positions take one step of the cell for each head, and each token's part of the gates is computed once.

        position n       0       1       2       3        h_k at n reads the token at n + k, so each step drops the
        h_1 reads        x_1     x_2     x_3              last position. Positions that would read a token of another
        h_2 reads        x_2     x_3                      document or row are supervised rows of no head.
        """
        hidden_ND = f_BTD.flatten(0, 1)
        inputs_ND = self.read(batch.tokens_BT.flatten(), hidden_ND.dtype)
        inputs_NG = nn.functional.linear(inputs_ND, self.cell.weight_ih, self.cell.bias_ih)
        for k in range(1, self.num_heads + 1):
            hidden_ND = advance(self.cell, inputs_NG[k:], hidden_ND[:-1])
            yield hidden_ND[batch.rows[k - 1]]

    def read(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """(…,) token ids to (…, D)."""
        return embed(self.backbone, tokens, dtype, normalize=self.config.normalize_embeddings)

    def first_level(self, state: Tensor) -> Tensor:
        return state

    def step(self, k: int, level: Tensor, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenHeads.step`, for any k; a level holds the nodes' h."""
        hidden_MD = self.cell(self.read(tokens_M, level.dtype), level.index_select(0, parents_M))
        return hidden_MD, hidden_MD


def starting_cell(width: int) -> nn.GRUCell:
    """A cell that ignores its input at the start of training: h' = z h + (1 - z) tanh(r h), with r and z constant.

    So every unit of a head's hidden state starts as a squashed unit of f, which unembeddings can read.
    """
    cell = nn.GRUCell(width, width)
    reset, update, new = (slice(gate * width, (gate + 1) * width) for gate in range(3))  # PyTorch's order
    for parameter in cell.parameters():
        nn.init.zeros_(parameter)
    nn.init.constant_(cell.bias_ih[reset], RESET_BIAS)
    nn.init.constant_(cell.bias_ih[update], UPDATE_BIAS)
    nn.init.eye_(cell.weight_hh[new])
    return cell


def advance(cell: nn.GRUCell, inputs_RG: Tensor, hidden_RD: Tensor) -> Tensor:
    """`cell(x, h)`, given W_ih x + b_ih."""
    reset_x, update_x, new_x = inputs_RG.chunk(3, dim=1)
    reset_h, update_h, new_h = nn.functional.linear(hidden_RD, cell.weight_hh, cell.bias_hh).chunk(3, dim=1)
    new_RD = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new_RD + torch.sigmoid(update_x + update_h) * (hidden_RD - new_RD)

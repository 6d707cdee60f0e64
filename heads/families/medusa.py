"""Medusa heads: head k is n residual blocks on the final hidden state, then an unembedding (Cai et al., 2024).

Heads do not see each other's tokens: p_k(x_{t+1+k} | x_{≤t}). The unembedding is one for each head ("own", as in
Medusa's first version and its axolotl trainer) or the backbone's ("shared", as in its second version).
"""
# R rows, D model width

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.interface.layers import ResidualBlock, Unembedding, Unembeddings
from heads.interface.representation import PositionWiseHeads
from heads.interface.token_heads import HeadsConfig
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class Config(HeadsConfig):
    """Fields of `medusa` heads.

    Attributes:
        num_blocks: residual blocks in each head, 1 to 8.
        unembedding: "own" (one a head, started from the backbone's) or "shared" (the backbone's).
    """

    num_blocks: int = within(1, 8, default=1)
    unembedding: Unembedding = "own"


class Heads(PositionWiseHeads):
    """K independent heads on the final hidden state."""

    config: Config
    tap = "final"

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        width = backbone.hidden_size
        self.bodies = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.num_blocks))) for _ in range(config.num_heads)
        )
        self.unembeddings = Unembeddings(config.unembedding, config.num_heads, backbone, config.draft_vocabulary)

    def projection(self, k: int) -> Projection:
        return self.scored(self.unembeddings.projection(k, self.backbone))

    def head(self, k: int, tap_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
        return self.bodies[k - 1](tap_RD)

    def first_level(self, state: Tensor) -> Tensor:
        return state

    def step(self, k: int, level: Tensor, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenHeads.step`; these heads read no drafted token, so a level holds the tap alone."""
        tap_MD = level.index_select(0, parents_M)
        return self.bodies[k - 1](tap_MD), tap_MD

"""Grounded heads: head k also reads the embeddings of the tokens drafted so far (Ankner et al., section 3.2).

Head k at t maps [f(x_{≤t}) ; E(x_{t+1}) ; … ; E(x_{t+k})] through an MLP to p(x_{t+1+k} | x_{≤t}, x_{t+1} … x_{t+k}).
f is the final hidden state, or another representation (heads/interface/representation.py). E is the backbone's
embedding, which gets no gradient from the heads when the backbone is frozen.
"""
# R rows, D model width, W width of the hidden layers

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.interface.layers import ResidualBlock, Unembedding, Unembeddings, embed
from heads.interface.representation import RepresentationConfig, RepresentationHeads
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class Config(RepresentationConfig):
    """Fields of `grounded` heads, beside those of every family that reads f.

    Attributes:
        num_hidden_layers: hidden layers in each head's MLP, 1 to 4.
        hidden_width: width of the hidden layers, in units; the backbone's hidden size where it is not given (the
            paper's 4096 on a 7B). At most 131072, eight times the widest backbones.
        normalize_embeddings: scale each token's embedding to a root mean square of 1. Embeddings are often many times
            smaller than final hidden states, and heads then learn to read them only slowly; false is the paper's
            literal input.
        unembedding: "own" (one a head, started from the backbone's) or "shared" (the backbone's).
        biases: the first layer's skip and own unembeddings have biases too, as in Hydra's code; the paper has none.
    """

    num_hidden_layers: int = within(1, 4, default=1)
    hidden_width: int | None = within(1, 1 << 17, default=None, advice="the widest backbones have 16384")
    normalize_embeddings: bool = True
    unembedding: Unembedding = "own"
    biases: bool = False


class GroundedMLP(nn.Module):
    """An MLP on [f ; E_1 ; … ; E_k] whose output is f at the start of training.

    The first layer's skip is a learned matrix from (k + 1)·D to W, [I 0 … 0] at the start; further layers are residual.
    """

    def __init__(self, k: int, width: int, hidden_width: int, num_hidden_layers: int, *, skip_bias: bool) -> None:
        super().__init__()
        self.skip = nn.Linear((k + 1) * width, hidden_width, bias=skip_bias)
        self.first = nn.Linear((k + 1) * width, hidden_width)
        self.rest = nn.Sequential(*(ResidualBlock(hidden_width) for _ in range(num_hidden_layers - 1)))
        self.down = nn.Identity() if hidden_width == width else nn.Linear(hidden_width, width, bias=False)
        nn.init.eye_(self.skip.weight)
        if skip_bias:
            nn.init.zeros_(self.skip.bias)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        if isinstance(self.down, nn.Linear):
            nn.init.eye_(self.down.weight)

    def forward(self, inputs_RI: Tensor) -> Tensor:
        hidden_RW = self.skip(inputs_RI) + nn.functional.silu(self.first(inputs_RI))
        for block in self.rest:
            hidden_RW = block(hidden_RW)
        output_RD: Tensor = self.down(hidden_RW)
        return output_RD


class Heads(RepresentationHeads):
    """K heads; head k reads the k tokens drafted before its own."""

    grounded = True
    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        width = backbone.hidden_size
        hidden_width = config.hidden_width or width
        self.bodies = nn.ModuleList(
            GroundedMLP(k, width, hidden_width, config.num_hidden_layers, skip_bias=config.biases)
            for k in range(1, config.num_heads + 1)
        )
        self.unembeddings = Unembeddings(
            config.unembedding, config.num_heads, backbone, config.draft_vocabulary, biases=config.biases
        )

    def projection(self, k: int) -> Projection:
        return self.scored(self.unembeddings.projection(k, self.backbone))

    def head(self, k: int, tap_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
        return self.bodies[k - 1](torch.cat([tap_RD, self.read(tokens_Rk, tap_RD.dtype).flatten(1)], dim=1))

    def read(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """(…,) token ids to (…, D)."""
        return embed(self.backbone, tokens, dtype, normalize=self.config.normalize_embeddings)

    def first_level(self, state: Tensor) -> Tensor:
        return state

    def step(self, k: int, level: Tensor, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenHeads.step`; a level holds the nodes' inputs [f ; E_1 ; … ; E_k]: each token is embedded once."""
        inputs_MI = torch.cat([level.index_select(0, parents_M), self.read(tokens_M, level.dtype)], dim=1)
        return self.bodies[k - 1](inputs_MI), inputs_MI

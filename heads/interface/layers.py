"""What families are built from: a residual block that starts as the identity, a head's unembedding, own or shared."""
# R rows, D model width, V vocabulary

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from heads.backbone.draft_vocabulary import StartedRows
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection

Unembedding = Literal["own", "shared"]


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at start: the identity (Medusa, section 2.1; b too, so that it is exact)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + nn.functional.silu(self.linear(x_RD))


class Unembeddings(StartedRows):
    """One unembedding a head, started from the backbone's; or none, where the backbone's own is shared.

    Args:
        draft_vocabulary: rows of each; they are zeros until `start_from` says which tokens they are. None: all.
    """

    def __init__(
        self, kind: Unembedding, num_heads: int, backbone: Backbone, draft_vocabulary: int | None = None
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        if kind == "own":
            start = backbone.projection
            self.weights.extend(_copy(start.weight, draft_vocabulary) for _ in range(num_heads))
            if start.bias is not None:
                self.biases.extend(_copy(start.bias, draft_vocabulary) for _ in range(num_heads))

    @torch.no_grad()
    def start_from(self, tokens_S: Tensor, backbone: Backbone) -> None:
        start = backbone.projection
        for weight_SD in self.weights:
            weight_SD.copy_(start.weight[tokens_S.to(start.weight.device)])
        for bias_S in self.biases:
            assert start.bias is not None
            bias_S.copy_(start.bias[tokens_S.to(start.bias.device)])

    def projection(self, k: int, backbone: Backbone) -> Projection:
        """Head k's record, for hidden states like the backbone's after its final norm."""
        start = backbone.projection
        if not self.weights:
            return start.without_norm()
        return start.with_weight(self.weights[k - 1], self.biases[k - 1] if self.biases else None)


def _copy(parameter: Tensor, rows: int | None) -> nn.Parameter:
    if rows is not None:
        return nn.Parameter(parameter.new_zeros(rows, *parameter.shape[1:], dtype=torch.float32))
    return nn.Parameter(parameter.detach().to(torch.float32).clone())

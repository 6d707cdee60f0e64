"""h_k = GRU(E(x), h_{k-1}), with the token's embedding at a root mean square of 1 where the heads were trained so.

It is what Headway's heads/families/gru.py computes, in plain PyTorch: tests compare the two without vLLM.
"""
# N token, D model width

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recurrence(nn.Module):
    """One step for many tokens.

    Args:
        width: of the model and of the state.
        normalize: scale each embedding to a root mean square of 1.
    """

    def __init__(self, width: int, normalize: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.normalize = normalize

    def forward(self, embedded_ND: Tensor, state_ND: Tensor) -> Tensor:
        if self.normalize:
            embedded_ND = torch.nn.functional.rms_norm(embedded_ND, embedded_ND.shape[-1:])
        return self.cell(embedded_ND.to(state_ND.dtype), state_ND)

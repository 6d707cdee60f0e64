"""Run a recurrent backbone over packed blocks with every document as a row of its own.

Masks and positions end attention at a document's border, but a recurrent layer's state, and the convolution before it,
carry over into the next document. transformers' classes do not reset them on torch's own paths, and kernels that take
borders exist on some accelerators only. So each document of a batch becomes a row, padded on the right, where padding
reaches no token that is read. A block of one document is such a row already.

    blocks   a a a b b      rows   a a a .
             b c c c c             b b . .
                                   b . . .      attention is cut at a block's border as well
                                   c c c c
"""
# B batch, T position in a block, R row, L position in a row, D model width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.backbone.model import Backbone
from heads.backbone.recurrent.mixers import find_mixers
from heads.backbone.state import HiddenTap, HiddenTaps
from heads.interface.token_heads import TokenHeads


def forward_by_rows(
    backbone: Backbone, tokens_BT: Tensor, positions_BT: Tensor, *, taps: Sequence[HiddenTap] = ()
) -> tuple[Tensor, HiddenTaps]:
    """`Backbone.forward` over packed blocks, whose documents do not influence each other.

    Args:
        positions_BT: positions within documents; each 0 begins a document.
    """
    rows_BT = (positions_BT == 0).flatten().cumsum(0).view_as(positions_BT) - 1
    num_rows, longest = int(rows_BT[-1, -1]) + 1, int(positions_BT.max()) + 1
    tokens_RL = tokens_BT.new_zeros(num_rows, longest)
    tokens_RL[rows_BT, positions_BT] = tokens_BT
    final_RLD, recorded = forward_whole_rows(backbone, tokens_RL, taps=taps)
    return final_RLD[rows_BT, positions_BT], {tap: x[rows_BT, positions_BT] for tap, x in recorded.items()}


def refuse_states_of_heads(token_heads: TokenHeads) -> None:
    """Raise ValueError where layers of heads are recurrent, since heads run on the packed blocks themselves."""
    run = (token_heads, *token_heads.borrowed)
    if token_heads.backbone.recurrence is not None and any(find_mixers(module) for module in run):
        raise ValueError(
            f"Every layer of {token_heads.backbone.name} keeps a recurrent state, and so would the heads' layers, from "
            f"one document of a block to the next; give heads without layers, such as medusa or grounded with "
            f"prefix_layers: 0, or documents that are blocks, with data.attend_across_documents: true."
        )


def forward_whole_rows(backbone: Backbone, tokens_RL: Tensor, **more: Any) -> tuple[Tensor, HiddenTaps]:
    """`Backbone.forward` over rows of one text each, which recurrent layers take without any mask."""
    positions_RL = torch.arange(tokens_RL.shape[1], device=tokens_RL.device).expand_as(tokens_RL)
    return backbone.forward(tokens_RL, attention_mask=None, position_ids=positions_RL, use_cache=False, **more)

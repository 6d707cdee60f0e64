"""4-D attention masks in the form that a backbone's attention implementation reads, sliding windows included.

A mask is built once as booleans (True: may attend), then converted: booleans for sdpa, additive floats for eager, and a
dict by layer type for models that mix full and windowed layers. Windows count positions and not cache slots, since the
cache of a tree or of a ragged batch has masked slots.
"""
# B batch, Q query, S cache slot, T position, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backbone.rounding import above, relative_error

FULL, SLIDING = "full_attention", "sliding_attention"
WITHOUT_MASK = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""Layer types that take no mask of their own: recurrent ones (in "hybrid" layers beside full attention), and layers
that look at one position alone."""
HEEDED = 0.25
"""The share of the error without mask and positions from which on a pass does not heed them. Experts that are chosen
anew, TF32 and activations quantised together move logits by more than rounding, and yet by far less."""


@dataclass(frozen=True, kw_only=True)
class MaskStyle:
    """The form of one backbone's masks.

    Attributes:
        additive: floats to add to the scores (eager) instead of booleans (sdpa, which accepts floats too).
        window: positions that a windowed layer attends to, the query's included; None where no layer has a window.
        by_layer_type: the model mixes layer types and takes a dict of masks.
    """

    additive: bool
    window: int | None
    by_layer_type: bool

    def finish(
        self, may_attend_BQS: Tensor, positions_BQ: Tensor, slot_positions_BS: Tensor, dtype: torch.dtype
    ) -> Any:
        """The mask, or the dict of masks, to pass as `attention_mask`."""
        full = self._as_input(may_attend_BQS, dtype)
        if self.window is None:
            return full
        distance_BQS = positions_BQ[:, :, None] - slot_positions_BS[:, None, :]
        windowed = self._as_input(may_attend_BQS & (distance_BQS < self.window), dtype)
        return {FULL: full, SLIDING: windowed} if self.by_layer_type else windowed

    def _as_input(self, may_attend_BQS: Tensor, dtype: torch.dtype) -> Tensor:
        mask_B1QS = may_attend_BQS[:, None]
        # On a CPU sdpa converts booleans to floats in every layer; here it is done once.
        if not self.additive and mask_B1QS.device.type != "cpu":
            return mask_B1QS
        return torch.zeros_like(mask_B1QS, dtype=dtype).masked_fill_(~mask_B1QS, torch.finfo(dtype).min)


def causal(valid_BT: Tensor) -> Tensor:
    """(B, T, T): q may attend to s where s ≤ q and s is no padding. Padding attends to itself: no row may be empty.

    >>> causal(torch.tensor([[False, True, True]]))[0].int()
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    length = valid_BT.shape[1]
    lower_TT = torch.ones(length, length, dtype=torch.bool, device=valid_BT.device).tril()
    diagonal_TT = torch.eye(length, dtype=torch.bool, device=valid_BT.device)
    return (lower_TT & valid_BT[:, None, :]) | diagonal_TT


def within_documents(document_ids_BT: Tensor) -> Tensor:
    """(B, T, T): q may attend to s where s ≤ q and both lie in one document of a packed block.

    >>> within_documents(torch.tensor([[0, 0, 1]]))[0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    return same_BTT & torch.ones_like(same_BTT[0]).tril()


def positions_within_documents(document_ids_BT: Tensor) -> Tensor:
    """(B, T): positions that restart at 0 with each document.

    >>> positions_within_documents(torch.tensor([[0, 0, 1, 1, 1]]))
    tensor([[0, 1, 0, 1, 2]])
    """
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    starts_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    first_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
    return index_T - first_BT


def read_mask_style(config: Any) -> MaskStyle:
    """The mask style of a Hugging Face config.

    Raises:
        ValueError: the attention implementation, or a layer type, cannot take the mask of a token tree.
    """
    implementation = config._attn_implementation or "eager"
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attn_implementation={implementation!r} cannot take the mask of a token tree; "
            f"load the backbone with attn_implementation='sdpa' or 'eager'."
        )
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unknown := layer_types - {FULL, SLIDING} - WITHOUT_MASK:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}, which cannot take the mask of a "
            f"token tree; choose a backbone with full or sliding attention, or a hybrid of full attention and others."
        )
    if SLIDING in layer_types and layer_types & WITHOUT_MASK:
        raise ValueError(
            f"{config.model_type} mixes sliding attention with layers of type "
            f"{', '.join(sorted(layer_types & WITHOUT_MASK))}, for which no masks are made here; choose a backbone "
            f"whose attention layers are full ones."
        )
    window = getattr(config, "sliding_window", None)
    if layer_types and SLIDING not in layer_types:
        window = None
    return MaskStyle(additive=implementation == "eager", window=window, by_layer_type=SLIDING in layer_types)


def tree_pass_error(by_tree: Callable[[Tensor, bool], Tensor], tokens_BT: Tensor, expected_BTV: Tensor) -> str:
    """What is wrong with logits from a pass over a tree; empty: nothing that mask and positions would explain.

    Args:
        by_tree: from token ids to logits by a pass over a tree that holds them as one of its paths, with or without
            its mask and positions.
        expected_BTV: the model's own.
    """
    try:
        error = relative_error(by_tree(tokens_BT, True), expected_BTV)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as raised:
        return f"it ends in the error '{raised}'"
    if not above(error, expected_BTV.dtype) or error < HEEDED * relative_error(by_tree(tokens_BT, False), expected_BTV):
        return ""
    return f"logits differ by {error:.1e} of the largest from those of the same tokens alone"

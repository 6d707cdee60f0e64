"""Run a backbone over packed blocks as if it read their documents one by one.

Attention stays within documents (unless it may cross them), positions begin at 0 in each, and recurrent layers run
document by document. With lookahead, the first layer sees one token ahead (DynaMo's T1-L2-M(-1)R).
"""
# B batch, T position

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.masks import positions_within_documents, within_documents
from heads.backbone.model import Backbone
from heads.backbone.state import HiddenTap, HiddenTaps
from train.objective.document_attention import by_layer_type, mask_by_documents
from train.objective.documents_as_rows import forward_by_rows, forward_whole_rows
from train.objective.lookahead import first_layer_sees_ahead


class PackedBackbone(nn.Module):
    """The backbone's side of what is trained.

    Args:
        backbone: the wrapped causal LM.
        trains_backbone: run it with autograd.
        lookahead: share of positions whose first layer sees one token ahead.
        attend_across_documents: let attention cross the documents of a packed block (labels never do).

    Raises:
        ValueError: lookahead was given for a backbone whose first layer is recurrent.
    """

    def __init__(
        self, backbone: Backbone, *, trains_backbone: bool, lookahead: float, attend_across_documents: bool
    ) -> None:
        super().__init__()
        if lookahead and backbone.recurrence is not None:
            raise ValueError(
                f"lookahead={lookahead} was given, and the first layer of {backbone.name} is recurrent: it has no mask "
                f"that could let it see ahead; leave lookahead out."
            )
        self.model = backbone.model
        self.backbone = backbone
        self.trains_backbone = trains_backbone
        self.lookahead = lookahead
        self.attend_across_documents = attend_across_documents
        self.attends_by_document = False  # set by `document_attention`, as the next one
        self.one_kernel = False

    def run(
        self, backbone: Backbone, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, taps: Sequence[HiddenTap] = ()
    ) -> tuple[Tensor, HiddenTaps]:
        """Backbone or teacher over packed blocks: the states after the final norm, and the taps."""
        if backbone.recurrence is None:
            return backbone.forward(
                tokens_BT, taps=taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
            )
        if self.attend_across_documents:
            return forward_whole_rows(backbone, tokens_BT, taps=taps)
        return forward_by_rows(backbone, tokens_BT, positions_BT, taps=taps)

    def attention(self, document_ids_BT: Tensor) -> tuple[Tensor, Tensor, Any]:
        """The document ids (B, T) that bound attention, positions (B, T) within these documents, and the mask."""
        attended = torch.zeros_like(document_ids_BT) if self.attend_across_documents else document_ids_BT
        positions_BT, style = positions_within_documents(attended), self.backbone.mask_style
        mask = None
        if self.attends_by_document:
            mask = mask_by_documents(attended, style.window, one_kernel=self.one_kernel)
        if mask is not None:
            return attended, positions_BT, by_layer_type(self.backbone, mask)
        dense = style.finish(within_documents(attended), positions_BT, positions_BT, self.backbone.dtype)
        return attended, positions_BT, dense

    def autograd(self) -> Any:
        return torch.set_grad_enabled(self.trains_backbone and torch.is_grad_enabled())

    def looking_ahead(
        self, document_ids_BT: Tensor, positions_BT: Tensor, share: float | None
    ) -> contextlib.AbstractContextManager[None]:
        share = self.lookahead if share is None else share
        if not share:
            return contextlib.nullcontext()
        may_attend_BTT = within_documents(document_ids_BT)
        return first_layer_sees_ahead(self.backbone, document_ids_BT, may_attend_BTT, positions_BT, share)

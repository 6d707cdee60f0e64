"""The one module that is trained and wrapped: backbone, heads and loss in a single forward.

Heads and loss run inside, so that engines which shard parameters have gathered every weight that is used, in backward
too. A frozen backbone runs without autograd and stays in eval mode.
"""
# B batch, T position, K head, R supervised row of one head

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone import Backbone, Tap
from heads.interface import TeacherForcing, TokenHeads
from heads.masks import positions_within_documents, within_documents
from train.losses import chunked_cross_entropy
from train.targets import count_supervised, labels_at, shifts_of, supervised_rows


class TrainedModel(nn.Module):
    """Backbone and heads with the Modified-CLM loss.

    Args:
        backbone: the wrapped causal LM.
        token_heads: the heads; None trains the backbone alone.
        attend_across_documents: let attention cross the documents of a packed block (labels never do).
        head_decay: head k's loss is weighted with head_decay ** (k - 1).
    """

    head_weights_K: Tensor

    def __init__(
        self,
        backbone: Backbone,
        token_heads: TokenHeads | None,
        *,
        attend_across_documents: bool = False,
        head_decay: float = 1.0,
    ) -> None:
        super().__init__()
        self.model = backbone.model
        self.token_heads = token_heads
        self.backbone = backbone
        self.attend_across_documents = attend_across_documents
        self.shifts = shifts_of(self.num_heads)
        self.register_buffer("head_weights_K", head_decay ** torch.arange(len(self.shifts)), persistent=False)
        self.model.requires_grad_(token_heads is None)

    @property
    def num_heads(self) -> int:
        return 0 if self.token_heads is None else self.token_heads.num_heads

    @property
    def trains_backbone(self) -> bool:
        return self.token_heads is None

    def train(self, mode: bool = True) -> TrainedModel:
        super().train(mode)
        self.model.train(mode and self.trains_backbone)
        return self

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, counts_K: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss of one micro-batch.

        Args:
            input_ids: (B, T) packed tokens.
            loss_mask: (B, T) True where a token may be a target.
            document_ids: (B, T) which document of its block a token belongs to.
            counts_K: labels of each head over the whole batch (all micro-batches, all processes); the micro-batch's own
                where it is not given.

        Returns:
            loss: the weighted sum over heads of (sum of the head's cross-entropies / its count).
            loss_sums_K: each head's sum over this micro-batch, detached.
        """
        batch = self.teacher_forcing(input_ids, loss_mask, document_ids)
        sums_K = torch.stack(
            [
                chunked_cross_entropy(projection, hidden_RD, labels_at(input_ids, rows_R, shift))
                for (projection, hidden_RD), rows_R, shift in zip(
                    self.states(batch), batch.rows, self.shifts, strict=True
                )
            ]
        )
        if counts_K is None:
            counts_K = count_supervised(loss_mask, document_ids, self.shifts)
        means_K = sums_K / counts_K.to(sums_K.device).clamp(min=1)
        return {"loss": (means_K * self.head_weights_K).sum(), "loss_sums_K": sums_K.detach()}

    def states(self, batch: TeacherForcing) -> Any:
        """Pairs of projection and hidden states, one head at a time."""
        if self.token_heads is None:
            yield self.backbone.projection.without_norm(), batch.tap("final", batch.rows[0])
            return
        for k, hidden_RD in enumerate(self.token_heads.teacher_forced(batch), start=1):
            yield self.token_heads.projection(k), hidden_RD

    def teacher_forcing(
        self, input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, also: tuple[Tap, ...] = ()
    ) -> TeacherForcing:
        """Run the backbone over the packed block and find the supervised rows of each head."""
        taps = {*(("final",) if self.token_heads is None else self.token_heads.taps), *also}
        attended = torch.zeros_like(document_ids) if self.attend_across_documents else document_ids
        positions_BT = positions_within_documents(attended)
        mask = self.backbone.mask_style.finish(
            within_documents(attended), positions_BT, positions_BT, self.backbone.dtype
        )
        with torch.set_grad_enabled(self.trains_backbone and torch.is_grad_enabled()):
            _, recorded = self.backbone.forward(
                input_ids, taps=tuple(taps), attention_mask=mask, position_ids=positions_BT, use_cache=False
            )
        if self.token_heads is not None and not torch.is_autocast_enabled(input_ids.device.type):
            dtype = next(self.token_heads.parameters()).dtype
            recorded = {tap: hidden.to(dtype) for tap, hidden in recorded.items()}
        rows = [supervised_rows(loss_mask, document_ids, shift) for shift in self.shifts]
        return TeacherForcing(tokens_BT=input_ids, taps=recorded, positions_BT=positions_BT, mask=mask, rows=rows)

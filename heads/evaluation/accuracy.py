"""Accuracy of each head, position by position: against the data, and against the backbone's own next token (agreement).

The papers plot top-1 and top-5 accuracy against the data. Decoding depends on agreement: a draft of head k is accepted
if it is the token that the backbone would choose there, and agreement by rank decides which trees pay. For heads with a
draft vocabulary, a token that they do not score counts as wrong and is left out of their loss.
"""
# B block, T position, R row, C row of one chunk, D model width, V vocabulary, K head

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.projection import Projection

RANKS = 10
CHUNK_ELEMENTS = 2**22
"""Elements of one chunk's logits."""


@dataclass(kw_only=True)
class HeadAccuracy:
    """Running sums of one head (or of the backbone).

    >>> p = Projection(weight=torch.eye(12))
    >>> meter = HeadAccuracy()
    >>> meter.update(p, torch.eye(12)[[3, 4]], labels_R=torch.tensor([3, 3]), choices_R=torch.tensor([3, 4]))
    >>> meter.top1, meter.agreement
    (0.5, 1.0)
    """

    count: int = 0
    scored: int = 0
    loss_sum: float = 0.0
    top1_hits: int = 0
    top5_hits: int = 0
    agreements_by_rank: list[int] = field(default_factory=lambda: [0] * RANKS)

    @torch.no_grad()
    def update(self, projection: Projection, hidden_RD: Tensor, labels_R: Tensor, choices_R: Tensor) -> None:
        """Add rows: the head's states, the data's tokens and the backbone's choices at the predicted positions."""
        chunk_rows = max(1, CHUNK_ELEMENTS // projection.weight.shape[0])
        for start in range(0, len(labels_R), chunk_rows):
            rows = slice(start, start + chunk_rows)
            self._add(projection, hidden_RD[rows], labels_R[rows], choices_R[rows])

    def _add(self, projection: Projection, hidden_CD: Tensor, labels_C: Tensor, choices_C: Tensor) -> None:
        logits_CV = projection(hidden_CD.to(projection.weight.dtype)).float()
        ranked_CR = projection.ids(logits_CV.topk(min(RANKS, logits_CV.shape[-1]), dim=-1).indices)
        entries_C, scored_C = projection.find(labels_C)
        right_CR = ranked_CR == labels_C[:, None]
        agrees_R = (ranked_CR == choices_C[:, None]).sum(dim=0).tolist()
        self.count += len(labels_C)
        self.scored += int(scored_C.sum())
        losses_C = F.cross_entropy(logits_CV, entries_C, reduction="none")
        self.loss_sum += float(losses_C[scored_C].sum())
        self.top1_hits += int(right_CR[:, 0].sum())
        self.top5_hits += int(right_CR[:, :5].sum())
        self.agreements_by_rank = [
            had + new for had, new in zip(self.agreements_by_rank, agrees_R + [0] * RANKS, strict=False)
        ]

    loss = property(lambda self: self.loss_sum / max(1, self.scored))
    coverage = property(lambda self: self.scored / max(1, self.count))
    top1 = property(lambda self: self.top1_hits / max(1, self.count))
    top5 = property(lambda self: self.top5_hits / max(1, self.count))
    agreement = property(lambda self: self.agreements_by_rank[0] / max(1, self.count))

    @property
    def accuracy_by_rank(self) -> list[float]:
        """Share of positions where the candidate of rank 0, 1, … was the backbone's choice."""
        return [hits / max(1, self.count) for hits in self.agreements_by_rank]

    def as_sums(self) -> list[float]:
        """The sums in a fixed order, so that processes can add theirs up."""
        return [self.count, self.scored, self.loss_sum, self.top1_hits, self.top5_hits, *self.agreements_by_rank]

    @classmethod
    def from_sums(cls, sums: list[float]) -> HeadAccuracy:
        count, scored, loss_sum, top1, top5, *by_rank = sums
        return cls(
            count=int(count),
            scored=int(scored),
            loss_sum=loss_sum,
            top1_hits=int(top1),
            top5_hits=int(top5),
            agreements_by_rank=[int(hits) for hits in by_rank],
        )


@torch.no_grad()
def backbone_choices(projection: Projection, final_BTD: Tensor) -> Tensor:
    """(B, T): the token that the backbone chooses next at each position."""
    chunk_rows = max(1, CHUNK_ELEMENTS // projection.weight.shape[0])
    chunks = [projection(rows_CD).argmax(dim=-1) for rows_CD in torch.split(final_BTD.flatten(0, 1), chunk_rows)]
    return torch.cat(chunks).view(final_BTD.shape[:2])

"""The products of one chunk of rows with an unembedding, through one buffer of logits."""
# R rows, C rows of one chunk, D model width, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from heads.backbone.projection import Projection


def widen(logits_RV: Tensor) -> Tensor:
    """At least float32: in half precision a sum over a vocabulary loses its small terms."""
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


class Unembedding:
    """The logits of each chunk, and the gradient from logits to hidden states.

    Args:
        projection: a projection without norm.
        beside: another unembedding over the same chunks, whose logits are no longer needed when these are computed. The
            two share a buffer where possible, and the cast of a common weight.
        goes_back: store what `through_finish` needs. A teacher has no gradient, and its probabilities stay while the
            logits of students are computed.
    """

    def __init__(
        self,
        projection: Projection,
        device: torch.device,
        *,
        beside: Unembedding | None = None,
        goes_back: bool = True,
    ) -> None:
        self.projection: Projection = projection
        weight: Tensor = projection.weight
        autocast = torch.is_autocast_enabled(device.type) and weight.dtype == torch.float32
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        same_weight = beside is not None and beside.projection.weight is weight
        self.weight: Tensor = beside.weight if beside is not None and same_weight else weight.detach()
        self.weight = self.weight.to(self.dtype)  # cast once and not for each chunk; no copy where it has the dtype
        self.bias = None if projection.bias is None else projection.bias.detach().to(self.dtype)
        self._goes_back = goes_back
        self._buffer: Tensor | None = None  # reused: fresh memory costs more than writing to it
        # On a CPU, logits in the widest dtype become probabilities in this buffer, which students would overwrite.
        holds_probabilities = self.dtype == self.wide and device.type == "cpu"
        can_share = beside is not None and beside.dtype == self.dtype and (goes_back or not holds_probabilities)
        self._buffer_owner = beside if can_share else None

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """(C, V), scaled and capped, in at least float32; stores the soft cap's slope for `through_finish`."""
        logits_CV = widen(self.projection.finish(self._product(hidden_CD.to(self.dtype))))
        cap = self.projection.soft_cap
        self._slope_CV = None if cap is None or not self._goes_back else 1 - (logits_CV / cap).square()
        return logits_CV

    def through_finish(self, gradient_CV: Tensor) -> Tensor:
        """The gradient at `hidden @ weightᵀ + bias` from that at `logits`, in place, in the dtype of the products."""
        if self._slope_CV is not None:
            gradient_CV.mul_(self._slope_CV)
        if self.projection.scale != 1.0:
            gradient_CV.mul_(self.projection.scale)
        return gradient_CV.to(self.dtype)

    def into_hidden(self, gradient_CV: Tensor) -> Tensor:
        return torch.mm(gradient_CV, self.weight)

    def _product(self, hidden_CD: Tensor) -> Tensor:
        out_CV = torch.mm(hidden_CD, self.weight.t(), out=self._buffer_for(hidden_CD)[: len(hidden_CD)])
        return out_CV if self.bias is None else out_CV.add_(self.bias)

    def _buffer_for(self, hidden_CD: Tensor) -> Tensor:
        if self._buffer_owner is not None and len(self._buffer_owner.weight) == len(self.weight):
            return self._buffer_owner._buffer_for(hidden_CD)
        if self._buffer is None:
            self._buffer = hidden_CD.new_empty(len(hidden_CD), len(self.weight))
        return self._buffer


def into_probabilities(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (C, V), in place where that is safe, and log Σ exp(logits) (C,).

    One kernel computes the probabilities. The largest of them is 1 / Σ exp(logit - maximum), from which the logarithm
    follows; -log p(label) itself would be infinite where p(label) underflows.

    >>> into_probabilities(torch.tensor([[0.0, 0.0]]))
    (tensor([[0.5000, 0.5000]]), tensor([0.6931]))
    """
    maxima_C1, best_C1 = logits_CV.max(1, keepdim=True)
    in_place = logits_CV if logits_CV.device.type == "cpu" else None  # reads a row before it writes it; tested
    probs_CV = torch.softmax(logits_CV, dim=1, out=in_place)
    return probs_CV, (maxima_C1 - probs_CV.gather(1, best_C1).log()).squeeze(1)

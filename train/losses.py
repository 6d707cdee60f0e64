"""Cross-entropy from hidden states: a plain reference, and a fast path that never holds (rows, vocabulary) at once.

The fast path goes over chunks of rows and takes each chunk's gradients by hand while its logits exist, in forward:
logits are computed once, turned into their own gradient in place and never stored, so memory is one chunk's logits
however many rows, heads or tokens there are. Objectives that share an unembedding go through it together: there is one
gradient of its size, and chunks are full. It works through any `Projection` (norm, bias, scale, soft cap), which
torch's own linear_cross_entropy does not.
"""
# R rows, C rows of one chunk, K objective, D model width, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.gradient_gate import gate
from heads.projection import Projection

CHUNK_ELEMENTS = {"cpu": 2**23}
"""Logits of one chunk, in elements: 32 MiB in float32; `benchmarks/training.py` prints others beside it."""
CHUNK_ELEMENTS_ELSEWHERE = 2**27
"""On an accelerator a product of few rows waits for the weights: 1,024 rows of a vocabulary of 128k, 512 MiB."""
LEAST_ROWS = 64  # a chunk of fewer spends its time on reading the weights, whatever the vocabulary


def plain_cross_entropy(projection: Projection, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    """The sum over rows of -log softmax(projection(hidden))[label], in float32. The reference.

    >>> p = Projection(weight=torch.zeros(4, 2))
    >>> plain_cross_entropy(p, torch.ones(3, 2), torch.tensor([0, 1, 2]))   # 3 · ln 4
    tensor(4.1589)
    """
    logits_RV = projection(hidden_RD.to(projection.weight.dtype))
    return F.cross_entropy(widen(logits_RV), labels_R, reduction="sum")


def chunked_cross_entropy(
    projection: Projection, hidden_RD: Tensor, labels_R: Tensor, gates: Sequence[float] | None = None
) -> Tensor:
    """The same sum in chunks of rows, with gradients for the hidden states and the projection's trained tensors.

    Args:
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; 1 where not given.
    """
    part = Part(projection=projection, hidden_RD=hidden_RD, labels_R=labels_R, gates=gates)
    return weighted_loss([part])[0]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One objective's rows, and what they count in the whole loss.

    Attributes:
        hidden_RD: hidden states for `projection`.
        factor: () what the sum over these rows is multiplied with in the loss; 1 where not given.
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; 1 where not given.
        shared: others may read the same unembedding, so these rows wait for theirs.
    """

    projection: Projection
    hidden_RD: Tensor
    labels_R: Tensor
    factor: Tensor | None = None
    gates: Sequence[float] | None = None
    shared: bool = False

    @property
    def unembedding_gate(self) -> float:
        """On weight and bias alike: they have one owner."""
        return 1.0 if self.gates is None else self.gates[0]


def weighted_loss(parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
    """Σ factor · (sum of a part's cross-entropies), and the plain sums (K,), detached.

    Parts are taken one at a time. Those with an unembedding of their own are done at once; shared ones are kept, as
    (R, D) hidden states, until the last is there; those that give the unembedding no gradient go apart, as they need
    one product less.
    """
    losses: list[Tensor] = []
    sums: dict[int, Tensor] = {}
    waiting: dict[bool, list[tuple[int, Part]]] = {}
    for index, part in enumerate(parts):
        part = after_norm(part)
        if part.shared:
            waiting.setdefault(part.unembedding_gate == 0, []).append((index, part))
        else:
            losses.append(one_pass([(index, part)], sums))
    losses += [one_pass(together, sums) for together in waiting.values()]
    return torch.stack(losses).sum(), torch.stack([sums[index] for index in range(len(sums))])


def after_norm(part: Part) -> Part:
    """The part behind its projection's norm, which ordinary autograd goes through: (R, D) is small."""
    norm, hidden_RD = part.projection.norm, part.hidden_RD
    if norm is None:
        return part
    tensors = list(norm.named_parameters())
    gates = [1.0] * len(tensors) if part.gates is None else part.gates[len(part.gates) - len(tensors) :]
    values = {name: gate(tensor, scale) for (name, tensor), scale in zip(tensors, gates, strict=True)}
    # A shallow copy, called by `forward`: engines hang hooks on modules and look there for weights of their own.
    module = copy.copy(norm)
    module.__dict__["_parameters"] = dict.fromkeys(norm._parameters) | values
    hidden_RD = module.forward(hidden_RD.to(part.projection.weight.dtype))
    return replace(part, projection=part.projection.without_norm(), hidden_RD=hidden_RD)


def one_pass(parts: list[tuple[int, Part]], sums: dict[int, Tensor]) -> Tensor:
    """The weighted loss of parts that share one unembedding; notes their plain sums under their indices."""
    projection = parts[0][1].projection
    sizes = [len(part.labels_R) for _, part in parts]
    hidden_RD = torch.cat([part.hidden_RD for _, part in parts]) if len(parts) > 1 else parts[0][1].hidden_RD
    labels_R = torch.cat([part.labels_R for _, part in parts])
    factors = [torch.ones(()) if part.factor is None else part.factor for _, part in parts]
    gates = [part.unembedding_gate for _, part in parts]

    def for_each_row(values_P: Tensor) -> Tensor:
        counts_P = torch.tensor(sizes, device=hidden_RD.device)
        return values_P.to(hidden_RD.device).repeat_interleave(counts_P, output_size=len(hidden_RD))  # no wait for it

    factors_R = for_each_row(torch.stack(factors))
    gates_R = None if set(gates) <= {0.0, 1.0} else for_each_row(factors_R.new_tensor(gates))
    weight, bias = projection.weight, projection.bias
    if not any(gates):
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    loss, losses_R = _ChunkedCrossEntropy.apply(hidden_RD, labels_R, factors_R, gates_R, projection, weight, bias)
    for (index, _), rows_R in zip(parts, losses_R.split(sizes), strict=True):
        sums[index] = rows_R.sum()
    return loss


def widen(logits_RV: Tensor) -> Tensor:
    """float32 at least: a sum over a vocabulary loses its small terms in half precision."""
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


def rows_of_a_chunk(vocab: int, device: torch.device) -> int:
    return max(LEAST_ROWS, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_ELSEWHERE) // vocab)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are made in forward and handed out by backward, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        labels_R: Tensor,
        factors_R: Tensor,
        gates_R: Tensor | None,
        projection: Projection,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 5, 6))
        passes = _Passes(projection, hidden_RD.device)
        # Factors are 1 / labels of a batch; times that, small gradients would be lost in float16 before backward brings
        # the loss scale. So the largest factor waits for backward too.
        unit = factors_R.abs().amax() if len(factors_R) else factors_R.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        hidden_grad_RD = torch.empty_like(hidden_RD, dtype=passes.wide) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=passes.wide) if needs_weight else None  # chunks add up in it
        bias_grad = torch.zeros_like(bias, dtype=passes.wide) if needs_bias and bias is not None else None
        losses_R = torch.empty(len(hidden_RD), dtype=passes.wide, device=hidden_RD.device)
        chunk_rows = rows_of_a_chunk(len(weight), hidden_RD.device)
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden_CD = hidden_RD[rows].to(passes.dtype)
            losses_R[rows], probs_CV = passes.forward(hidden_CD, labels_R[rows])
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            scale_C1 = factors_R[rows, None] / unit
            gradient_CV = passes.gradient(probs_CV, labels_R[rows])
            if hidden_grad_RD is not None:
                hidden_grad_RD[rows] = passes.into_hidden(gradient_CV) * scale_C1
            if gates_R is not None:
                scale_C1 = scale_C1 * gates_R[rows, None]
            if weight_grad is not None:
                _add_product(weight_grad, gradient_CV.t(), (hidden_CD * scale_C1).to(passes.dtype))
            if bias_grad is not None:
                bias_grad += (gradient_CV.t() @ scale_C1.to(passes.dtype)).squeeze(1)
        ctx.found, ctx.unit = [hidden_grad_RD, weight_grad, bias_grad], unit
        ctx.dtypes = [hidden_RD.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(losses_R)
        return (losses_R * factors_R).sum(), losses_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.found is None:
            raise RuntimeError("backward was called twice; the gradients were scaled in place and given away.")
        found, ctx.found = ctx.found, None
        scale = grad_outputs[0] * ctx.unit
        hidden_grad_RD, weight_grad, bias_grad = (
            None if g is None else g.mul_(scale).to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return hidden_grad_RD, None, None, None, None, weight_grad, bias_grad


class _Passes:
    """The products of one chunk with the unembedding, through one buffer of logits."""

    def __init__(self, projection: Projection, device: torch.device) -> None:
        weight = projection.weight
        autocast = torch.is_autocast_enabled(device.type) and weight.dtype == torch.float32
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.weight = weight.detach().to(self.dtype)  # once, not once a chunk
        self.bias = None if projection.bias is None else projection.bias.detach().to(self.dtype)
        self.projection = projection
        self._buffer: Tensor | None = None  # memory that is new to a process costs more than writing to it

    def forward(self, hidden_CD: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (C,) and probabilities (C, V); keeps what the soft cap needs.

        One kernel makes the probabilities, and the sum that it divided by comes back from the largest of them, which
        is 1 / sum: -log p(label) itself would be infinite where p(label) is below the smallest number.
        """
        logits_CV = widen(self.projection.finish(self._logits(hidden_CD)))
        cap = self.projection.soft_cap
        self._slope_CV = None if cap is None else 1 - (logits_CV / cap).square()
        picked_C1 = logits_CV.gather(1, labels_C[:, None])
        maxima_C1, best_C1 = logits_CV.max(1, keepdim=True)
        in_place = logits_CV if logits_CV.device.type == "cpu" else None  # reads a row before it writes it; tested
        probs_CV = torch.softmax(logits_CV, dim=1, out=in_place)
        losses_C1 = maxima_C1 - probs_CV.gather(1, best_C1).log() - picked_C1
        return losses_C1.squeeze(1), probs_CV

    def gradient(self, probs_CV: Tensor, labels_C: Tensor) -> Tensor:
        """The loss's gradient at `hidden @ weightᵀ + bias`: p - onehot, in place of the probabilities."""
        probs_CV.scatter_add_(1, labels_C[:, None], probs_CV.new_full((len(labels_C), 1), -1.0))
        if self._slope_CV is not None:
            probs_CV.mul_(self._slope_CV)
        if self.projection.scale != 1.0:
            probs_CV.mul_(self.projection.scale)
        return probs_CV.to(self.dtype)

    def into_hidden(self, gradient_CV: Tensor) -> Tensor:
        return torch.mm(gradient_CV, self.weight)

    def _logits(self, hidden_CD: Tensor) -> Tensor:
        if self._buffer is None:
            self._buffer = hidden_CD.new_empty(len(hidden_CD), len(self.weight))
        out_CV = torch.mm(hidden_CD, self.weight.t(), out=self._buffer[: len(hidden_CD)])
        return out_CV if self.bias is None else out_CV.add_(self.bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a copy of `total` where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right

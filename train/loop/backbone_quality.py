"""What training does to the backbone itself: PPL_1 on held-out text before and after, and how far it went.

    PPL_1 = exp(mean of -log p(x_{t+1} | x_≤t))      KL = mean of Σ_v p(v) log(p(v) / q(v)), p the original's, q the new

"Before" is the evaluation at step 0 (`trainer.eval_on_start`); where there is none, a pass over the held-out blocks
that measures the backbone alone. KL is measured where the original is kept (train/objective/teacher.py).
"""
# R rows, C rows of one chunk, D model width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.projection import Projection
from heads.evaluation.accuracy import CHUNK_ELEMENTS


@dataclass(kw_only=True)
class Drift:
    """Running sum of the KL divergence from the original.

    >>> drift, p = Drift(), Projection(weight=torch.tensor([[0.0], [1.0]]))
    >>> drift.update(p, torch.zeros(1, 1), p, torch.full((1, 1), 2.0))   # (½, ½) against softmax(0, 2)
    >>> round(drift.mean, 4)                                               # ½ log(½ / 0.1192) + ½ log(½ / 0.8808)
    0.4338
    """

    count: int = 0
    total: float = 0.0

    @torch.no_grad()
    def update(self, original: Projection, original_RD: Tensor, trained: Projection, hidden_RD: Tensor) -> None:
        """Add rows: hidden states of the original and of the trained backbone at the same positions."""
        chunk_rows = max(1, CHUNK_ELEMENTS // len(trained.weight))
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            log_p_CV = log_probabilities(original, original_RD[rows])
            log_q_CV = log_probabilities(trained, hidden_RD[rows])
            self.total += float(F.kl_div(log_q_CV, log_p_CV, reduction="sum", log_target=True))
        self.count += len(hidden_RD)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def log_probabilities(projection: Projection, hidden_CD: Tensor) -> Tensor:
    """(C, V), in float32 at least."""
    logits_CV = projection(hidden_CD.to(projection.weight.dtype))
    return torch.log_softmax(logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float(), dim=-1)


def quality(before: float, found: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """PPL_1 before and after from mean losses, over how many tokens, and the KL divergence where it was measured.

    >>> quality(0.0, {"backbone_loss": math.log(2.0), "backbone_tokens": 1200})
    {'before': 1.0, 'after': 2.0, 'tokens': 1200}
    """
    after, tokens = found[f"{prefix}backbone_loss"], int(found[f"{prefix}backbone_tokens"])
    result = {"before": perplexity(before), "after": perplexity(after), "tokens": tokens}
    if (drift := found.get(f"{prefix}backbone_kl")) is not None:
        result["kl_to_original"] = drift
    return result


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is more than a float holds.

    >>> round(perplexity(2.0), 3), perplexity(1e9)
    (7.389, inf)
    """
    return math.exp(loss) if loss < math.log(1e300) else math.inf

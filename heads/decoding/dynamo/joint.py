"""How many tokens a pass emits, and from which joint distribution J over n-grams: Algorithm 1 of DynaMo.

`decide` is the algorithm, and the functions below it are its lines. Where the paper is silent or contradicts itself:

- J is made to sum to 1 after co-occurrence masking, since its entries are compared with fixed thresholds. After
  thresholds and the repetition penalty J is not normalised again.
- If no n-gram of a row's candidates was ever seen, the mask makes J 0 and the row backs off. With ε_b = 0, which always
  emits all tokens, such a J stays unmasked.
- The static and the adaptive threshold can be combined in four ways (heads/decoding/dynamo/threshold.py).
- The repetition penalty divides an entry once for each of its tokens that stands in the text or earlier in the n-gram.
- ε_b = 0 never backs off and ε_b = 1 always does, whatever the penalty.

The result is lossy: nothing verifies the tokens, and a product of heads that do not see one another's tokens, weighted
by counts that do not depend on the text, is not the backbone's distribution.
"""
# B batch, V vocabulary, k candidates of one place, R rows that are still undecided, M cells of J (all axes flattened)
# A joint distribution over the n places of an n-gram has shape (B, k, …, k): one axis of candidates for each place.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.decoding.dynamo.candidates import Candidates
from heads.decoding.dynamo.cooccurrence import Cooccurrence
from heads.decoding.dynamo.settings import JointConfig
from heads.decoding.dynamo.threshold import along, apply_thresholds, static_bound
from heads.interface.token_heads import TokenHeads

MAX_JOINT_ENTRIES = 2**18
"""The most entries of one row's J: each axis is cut to as many candidates as fit (64 for n = 3, 22 for n = 4)."""


@dataclass(frozen=True, kw_only=True)
class JointRows:
    """The joint distributions of some rows.

    Attributes:
        rows_R: the rows' indices in the batch.
        places: the candidates of x_{t+1} … x_{t+n}.
        joint: (R, k, …, k).
    """

    rows_R: Tensor
    places: tuple[Candidates, ...]
    joint: Tensor

    @property
    def counts(self) -> list[Tensor]:
        """For each place, how many candidates each row has (R,)."""
        return [place.counts for place in self.places]

    def select(self, kept_R: Tensor) -> JointRows:
        """The rows for which a mask (R,) is True."""
        if bool(kept_R.all()):
            return self
        places = tuple(place.select(kept_R) for place in self.places)
        return JointRows(rows_R=self.rows_R[kept_R], places=places, joint=self.joint[kept_R])

    def sample(self, generator: torch.Generator | None) -> list[list[int]]:
        """One sampled n-gram for each row, in proportion to its entry of J."""
        cells = []
        for joint_M in self.joint.flatten(1):
            left = joint_M.nonzero()[:, 0]  # sampling from these, which are often few, is faster than from all cells
            cells.append(left[torch.multinomial(joint_M[left], 1, generator=generator)])
        return self.tokens_of(torch.cat(cells))

    def best(self) -> list[list[int]]:
        """Each row's likeliest n-gram, the first of equals."""
        return self.tokens_of(self.joint.flatten(1).argmax(dim=1))

    def tokens_of(self, cell_R: Tensor) -> list[list[int]]:
        """The tokens of one cell of each row."""
        at = torch.unravel_index(cell_R, self.joint.shape[1:])
        tokens = [place.tokens_Bk.gather(1, i_R[:, None]) for place, i_R in zip(self.places, at, strict=True)]
        return torch.cat(tokens, dim=1).tolist()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many tokens each row emits (B,), and the joint distributions of those that emit more than one."""

    order_B: Tensor
    ngrams: tuple[JointRows, ...]


def decide(
    places: Sequence[Candidates],
    config: JointConfig,
    *,
    cooccurrence: Cooccurrence | None = None,
    seen_BV: Tensor | None = None,
    penalty: float = 1.0,
) -> Decision:
    """Algorithm 1 without the sampling: starting from all places, back off by one token until J has a peak or n = 1.

    This takes memory for about ten times B · min(kⁿ, MAX_JOINT_ENTRIES) numbers, so split large batches.

    >>> from heads.decoding.dynamo.candidates import take_candidates
    >>> def place(*probs): return take_candidates(torch.tensor([probs]), top_k=50)
    >>> sure, unsure = place(0.1, 0.8, 0.1), place(0.3, 0.4, 0.3)
    >>> decide([sure, sure], JointConfig(threshold=0.5)).order_B                      # J peaks at 0.64 > 0.5
    tensor([2])
    >>> decide([sure, sure, unsure], JointConfig(threshold=0.5)).ngrams[0].best()      # 0.256 > 0.5²
    [[1, 1, 1]]
    >>> decide([sure, sure, unsure], JointConfig(threshold=0.6)).order_B              # not > 0.6², but 0.64 > 0.6
    tensor([2])

    Args:
        places: candidates of x_{t+1}, x_{t+2}, …; the first are the backbone's, the others those of heads 1, 2, ….
        seen_BV: True for tokens that the penalty counts as repeated; None: no penalty is applied.
        penalty: divides entries with repeated tokens.

    Raises:
        ValueError: a co-occurrence table whose ratios are not finite.
    """
    rows_R = torch.arange(len(places[0].probs_Bk), device=places[0].probs_Bk.device)
    order_B = torch.ones_like(rows_R)
    decided: list[JointRows] = []
    n = len(places) if config.threshold < 1 else 1
    while n > 1 and len(rows_R):
        here = form_joint(places[:n], rows_R, config, cooccurrence)
        if len(here.rows_R):  # most rows that back off were dropped by `form_joint`
            joint = apply_thresholds(here.joint, here.counts, config.threshold, config.adaptive, config.blur)
            here = replace(here, joint=joint)
            if seen_BV is not None:
                here = replace(here, joint=penalize_repetition(here.joint, here.places, seen_BV[here.rows_R], penalty))
            here = here.select(has_peak(here.joint, config.threshold))
        if len(here.rows_R):
            order_B[here.rows_R] = n
            decided.append(here)
        rows_R = (order_B == 1).nonzero()[:, 0]
        n -= 1
    return Decision(order_B=order_B, ngrams=tuple(decided))


def form_joint(
    places: Sequence[Candidates], rows_R: Tensor, config: JointConfig, cooccurrence: Cooccurrence | None
) -> JointRows:
    """Lines 6 to 8: J of those rows in which an entry above 0 reaches the static threshold."""
    most = largest_side(len(places))
    cut = tuple(place.select(rows_R).first(most) for place in places)
    independent = outer(cut)
    joint = mask(independent, cut, cooccurrence, config.transparency)
    if config.threshold == 0:
        joint = torch.where(total(joint) > 0, joint, independent)
    peak_R = joint.flatten(1).amax(dim=1)
    kept_R = (peak_R > 0) & (peak_R >= static_bound(config.threshold, len(places), config.adaptive))
    return JointRows(rows_R=rows_R, places=cut, joint=joint).select(kept_R)


def largest_side(n: int) -> int:
    """The most candidates of each of n places with which J has no more than MAX_JOINT_ENTRIES.

    >>> [largest_side(n) for n in (2, 3, 4, 5, 18, 19)]
    [512, 64, 22, 12, 2, 1]
    """
    side = round(MAX_JOINT_ENTRIES ** (1 / n))
    return side if side**n <= MAX_JOINT_ENTRIES else side - 1


def outer(places: Sequence[Candidates]) -> Tensor:
    """Equation 2: the product of the places' probabilities (B, k, …, k)."""
    joint = places[0].probs_Bk
    for place in places[1:]:
        joint = joint[..., None] * along(place.probs_Bk, joint.ndim, joint.ndim)
    return joint


def mask(joint: Tensor, places: Sequence[Candidates], cooccurrence: Cooccurrence | None, transparency: float) -> Tensor:
    """Equation 6 for any n: J times the co-occurrence ratio to the power of α_c, made to sum to 1 (B, k, …, k).

    A row becomes 0 if none of its n-grams was ever seen.

    Raises:
        ValueError: the table gives a ratio that is not finite.
    """
    if cooccurrence is not None and transparency > 0:
        ratio = cooccurrence.cooccurrence([place.tokens_Bk for place in places]).to(joint.dtype)
        if not bool(ratio.isfinite().all()):
            raise ValueError(
                "The co-occurrence table gave a ratio that is not finite; count it again or leave cooccurrence out."
            )
        largest = ratio.flatten(1).amax(dim=1).clamp(min=torch.finfo(ratio.dtype).tiny)
        joint = joint * (ratio / along(largest[:, None], 1, joint.ndim - 1)) ** transparency  # no power overflows
    return joint / total(joint).clamp(min=torch.finfo(joint.dtype).tiny)


def total(joint: Tensor) -> Tensor:
    return joint.sum(dim=tuple(range(1, joint.ndim)), keepdim=True)


def penalize_repetition(joint: Tensor, places: Sequence[Candidates], seen_BV: Tensor, penalty: float) -> Tensor:
    """Line 11: divide an entry once for each of its tokens that was seen or stands earlier in the n-gram."""
    for i, place in enumerate(places, start=1):
        repeated = along(seen_BV.gather(1, place.tokens_Bk), i, len(places))
        for j, earlier in enumerate(places[: i - 1], start=1):
            before = along(earlier.tokens_Bk, j, len(places))
            repeated = repeated | (before == along(place.tokens_Bk, i, len(places)))
        joint = torch.where(repeated, joint / penalty, joint)
    return joint


def has_peak(joint: Tensor, threshold: float) -> Tensor:
    """Line 12: rows (B,) that need not back off, since an entry is above ε_b^(n-1)."""
    peak_B = joint.flatten(1).amax(dim=1)
    if threshold in (0, 1):  # never and always back off, whatever a penalty or rounding does to the entries
        return torch.full_like(peak_B, threshold == 0, dtype=torch.bool)
    order = joint.ndim - 1
    return peak_B > threshold ** (order - 1)


def check_independent(token_heads: TokenHeads) -> None:
    """Check that the heads can be multiplied to a joint distribution that is small enough.

    Raises:
        ValueError: heads that read drafted tokens, or too many heads.
    """
    if token_heads.grounded:
        raise ValueError(
            f"Heads of the family {token_heads.family!r} are grounded (they read drafted tokens), and dynamic decoding "
            f"multiplies heads that read the text only; use TreeDecoding, or heads of another family."
        )
    places = token_heads.num_heads + 1
    if largest_side(places) < 2:
        most = max(n for n in range(2, places) if largest_side(n) >= 2) - 1
        raise ValueError(
            f"The joint distribution of {places} tokens with two candidates each has more than {MAX_JOINT_ENTRIES} "
            f"entries; use at most {most} heads, there are {token_heads.num_heads}."
        )

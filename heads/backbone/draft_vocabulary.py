"""A draft vocabulary: heads score only the tokens that texts are mostly made of; the backbone verifies over all.

    vocabulary      0  1  2  3  4  5  6  7        V = 8 tokens, of which the heads score S = 3
    tokens_S           1        4     6           ascending ids; entry i of a head's logits is token tokens_S[i]

A head's unembedding then has S rows in place of V: less to store, to read in every drafting step and to train. What it
costs are the tokens outside, which are never drafted; they are emitted all the same, since every emitted token is the
backbone's own choice. EAGLE-3 has the same (its d2t and t2d), so does Medusa in vLLM (token_map).
"""
# V vocabulary, S scored token, N row; … any leading axes

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Which tokens are scored, of how many.

    >>> few = DraftVocabulary(tokens_S=torch.tensor([1, 4, 6]), size=8)
    >>> few.ids(torch.tensor([2, 0]))
    tensor([6, 1])
    >>> few.find(torch.tensor([4, 5]))                     # where each stands, and whether it is there
    (tensor([1, 2]), tensor([ True, False]))
    >>> few.spread(torch.tensor([0.5, 0.2, 0.3]), 0.0)
    tensor([0.0000, 0.5000, 0.0000, 0.0000, 0.2000, 0.0000, 0.3000, 0.0000])

    Attributes:
        tokens_S: their ids, ascending.
        size: V, of the whole vocabulary.
    """

    tokens_S: Tensor
    size: int

    def ids(self, entries: Tensor) -> Tensor:
        """(…) entries of a head's logits to (…) token ids."""
        return self.tokens_S.to(entries.device)[entries]

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(…) token ids to (…) entries and (…) whether they are scored; the entry of one that is not means nothing."""
        tokens_S = self.tokens_S.to(ids.device)
        entries = torch.searchsorted(tokens_S, ids).clamp(max=len(tokens_S) - 1)
        return entries, tokens_S[entries] == ids

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """(…, S) to (…, V), with `fill` at the tokens that are not scored."""
        whole = values.new_full((*values.shape[:-1], self.size), fill)
        return whole.index_copy(-1, self.tokens_S.to(values.device), values)

    def narrow(self, values: Tensor) -> Tensor:
        """(…, V) to (…, S). A softmax over narrowed logits is the distribution given that the token is scored."""
        return values.index_select(-1, self.tokens_S.to(values.device))

    def condition(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """A whole distribution (…, V) given that the token is scored (…, S), and the probability of that (…).

        This is what heads can learn from a teacher. Where the probability is 0 there is nothing to learn: zeros.

        >>> few = DraftVocabulary(tokens_S=torch.tensor([0, 2]), size=3)
        >>> few.condition(torch.tensor([0.25, 0.5, 0.25]))
        (tensor([0.5000, 0.5000]), tensor(0.5000))
        """
        inside = self.narrow(probs)
        mass = inside.sum(dim=-1)
        return inside / mass.clamp(min=torch.finfo(probs.dtype).tiny)[..., None], mass


class StartedRows(nn.Module):
    """A module of a family whose rows start as rows of the backbone's unembedding, so it has to know which ones."""

    @abstractmethod
    def start_from(self, tokens_S: Tensor, backbone: Any) -> None:
        """Fill the rows."""


class SharedRows:
    """The scored rows of a weight that the heads do not own, gathered once and kept while the weight is the same.

    A weight that a gradient is to reach is gathered anew each time, and the gradient goes through. Copies of heads
    begin without what was kept.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, ...] | None = None

    def of(self, weight: Tensor, bias: Tensor | None, tokens_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (S, D) of the weight (V, D) and entries (S,) of the bias."""
        sources = [weight, tokens_S, *([] if bias is None else [bias])]
        at_S = tokens_S.to(weight.device)
        if weight.requires_grad and torch.is_grad_enabled():
            return weight[at_S], None if bias is None else bias[at_S]
        if self._kept is None or not all(is_same(*pair) for pair in zip(self._kept[0], sources, strict=True)):
            with torch.inference_mode(False), torch.no_grad():  # kept for training too, whatever mode this call is in
                rows = weight.detach()[at_S], None if bias is None else bias.detach()[at_S]
            self._kept = ([remember(source) for source in sources], *rows)
        return self._kept[1], self._kept[2]

    def __deepcopy__(self, _: dict[int, Any]) -> SharedRows:
        return SharedRows()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRows, ()


Mark = tuple[Any, ...]
"""A tensor, not kept alive, and what changes when its content does."""


def remember(tensor: Tensor) -> Mark:
    version = None if tensor.is_inference() else tensor._version
    return weakref.ref(tensor), version, tensor.dtype, tensor.device


def is_same(mark: Mark, tensor: Tensor) -> bool:
    reference, *rest = mark
    return reference() is tensor and rest == list(remember(tensor)[1:])


def check_draft_tokens(tokens: Tensor | Sequence[int], count: int | None, size: int) -> Tensor:
    """The ids (S,), ascending, as `long`.

    >>> check_draft_tokens([6, 1, 4], 3, size=8)
    tensor([1, 4, 6])

    Args:
        count: how many there have to be; any number where it is not given.
        size: V, of the whole vocabulary.

    Raises:
        ValueError: no ids, some twice, some outside the vocabulary, or another number of them.
    """
    ids_S = torch.as_tensor(tokens)
    if ids_S.ndim != 1 or not len(ids_S) or ids_S.is_floating_point() or ids_S.dtype == torch.bool:
        raise ValueError(
            f"draft_tokens of shape {tuple(ids_S.shape)} and type {ids_S.dtype} were given; allowed is a list of token "
            f"ids, such as heads.most_frequent_tokens gives."
        )
    ids_S = ids_S.long().sort().values
    if count is not None and len(ids_S) != count:
        raise ValueError(f"{len(ids_S)} draft_tokens were given and draft_vocabulary={count}; make them agree.")
    if ids_S[0] < 0 or ids_S[-1] >= size:
        raise ValueError(
            f"draft_tokens from {int(ids_S[0])} to {int(ids_S[-1])} were given; the backbone's ids are 0 to {size - 1}."
        )
    if bool((ids_S[1:] == ids_S[:-1]).any()):
        raise ValueError("draft_tokens holds some token twice; give each id once.")
    return ids_S


def most_frequent_tokens(counts_V: Tensor | Sequence[int], count: int) -> Tensor:
    """Ids (S,) of the `count` most frequent tokens, ascending; of equally frequent ones those of lower id.

    >>> most_frequent_tokens([5, 0, 9, 5], 2)
    tensor([0, 2])

    Args:
        counts_V: how often each token stands in a text like those to come.

    Raises:
        ValueError: fewer than one are asked for, or more than there are counts.
    """
    counts_V = torch.as_tensor(counts_V)
    if not 1 <= count <= len(counts_V):
        raise ValueError(f"{count} tokens were asked for; allowed are 1 to {len(counts_V)}, the number of counts.")
    return counts_V.sort(descending=True, stable=True).indices[:count].sort().values

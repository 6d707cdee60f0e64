"""Which tokens heads score: choosing them, checking their ids, and gathering their rows of an unembedding.

heads/backbone/draft_vocabulary.py has the record that heads and losses read, with a picture.
"""
# V vocabulary, S scored token, D model width

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import unpacked


class StartedRows(nn.Module):
    """A module of a family whose rows start as rows of the backbone's unembedding."""

    @abstractmethod
    def start_from(self, tokens_S: Tensor, backbone: Backbone) -> None:
        """Fill the rows."""


class SharedRows:
    """The scored rows of a weight that the heads do not own, gathered again only when the weight has changed.

    Where a gradient has to reach the weight, rows are gathered at each call. Copies of heads gather their own.
    """

    def __init__(self) -> None:
        self._gathered: tuple[Any, ...] | None = None

    def of(self, weight: Tensor, bias: Tensor | None, tokens_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (S, D) of the weight (V, D) and entries (S,) of the bias."""
        sources = [weight, tokens_S, *([] if bias is None else [bias])]
        at_S = tokens_S.to(weight.device)
        if weight.requires_grad and torch.is_grad_enabled():
            return weight[at_S], None if bias is None else bias[at_S]
        if self._gathered is None or not all(is_same(*pair) for pair in zip(self._gathered[0], sources, strict=True)):
            with torch.inference_mode(False), torch.no_grad():  # training may read them later, outside inference mode
                rows = unpacked(weight).detach()[at_S], None if bias is None else bias.detach()[at_S]
            self._gathered = ([remember(source) for source in sources], *rows)
        return self._gathered[1], self._gathered[2]

    def __deepcopy__(self, _: dict[int, Any]) -> SharedRows:
        return SharedRows()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRows, ()


Mark = tuple[Any, ...]
"""A weak reference to a tensor, and what shows that it has changed: its version, dtype and device."""


def remember(tensor: Tensor) -> Mark:
    version = None if tensor.is_inference() else tensor._version
    return weakref.ref(tensor), version, tensor.dtype, tensor.device


def is_same(mark: Mark, tensor: Tensor) -> bool:
    reference, *rest = mark
    return reference() is tensor and rest == list(remember(tensor)[1:])


def unchosen(count: int | None, backbone: Backbone) -> Tensor | None:
    """The buffer of a draft vocabulary whose tokens are not chosen yet.

    Raises:
        ValueError: more tokens than the backbone has.
    """
    if count is None:
        return None
    if count > backbone.vocab_size:
        raise ValueError(
            f"draft_vocabulary={count} was given; allowed are 1 to {backbone.vocab_size}, the backbone's tokens, or "
            f"null for all of them."
        )
    return torch.full((count,), -1, dtype=torch.long)


def mark_chosen(token_heads: Any, _: Any) -> None:
    """A hook after loading, since the loaded tensors include the ids."""
    token_heads._unchosen = False


def check_draft_tokens(tokens: Tensor | Sequence[int], count: int | None, size: int) -> Tensor:
    """The ids (S,), ascending, as `long`.

    >>> check_draft_tokens([6, 1, 4], 3, size=8)
    tensor([1, 4, 6])

    Args:
        count: how many there have to be; None: any number.
        size: V, of the whole vocabulary.

    Raises:
        ValueError: no ids, some twice, some outside the vocabulary, or another number of them.
    """
    ids_S = as_numbers(tokens, "draft_tokens")
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


def as_numbers(values: Any, name: str) -> Tensor:
    """
    Raises:
        ValueError: no tensor, array or list of numbers.
    """
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={values!r:.80} was given; allowed are tensors and lists of numbers.") from None


def most_frequent_tokens(counts_V: Tensor | Sequence[int], count: int) -> Tensor:
    """Ids (S,) of the `count` most frequent tokens, ascending; of equally frequent ones those of lower id.

    >>> most_frequent_tokens([5, 0, 9, 5], 2)
    tensor([0, 2])

    Args:
        counts_V: how often each token stands in a text like those to come.

    Raises:
        ValueError: fewer than one are asked for, or more than there are counts.
    """
    counts_V = as_numbers(counts_V, "counts")
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"{count!r:.80} tokens were asked for; allowed are integers.")
    if counts_V.ndim != 1:
        raise ValueError(f"counts of shape {tuple(counts_V.shape)} were given; allowed is one number for each token.")
    if not 1 <= count <= len(counts_V):
        raise ValueError(f"{count} tokens were asked for; allowed are 1 to {len(counts_V)}, the number of counts.")
    return counts_V.sort(descending=True, stable=True).indices[:count].sort().values

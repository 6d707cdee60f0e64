"""A draft vocabulary: heads score only the most frequent tokens, and the backbone verifies over all tokens.

    vocabulary      0  1  2  3  4  5  6  7        V = 8 tokens, of which the heads score S = 3
    tokens_S           1        4     6           ascending ids; entry i of a head's logits is token tokens_S[i]

A head's unembedding then has S rows in place of V: less to store, to train and to read in every drafting step. Other
tokens are never drafted, but they are still emitted, since every emitted token is the backbone's own choice. EAGLE-3
(d2t and t2d) and Medusa in vLLM (token_map) do the same. heads/interface/draft_vocabulary.py chooses the tokens.
"""
# V vocabulary, S scored token; … any leading axes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The tokens that heads score.

    >>> few = DraftVocabulary(tokens_S=torch.tensor([1, 4, 6]), size=8)
    >>> few.ids(torch.tensor([2, 0]))
    tensor([6, 1])
    >>> few.find(torch.tensor([4, 5]))                     # where each stands, and whether it is there
    (tensor([1, 2]), tensor([ True, False]))
    >>> few.spread(torch.tensor([0.5, 0.2, 0.3]), 0.0)
    tensor([0.0000, 0.5000, 0.0000, 0.0000, 0.2000, 0.0000, 0.3000, 0.0000])

    Attributes:
        tokens_S: ids of the scored tokens, ascending.
        size: V, of the whole vocabulary.
    """

    tokens_S: Tensor
    size: int

    def ids(self, entries: Tensor) -> Tensor:
        """(…) entries of a head's logits to (…) token ids."""
        return self.tokens_S.to(entries.device)[entries]

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(…) token ids to (…) entries, and (…) whether the token is scored; if it is not, its entry is meaningless."""
        tokens_S = self.tokens_S.to(ids.device)
        entries = torch.searchsorted(tokens_S, ids).clamp(max=len(tokens_S) - 1)
        return entries, tokens_S[entries] == ids

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """(…, S) to (…, V), with `fill` at the tokens that are not scored."""
        whole = values.new_full((*values.shape[:-1], self.size), fill)
        return whole.index_copy(-1, self.tokens_S.to(values.device), values)

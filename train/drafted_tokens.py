"""Drafted in place of true tokens while heads are trained (scheduled sampling: Bengio et al. 2015, section 2.4).

    position t         t+1        t+2        t+3             of a row t, with K = 2
    true tokens        x          x          x
    head 1 reads       y_1                                   y_1: the backbone's own choice at t
    head 2 reads       y_1        y_2                        y_2: what head 1 proposes at t, having read y_1

Each of a row's tokens y_j is the drafted one with a probability of its own draw, else the true one; labels are the true
tokens. The probability grows linearly from 0 over the run, as drafts of new heads are no use to later ones. Proposals
are made where head j - 1 is trained itself, from hidden states that are there anyway, so all that is paid for is a
product with the unembedding for the chosen rows.
"""
# B batch, T position, R row, C chosen row of one chunk, D model width

from __future__ import annotations

import torch
from torch import Tensor

from heads.projection import Projection

CHUNK_ELEMENTS = 2**23


class DraftedTokens(dict[int, Tensor]):
    """drafted[j] is (B·T,): x_{t+j} as row t sees it. Notes which of them heads have asked for.

    Args:
        share: of the rows, and of the depths in each, that get what was drafted; 0 to 1.
        generator: torch's global one where it is not given, which the Trainer seeds and keeps in checkpoints.
    """

    def __init__(self, tokens_BT: Tensor, share: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.tokens = tokens_BT.flatten()
        self.share = share
        self.generator = generator
        self.asked: set[int] = set()

    def __getitem__(self, ahead: int) -> Tensor:
        self.asked.add(ahead)
        return super().__getitem__(ahead)

    @torch.no_grad()
    def put(self, ahead: int, rows_R: Tensor, projection: Projection, hidden_RD: Tensor) -> None:
        """Let x_{t+ahead} be the best token of these distributions at a share of the rows."""
        drawn_R = torch.rand(len(rows_R), generator=self.generator, device=rows_R.device) < self.share
        tokens = self.tokens.roll(-ahead)  # at a row's end the next row's: no row of a head reaches over it
        tokens[rows_R[drawn_R]] = best_tokens(projection, hidden_RD[drawn_R])
        self[ahead] = tokens

    def refuse_unread(self, ahead: int, family: str) -> None:
        """Raise ValueError where a family took its tokens from elsewhere."""
        if ahead not in self.asked:
            raise ValueError(
                f"drafted_tokens was given for {family} heads, which read the true tokens all at once; set it to 0."
            )


def best_tokens(projection: Projection, hidden_RD: Tensor) -> Tensor:
    """(R,): the most probable token of each row, without the logits of all rows at once.

    >>> best_tokens(Projection(weight=torch.eye(3)), torch.tensor([[0.0, 2.0, 1.0]]))
    tensor([1])
    """
    chunks = hidden_RD.to(projection.weight.dtype).split(max(1, CHUNK_ELEMENTS // len(projection.weight)))
    return torch.cat([projection(hidden_CD).argmax(dim=1) for hidden_CD in chunks])

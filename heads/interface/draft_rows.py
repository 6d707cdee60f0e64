"""The rows of a draft layer for committed slots: their keys and values, and the state that the next row reads.

A row joins a token x_{P+1} with the backbone's state at P. So the row of a slot is made of the slot's own token and of
the state at the slot before, and a text's first slot has no row (EAGLE, Li et al. 2024, section 4.1, "feature and
shifted token").
"""
# B text, A slot of one commit, S committed slot, G key-value head, E head width, D model width, R remaining text

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.model import CommitPlan
from heads.interface.draft_attention import seen_as_bias

CONTEXT_STEP = 256
"""A context has a multiple of so many slots, so that drafting is compiled for few shapes."""
CONTEXT = ("context_keys", "context_values", "context_bias")
"""Names of the tensors that all nodes of a text share: keys and values of its committed rows, and their mask."""


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """A row for each committed slot.

    Attributes:
        cache: layer 0 holds the rows' keys and values, layer 1 each slot's state in place of keys, for rolling back.
        real_BS: False where a slot only pads.
        newest_BD: the state at the last committed position.
        position_B: that position.
    """

    cache: TreeCache
    real_BS: Tensor
    newest_BD: Tensor
    position_B: Tensor

    def read_by(self, states_BAD: Tensor) -> Tensor:
        """(B, A, D): the states that the rows of new slots read: for each slot the state at the slot before."""
        return torch.cat([self.newest_BD[:, None], states_BAD[:, :-1]], dim=1)

    def add(
        self, keys_BAGE: Tensor, values_BAGE: Tensor, states_BAD: Tensor, positions_BA: Tensor, plan: CommitPlan
    ) -> DraftRows:
        """These rows and those of the slots that `plan` commits."""
        self.cache.update(keys_BAGE.transpose(1, 2), values_BAGE.transpose(1, 2), 0)
        self.cache.update(states_BAD[:, None], states_BAD[:, None, :, :0], 1)
        self.cache.commit(None, positions_BA.shape[1])
        any_B = plan.valid_BA.any(dim=1)
        return DraftRows(
            cache=self.cache,
            real_BS=torch.cat([self.real_BS, plan.valid_BA], dim=1),
            newest_BD=torch.where(any_B[:, None], plan.last(states_BAD), self.newest_BD),
            position_B=torch.where(any_B, plan.last(positions_BA), self.position_B),
        )

    def keep_rows(self, rows_R: Tensor) -> DraftRows:
        self.cache.keep_rows(rows_R)
        return DraftRows(
            cache=self.cache,
            real_BS=self.real_BS[rows_R],
            newest_BD=self.newest_BD[rows_R],
            position_B=self.position_B[rows_R],
        )

    def keep_slots(self, num_slots: int) -> DraftRows:
        """The rows as they were when the first `num_slots` slots were committed."""
        real_BS = self.real_BS[:, :num_slots]
        last_B = (real_BS * torch.arange(num_slots, device=real_BS.device)).argmax(dim=1)
        newest_BD = self.cache.layers[1].keys[torch.arange(len(last_B), device=last_B.device), 0, last_B]
        self.cache.keep_slots(num_slots)
        return DraftRows(cache=self.cache, real_BS=real_BS, newest_BD=newest_BD, position_B=real_BS.sum(dim=1) - 1)

    def context(self) -> dict[str, Tensor]:
        """`CONTEXT`: keys and values (B, G, S, E) and the bias (B, S) that hides slots without a row.

        The number of slots is `context_slots`.
        """
        layer, length = self.cache.layers[0], self.real_BS.shape[1]
        slots = context_slots(length, layer.keys)
        has_row_BS = self.real_BS & (self.real_BS.cumsum(dim=1) > 1)
        bias_BS = seen_as_bias(nn.functional.pad(has_row_BS, (0, slots - length)), layer.keys.dtype)
        return dict(zip(CONTEXT, (layer.keys[:, :, :slots], layer.values[:, :, :slots], bias_BS), strict=True))


def context_slots(length: int, keys_BGSE: Tensor) -> int:
    """The slots of a context of this length: a multiple of `CONTEXT_STEP`, or all of the cache's buffer if it has less.

    >>> context_slots(3, torch.zeros(1, 1, 300, 8)), context_slots(257, torch.zeros(1, 1, 300, 8))
    (256, 300)
    """
    return min(-(-length // CONTEXT_STEP) * CONTEXT_STEP, keys_BGSE.shape[2])


def shifted(tokens_BT: Tensor, ahead: int) -> Tensor:
    """(B, T): x_{t+ahead} at t; zeros beyond the block, where no head is trained.

    >>> shifted(torch.tensor([[5, 6, 7]]), 2).tolist()
    [[7, 0, 0]]
    """
    return nn.functional.pad(tokens_BT[:, ahead:], (0, min(ahead, tokens_BT.shape[1])))


def no_rows(states_BAD: Tensor, positions_BA: Tensor) -> DraftRows:
    """No rows yet, with the dtypes and devices of the states and positions to come."""
    return DraftRows(
        cache=TreeCache(),
        real_BS=torch.zeros_like(positions_BA[:, :0], dtype=torch.bool),
        newest_BD=torch.zeros_like(states_BAD[:, 0]),
        position_B=torch.zeros_like(positions_BA[:, 0]),
    )

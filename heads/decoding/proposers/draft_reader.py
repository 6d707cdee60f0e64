"""A draft model's cache: it grows along a chain, and is rolled back to the accepted part of the chain.

Each drafted token is a pass of its own, so a pass must cost little besides the model: texts without padding need no
mask, and the host does not wait for the device. Where rows keep different numbers of slots, the `CommitPlan` that every
cache follows leaves masked holes, and a mask is needed from then on.
"""
# B row, T prompt position, U newly read slot, V vocabulary, D model width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.backbone.loading import max_positions
from heads.backbone.masks import causal
from heads.backbone.model import Backbone, CommitPlan, Pass
from heads.backbone.recurrent.cache import RecurrentCache


class DraftReader:
    """One draft model on one batch.

    Args:
        backbone: the draft model, without heads.
        tokens_BT: the prompts.
        valid_BT: False for padding on the left.
    """

    def __init__(self, backbone: Backbone, tokens_BT: Tensor, valid_BT: Tensor) -> None:
        self.backbone = backbone
        self.num_positions = max_positions(backbone.model)
        self.unembed = backbone.projection.without_norm()
        self.committed, _ = backbone.read(tokens_BT, valid_BT)
        unpadded, recurrent = bool(valid_BT.all()), backbone.recurrence is not None
        self.dense = unpadded and backbone.mask_style.window is None and not recurrent  # no slot has to be masked
        self.begin_chain()

    def read_on(self, tokens_BT: Tensor, valid_BT: Tensor) -> None:
        """Read more of the prompts, before the first chain."""
        self.committed, _ = self.backbone.read(tokens_BT, valid_BT, state=self.committed)
        self.dense &= bool(valid_BT.all())
        self.begin_chain()

    def begin_chain(self) -> None:
        self.passes: list[Pass] = []
        self.states: list[Any] = []  # recurrent layers' states after each pass
        self.chain_is_dense = self.dense
        self.next_position_B1 = self.committed.next_position_B[:, None]  # for a dense chain
        self.chain_state = self.committed  # for any other chain, whose slots are committed one by one until `keep`

    def read(self, tokens_BU: Tensor, fillers: Sequence[int] = ()) -> Tensor:
        """Read further tokens of the chain and return the logits (B, V) after the last one.

        Args:
            fillers: how many of each row's first slots are padding, where a chain begins; by default none.
        """
        self.chain_is_dense &= not any(fillers)
        read = self._read_dense if self.chain_is_dense else self._read_masked
        output = read(tokens_BU.to(self.backbone.device), fillers)
        self.passes.append(output)
        return self.unembed(output.final_BND[:, -1])

    def _read_dense(self, tokens_BU: Tensor, _: Sequence[int]) -> Pass:
        """Read without a mask, as every slot is a token of its row, in order."""
        positions_BU = self.next_position_B1
        if (new := tokens_BU.shape[1]) > 1:
            positions_BU = positions_BU + torch.arange(new, device=tokens_BU.device)
        cache = self.committed.cache
        final_BUD, _taps = self.backbone.forward(
            tokens_BU, attention_mask=None, position_ids=positions_BU, past_key_values=cache, use_cache=True
        )
        cache.commit(None, new)
        self.next_position_B1 = positions_BU[:, -1:] + 1
        return Pass(tokens_BN=tokens_BU, positions_BN=positions_BU, taps={}, final_BND=final_BUD)

    def _read_masked(self, tokens_BU: Tensor, fillers: Sequence[int]) -> Pass:
        slots_U = torch.arange(tokens_BU.shape[1], device=tokens_BU.device)
        first_B1 = tokens_BU.new_tensor(fillers or [0] * len(tokens_BU))[:, None]
        valid_BU = slots_U >= first_B1
        depth_BU = self.within_positions((slots_U - first_B1).clamp(min=0))
        output = self.backbone.verify(self.chain_state, tokens_BU, depth_BU, causal(valid_BU))
        self.chain_state = self.backbone.commit(self.chain_state, output, CommitPlan.whole(valid_BU))
        if isinstance(cache := self.chain_state.cache, RecurrentCache):
            self.states.append(cache.states())
        return output

    def within_positions(self, depth_BU: Tensor) -> Tensor:
        """Depths capped at the last position: rows near their end are drafted for as long as the others."""
        if self.num_positions is None:
            return depth_BU
        return depth_BU.minimum(self.num_positions - 1 - self.chain_state.next_position_B[:, None])

    def keep(self, first: Sequence[int], count: Sequence[int]) -> None:
        """Keep `count[b]` slots of row b, from slot `first[b]` of the chain on, and drop the rest of the chain."""
        if not self.passes:
            return
        read = Pass(
            tokens_BN=torch.cat([output.tokens_BN for output in self.passes], dim=1),
            positions_BN=torch.cat([output.positions_BN for output in self.passes], dim=1),
            taps={},
            final_BND=torch.cat([output.final_BND for output in self.passes], dim=1),
        )
        paths = [list(range(start, start + length)) for start, length in zip(first, count, strict=True)]
        self.committed.cache.reopen(read.tokens_BN.shape[1])
        self.committed = self.backbone.commit(self.committed, read, CommitPlan.from_paths(paths, read.tokens_BN.device))
        if isinstance(cache := self.committed.cache, RecurrentCache):  # the slots of the first pass are all kept
            unread = self.passes[0].tokens_BN.shape[1]
            cache.set_states([self.states[max(0, path[-1] + 1 - unread)] for path in paths])
        self.dense &= len(set(count)) == 1
        self.begin_chain()

    def keep_rows(self, rows_R: Tensor) -> None:
        """Keep these rows, as the others have ended; to be called between `keep` and `read`."""
        self.committed = self.committed.keep_rows(rows_R.to(self.backbone.device))
        self.begin_chain()

    def keep_slots(self, num_slots: int) -> None:
        """Roll a single row back to its first tokens, one slot each."""
        self.committed = self.committed.keep_slots(num_slots)
        self.begin_chain()

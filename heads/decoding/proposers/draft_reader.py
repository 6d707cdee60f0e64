"""What a draft model has read: a cache that grows along its own chain, and goes back to what was accepted of it.

Reading is one pass a token, so what a pass costs besides the model itself is kept small: a single sequence without
padding needs no mask, and nothing is asked of the device. Rows that keep different numbers of slots leave masked holes,
by the same `CommitPlan` that every cache follows.
"""
# B row, T prompt position, U newly read slot, V vocabulary, D model width

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.backbone.loading import max_positions
from heads.backbone.masks import causal
from heads.backbone.model import Backbone, CommitPlan, Pass


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
        self.kept, _ = backbone.read(tokens_BT, valid_BT)
        self.solid = backbone.mask_style.window is None and bool(valid_BT.all())  # there is nothing to mask in `kept`
        self.begin_chain()

    def read_on(self, tokens_BT: Tensor, valid_BT: Tensor) -> None:
        """More of the prompts, before the first chain."""
        self.kept, _ = self.backbone.read(tokens_BT, valid_BT, state=self.kept)
        self.solid &= bool(valid_BT.all())
        self.begin_chain()

    def begin_chain(self) -> None:
        self.passes: list[Pass] = []
        self.chain_is_solid = self.solid
        self.next_position_B1 = self.kept.next_position_B[:, None]  # of a solid chain
        self.ahead = self.kept  # of another chain: its slots are committed one after another, until `keep`

    def read(self, tokens_BU: Tensor, fillers: Sequence[int] = ()) -> Tensor:
        """Read behind all that was read so far; logits (B, V) after the last token.

        Args:
            fillers: for each row how many of the first slots only fill up, where the chain begins; by default none.
        """
        self.chain_is_solid &= not any(fillers)
        read = self._read_solid if self.chain_is_solid else self._read_masked
        output = read(tokens_BU.to(self.backbone.device), fillers)
        self.passes.append(output)
        return self.unembed(output.final_BND[:, -1])

    def _read_solid(self, tokens_BU: Tensor, _: Sequence[int]) -> Pass:
        """Every slot is a token of its row, in order: the model needs no mask of ours."""
        positions_BU = self.next_position_B1
        if (new := tokens_BU.shape[1]) > 1:
            positions_BU = positions_BU + torch.arange(new, device=tokens_BU.device)
        cache = self.kept.cache
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
        output = self.backbone.verify(self.ahead, tokens_BU, depth_BU, causal(valid_BU))
        self.ahead = self.backbone.commit(self.ahead, output, CommitPlan.whole(valid_BU))
        return output

    def within_positions(self, depth_BU: Tensor) -> Tensor:
        """Depths that have a position: rows near their end are drafted on while others have further to go."""
        if self.num_positions is None:
            return depth_BU
        return depth_BU.minimum(self.num_positions - 1 - self.ahead.next_position_B[:, None])

    def keep(self, first: Sequence[int], count: Sequence[int]) -> None:
        """Of what was read since the last call, keep `count[b]` slots of row b from `first[b]` on."""
        if not self.passes:
            return
        read = Pass(
            tokens_BN=torch.cat([output.tokens_BN for output in self.passes], dim=1),
            positions_BN=torch.cat([output.positions_BN for output in self.passes], dim=1),
            taps={},
            final_BND=torch.cat([output.final_BND for output in self.passes], dim=1),
        )
        paths = [list(range(start, start + length)) for start, length in zip(first, count, strict=True)]
        self.kept.cache.reopen(read.tokens_BN.shape[1])
        self.kept = self.backbone.commit(self.kept, read, CommitPlan.from_paths(paths, read.tokens_BN.device))
        self.solid &= len(set(count)) == 1
        self.begin_chain()

    def keep_rows(self, rows_R: Tensor) -> None:
        """The other rows have ended; between `keep` and `read`."""
        self.kept = self.kept.keep_rows(rows_R.to(self.backbone.device))
        self.begin_chain()

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

from heads.backbone import Backbone, CommitPlan, Pass
from heads.loading import max_positions
from heads.masks import causal


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
        self.kept, _ = backbone.prefill(tokens_BT.to(backbone.device), valid_BT.to(backbone.device))
        self.ahead = self.kept  # with the chain, whose slots are committed one after another until `keep`
        self.solid = backbone.mask_style.window is None and bool(valid_BT.all())  # there is nothing to mask in `kept`
        self.solid_ahead = self.solid
        self.passes: list[Pass] = []

    def read(self, tokens_BU: Tensor, fillers: Sequence[int] | None = None) -> Tensor:
        """Read behind all that was read so far; logits (B, V) after the last token.

        Args:
            fillers: for each row how many of the first slots only fill up.
        """
        tokens_BU = tokens_BU.to(self.backbone.device)
        slots = torch.arange(tokens_BU.shape[1], device=tokens_BU.device)
        first_B1 = torch.zeros_like(tokens_BU[:, :1]) if fillers is None else tokens_BU.new_tensor(fillers)[:, None]
        valid_BU = slots >= first_B1
        self.solid_ahead &= not any(fillers or ())
        if self.solid_ahead and len(slots) == 1:
            output = self._read_unmasked(tokens_BU)
        else:
            depth_BU = self.within_positions((slots - first_B1).clamp(min=0))
            output = self.backbone.verify(self.ahead, tokens_BU, depth_BU, causal(valid_BU))
        self.ahead = self.backbone.commit(self.ahead, output, CommitPlan.whole(valid_BU))
        self.passes.append(output)
        return self.unembed(output.final_BND[:, -1])

    def _read_unmasked(self, tokens_B1: Tensor) -> Pass:
        """One token behind slots that all are tokens of its row."""
        positions_B1 = self.ahead.next_position_B[:, None]
        final_B1D, _ = self.backbone.forward(
            tokens_B1, attention_mask=None, position_ids=positions_B1, past_key_values=self.ahead.cache, use_cache=True
        )
        return Pass(tokens_BN=tokens_B1, positions_BN=positions_B1, taps={}, final_BND=final_B1D)

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
        self.ahead, self.solid_ahead, self.passes = self.kept, self.solid, []

    def keep_rows(self, rows_R: Tensor) -> None:
        """The other rows have ended; between `keep` and `read`."""
        self.kept = self.ahead = self.kept.keep_rows(rows_R.to(self.backbone.device))

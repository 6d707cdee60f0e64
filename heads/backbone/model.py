"""A backbone's passes: read a prompt, verify a token tree, commit one path of it.

A pass gives the decoder a 4-D mask, positions counted by depth, and a cache that can keep one path of a tree.
heads/backbone/wrapped.py finds the decoder, its layers and its output layer in a model.
"""
# B batch, T position, N tree node, S cache slot, A accepted slot, D model width, V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.backbone.cache import TreeCache
from heads.backbone.masks import causal
from heads.backbone.recurrent.cache import RecurrentCache
from heads.backbone.recurrent.probe import check_recurrence
from heads.backbone.state import (
    BackboneState,
    CommitPlan,
    HiddenTaps,
    Pass,
    StackTap,
    Tap,
    Taps,
    hidden_taps,
)
from heads.backbone.support import (
    read_layer_type,
)
from heads.backbone.wrapped import WrappedModel

__all__ = ["Backbone", "BackboneState", "CommitPlan", "Pass", "Tap", "Taps", "read_layer_type"]

PREFILL_TOKENS = 1024
"""Tokens of a prompt that one pass reads, unless the whole prompt has to be read in one pass."""


class Backbone(WrappedModel):
    """A causal LM that heads are attached to. It is no `nn.Module`, so heads that hold it register none of its parts.

    Args:
        model: as `WrappedModel` takes it.
        check_projection: as `WrappedModel` takes it; where layers are recurrent, tree passes are compared with plain
            ones too.

    Raises:
        ValueError: a model that `WrappedModel` refuses, or recurrent layers that do not follow a tree.
    """

    def __init__(self, model: Any, *, check_projection: bool = True) -> None:
        super().__init__(model, check_projection=check_projection)
        if check_projection and self.device.type != "meta" and self.recurrence is not None:
            check_recurrence(self)

    def prefill(self, tokens_BT: Tensor, valid_BT: Tensor, taps: Sequence[Tap] = ()) -> tuple[BackboneState, Pass]:
        """Run a prompt in one pass, however long. `valid_BT` is False for padding, which lies on the left."""
        return self.read(tokens_BT, valid_BT, taps, chunk=tokens_BT.shape[1])

    def read(
        self,
        tokens_BT: Tensor,
        valid_BT: Tensor,
        taps: Sequence[Tap] = (),
        state: BackboneState | None = None,
        *,
        commit: Callable[[Pass, CommitPlan], None] | None = None,
        chunk: int | None = None,
    ) -> tuple[BackboneState, Pass]:
        """Run a prompt, or the tokens that follow a state, in passes of at most `PREFILL_TOKENS` tokens.

        Short passes keep masks small: 8192 tokens need masks of at most 1024 x 8192. One pass reads a prompt that
        crosses the border of the rotary embeddings (heads/backbone/rope.py), so that all its keys are rotated alike,
        and any prompt of a model that cannot read several tokens from a recurrent state.

        Args:
            valid_BT: False for padding, which lies on the left.
            state: what is committed already; None: nothing.
            commit: called with each pass and its plan, which commits every token; heads update their state with it.
            chunk: tokens of a pass, in place of the above.

        Returns:
            The state, and the last pass.
        """
        self.refresh()
        tokens_BT, valid_BT = tokens_BT.to(self.heads_device), valid_BT.to(self.heads_device)
        batch, length = tokens_BT.shape
        state = state or BackboneState.empty(batch, tokens_BT.device, self.new_cache(length))
        plain = self.mask_style.window is None and bool(valid_BT.all())
        crosses = self.rope_border is not None and length > self.rope_border.tokens
        continues = self.recurrence is None or self.recurrence.continues
        chunk = chunk or (length if crosses or not continues else PREFILL_TOKENS)
        for start in range(0, length, chunk):
            tokens_BN, valid_BN = (x[:, start : start + chunk] for x in (tokens_BT, valid_BT))
            depth_BN = (valid_BN.long().cumsum(dim=1) - 1).clamp(min=0)
            first, positions_BN = not state.positions_BS.shape[1], state.next_position_B[:, None] + depth_BN
            # Without padding, windows and committed tokens the model's own causal mask is enough.
            sees_BNN = None if plain and first else causal(valid_BN)
            mask = None if sees_BNN is None else self._mask(state, positions_BN, sees_BNN)
            with self._recurring(state.cache, taps, None if first or continues else sees_BNN, valid_BN):
                output = self._pass(state, tokens_BN, positions_BN, mask, taps)
            plan = CommitPlan.whole(valid_BN)
            if commit is not None:
                commit(output, plan)
            state = self.commit(state, output, plan)
        return state, output

    def check_length(self, valid_BT: Tensor, longest: int) -> None:
        """Refuse a prompt whose text of at most `longest` tokens, padding included, would cross a border of the RoPE.

        Raises:
            ValueError: the text would (heads/backbone/rope.py).
        """
        if self.rope_border is not None:
            self.rope_border.refuse(prompt=valid_BT.shape[1], padded=not bool(valid_BT.all()), longest=longest)

    def verify(
        self,
        state: BackboneState,
        tokens_BN: Tensor,
        depth_N: Tensor,
        sees_NN: Tensor,
        taps: Sequence[Tap] = (),
    ) -> Pass:
        """One pass over the nodes of a token tree, each seeing the committed tokens and its own ancestors.

        Args:
            state: its cache holds the pass's slots as pending until `commit`.
            tokens_BN: the root comes first.
            depth_N: 0 for the root; a node's position is its row's next position plus its depth. (B, N) where rows
                differ.
            sees_NN: True where a node sees another: its ancestors and itself; (B, N, N) where rows differ.
            taps: what to record besides the final hidden states; stacks of heads run after the decoder.
        """
        tokens_BN, depth_N, sees_NN = (x.to(self.heads_device) for x in (tokens_BN, depth_N, sees_NN))
        positions_BN = state.next_position_B[:, None] + depth_N
        mask = self._mask(state, positions_BN, sees_NN)
        with self._recurring(state.cache, taps, sees_NN, tokens_BN):
            return self._pass(state, tokens_BN, positions_BN, mask, taps)

    def read_embeddings(self, state: BackboneState, embeddings_BD: Tensor, taps: Sequence[Tap] = ()) -> Pass:
        """One pass over one new slot a row, whose input is an embedding instead of a token; its token ids are 0.

        heads/decoding/superposed/checks.py finds out whether a model reads embeddings as it reads tokens.
        """
        positions_B1 = state.next_position_B[:, None]
        itself_11 = torch.ones(1, 1, dtype=torch.bool, device=positions_B1.device)
        mask = self._mask(state, positions_B1, itself_11)
        tokens_B1, embeddings_B1D = torch.zeros_like(positions_B1), embeddings_BD[:, None].to(self.device)
        with self._recurring(state.cache, taps, itself_11, tokens_B1):
            return self._pass(state, tokens_B1, positions_B1, mask, taps, inputs_embeds=embeddings_B1D)

    def new_cache(self, num_slots: int) -> TreeCache:
        return TreeCache(room=num_slots) if self.recurrence is None else self.recurrence.new_cache(num_slots)

    def _recurring(
        self, cache: Any, taps: Sequence[Tap], sees_NN: Tensor | None, like_BN: Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which recurrent layers run over the nodes of `sees_NN`, or over whole rows where it is None.

        Args:
            like_BN: False for padding where whole rows are read; over nodes only its number of rows counts.
        """
        if self.recurrence is None:
            return contextlib.nullcontext()
        owners = [tap.heads for tap in taps if isinstance(tap, StackTap)]
        if sees_NN is None:
            return self.recurrence.over_whole_rows(cache, owners, like_BN)
        return self.recurrence.over_nodes(cache, owners, sees_NN, len(like_BN))

    def _mask(self, state: BackboneState, positions_BN: Tensor, sees_NN: Tensor) -> Any:
        batch, nodes = positions_BN.shape
        committed_BNS = state.valid_BS[:, None, :].expand(batch, nodes, -1)
        may_attend_BNS = torch.cat([committed_BNS, sees_NN.expand(batch, nodes, nodes)], dim=2)
        slot_positions_BS = torch.cat([state.positions_BS, positions_BN], dim=1)
        return self.mask_style.finish(may_attend_BNS, positions_BN, slot_positions_BS, self.dtype)

    def _pass(
        self,
        state: BackboneState,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        mask: Any,
        taps: Sequence[Tap],
        **inputs: Tensor,
    ) -> Pass:
        final_BND, recorded = self.forward(
            tokens_BN,
            taps=hidden_taps(taps),
            attention_mask=mask,
            position_ids=positions_BN,
            past_key_values=state.cache,
            use_cache=True,
            **inputs,
        )
        found = self.run_stacks(taps, recorded, positions_BN, mask, state.cache)
        return Pass(tokens_BN=tokens_BN, positions_BN=positions_BN, taps=found, final_BND=final_BND)

    def run_stacks(
        self, taps: Sequence[Tap], recorded: HiddenTaps, positions_BN: Tensor, mask: Any, cache: Any
    ) -> Taps:
        """All taps: stacks are run on the recorded hidden states.

        Args:
            mask: the decoder's; None where the model made its own causal mask.
        """
        stacks = [tap for tap in taps if isinstance(tap, StackTap)]
        if stacks and mask is None:  # not every layer is causal without a mask
            all_BN = torch.ones_like(positions_BN, dtype=torch.bool)
            mask = self.mask_style.finish(causal(all_BN), positions_BN, positions_BN, self.dtype)
        found = {tap: tap.heads.run_stack(tap.index, recorded[tap.reads], positions_BN, mask, cache) for tap in stacks}
        return {tap: found[tap] if isinstance(tap, StackTap) else recorded[tap] for tap in taps}

    def commit(self, state: BackboneState, output: Pass, plan: CommitPlan) -> BackboneState:
        """Commit the planned slots of the last pass; the other slots are dropped."""
        state.cache.commit(None if plan.in_place else plan.slots_BA, plan.slots_BA.shape[1])
        if isinstance(state.cache, RecurrentCache):
            state.cache.commit_states(plan.paths())
        positions_BA = plan.select(output.positions_BN)
        return BackboneState(
            cache=state.cache,
            valid_BS=torch.cat([state.valid_BS, plan.valid_BA], dim=1),
            positions_BS=torch.cat([state.positions_BS, positions_BA], dim=1),
            next_position_B=state.next_position_B + plan.valid_BA.sum(dim=1),
        )

"""Any Hugging Face causal LM as a backbone: taps, projection, prefill, one pass over a token tree, commit of a path.

No modelling code is copied. A backbone's own decoder runs with a 4-D mask, with positions counted by depth and with a
cache that can keep one path of a tree. Wrapping a model probes what this file assumes about it and refuses in one
sentence where it does not hold. The four facts used (masks taken as they are, positions given, hooks on layers, caches
that are written through `update`) hold for transformers 5; tests/heads/backbone/test_backbone.py checks them per
architecture.
"""
# B batch, T position, N tree node, S cache slot, A accepted slot, D model width, V vocabulary

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.gradient_gate import gate
from heads.backbone.masks import FULL, causal, read_mask_style
from heads.backbone.projection import Projection, read_projection
from heads.backbone.recurrent.cache import RecurrentCache
from heads.backbone.recurrent.probe import check_recurrence
from heads.backbone.recurrent.recurrence import Recurrence, find_recurrence
from heads.backbone.rope import find_rope_border
from heads.backbone.state import (
    BackboneState,
    CommitPlan,
    HiddenTap,
    HiddenTaps,
    Pass,
    StackTap,
    Tap,
    Taps,
    hidden_taps,
    recording,
)
from heads.backbone.support import (
    check_logits,
    find_final_norm,
    find_layers,
    read_layer_type,
    read_output_path,
    refuse_offloaded_weights,
    refuse_what_cannot_roll_back,
    refuse_what_is_no_model,
    same_numbers,
    unwrap,
)

__all__ = ["Backbone", "BackboneState", "CommitPlan", "Pass", "Tap", "Taps", "read_layer_type"]

PREFILL_TOKENS = 1024
"""The most tokens of a prompt that one pass reads."""


class Backbone:
    """A causal LM that heads are attached to. A plain object: families that hold it register none of its modules.

    Args:
        model: a `transformers` causal LM, or a `PeftModel` or `torch.compile` around one.
        check_projection: compare the projection record with the model's own logits on four tokens; on the meta device
            there is nothing to compare.

    Raises:
        ValueError: no model, one whose cache cannot roll back, that takes no tree mask, or whose logits the record
            misses.
    """

    def __init__(self, model: Any, *, check_projection: bool = True) -> None:
        refuse_what_is_no_model(model)
        self.model = unwrap(model)
        self.gradient_scale = 1.0
        """LR_MB / LR_B: factor on gradients of heads where they enter a trained backbone."""
        self._read_model()
        self._output_path = read_output_path(self.model)
        if check_projection and self.device.type != "meta":
            check_logits(self.model, self._project)
            if self.recurrence is not None:
                check_recurrence(self)

    def _read_model(self) -> None:
        """What passes need of the model, found once; `refresh` finds it again where parts were replaced."""
        model = self.model
        self.config = model.config.get_text_config()
        refuse_what_cannot_roll_back(model)
        refuse_offloaded_weights(model)
        self.mask_style = read_mask_style(self.config)
        self.decoder = model.get_decoder()
        self._embeddings = model.get_input_embeddings()  # read at every pass, and transformers searches for them
        self._unembedding = model.get_output_embeddings()
        self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        rotary = getattr(self.decoder, "rotary_emb", None)
        self._rotary_by_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        self.rope_border = find_rope_border(self.decoder)
        self.norm = find_final_norm(self.decoder)
        self.recurrence: Recurrence | None = find_recurrence(model, self.config, self.layers)
        """How recurrent layers follow a tree; None where there are none."""
        last = self.num_layers - 1 if self.recurrence is None else self.recurrence.attention
        self.attention_layer = self.layers[last]
        """The last layer that attends over the text, without a recurrent state where there is one: heads copy it."""
        self.attention_tap = self.num_layers - 1 - last
        self._layer_takes = frozenset(inspect.signature(self.attention_layer.forward).parameters)

    hidden_size = property(lambda self: int(self.config.hidden_size))
    vocab_size = property(lambda self: int(self._embeddings.weight.shape[0]))
    num_layers = property(lambda self: len(self.layers))
    dtype = property(lambda self: self._embeddings.weight.dtype)
    device = property(lambda self: self._embeddings.weight.device)
    heads_device = property(lambda self: self._unembedding.weight.device)
    """The device of the unembedding. Heads run there, and a backbone on several devices hands its states over there."""

    @property
    def name(self) -> str:
        named = (getattr(config, "_name_or_path", "") for config in (self.config, self.model.config))
        return next(filter(None, map(str, named)), type(self.model).__name__)  # image-text models name the whole alone

    @property
    def projection(self) -> Projection:
        """From hidden states before the final norm to logits. Read at each call: sharding swaps the tensors."""
        return read_projection(self.model, self.norm)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings E(x), as the embedding module gives them; for heads, so through the gradient gate."""
        return gate(self._embeddings(tokens.to(self.device)).to(self.heads_device), self.gradient_scale)

    def logits(self, final_ND: Tensor) -> Tensor:
        """Logits from hidden states after the final norm: the model's own output layer, with its hooks and adapters."""
        output_layer = self.model.get_output_embeddings()
        if isinstance(output_layer, nn.Embedding):  # looks rows up and multiplies nothing
            return self.projection.without_norm()(final_ND)
        return self.projection.finish(output_layer(final_ND))

    def _project(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits by the output layer, and by the record, final norm included."""
        final_BTD, taps = self.forward(tokens_BT, taps=[0], use_cache=False)
        return self.logits(final_BTD), self.projection(taps[0])

    def refresh(self) -> None:
        """Look at the model again where its parts were replaced or hooked since; every text that is read begins so.

        Raises:
            ValueError: its logits are now computed in a way that cannot be followed here, or it has no weights.
        """
        if self.device.type == "meta":
            raise ValueError(
                f"{self.name} is on the meta device, where tensors have shapes and no numbers; load its weights first."
            )
        output_path = read_output_path(self.model)
        if output_path != self._output_path:
            self._read_model()
            check_logits(self.model, lambda tokens_BT: self._project(tokens_BT)[:1])
            self._output_path = output_path

    @torch.no_grad()
    def output_layer_is_its_record(self) -> bool:
        """Whether the output layer multiplies with its weight and adds its bias; an adapter or a hook does more.

        Heads that share the unembedding are scored with the record.
        """
        output_layer = self.model.get_output_embeddings()
        hooks = output_layer._forward_hooks or output_layer._forward_pre_hooks
        if type(output_layer) is nn.Linear and not hooks and "forward" not in vars(output_layer):
            return True
        weight_VD = self.projection.weight
        numbers_4D = torch.arange(4 * weight_VD.shape[1], device=weight_VD.device).view(4, -1)
        hidden_4D = numbers_4D.sin().to(weight_VD.dtype)  # no direction that a low rank could miss
        return same_numbers(self.logits(hidden_4D), self.projection.without_norm()(hidden_4D))

    def forward(self, tokens_BT: Tensor, *, taps: Sequence[HiddenTap] = (), **inputs: Any) -> tuple[Tensor, HiddenTaps]:
        """The decoder's own forward: the hidden states after the final norm, and the taps.

        With `inputs_embeds` among the inputs these are read in place of the tokens.
        """
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = tokens_BT.to(self.device)
        with recording(self.layers, taps, self.heads_device) as recorded:
            output = self.decoder(**inputs)
        final_BTD = output.last_hidden_state.to(self.heads_device)
        if "final" in taps:
            recorded["final"] = final_BTD
        return final_BTD, recorded

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
        """Run a prompt, or what follows a state's tokens, in passes of at most `PREFILL_TOKENS` tokens.

        Masks stay small: 8192 tokens need masks of at most 1024 x 8192. A prompt that is longer than a limit of the
        rotary embeddings (heads/backbone/rope.py) is read in one pass, so that all its keys are rotated alike.

        Args:
            valid_BT: False for padding, which lies on the left.
            state: what is committed already; None: nothing.
            commit: called with each pass and its plan, which commits every token; heads update their state with it.
            chunk: tokens of a pass, where it is not `PREFILL_TOKENS`.

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
            # Causal and nothing else: the model needs no mask of ours.
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
        """Before a prompt is decoded to at most `longest` tokens, padding included.

        Raises:
            ValueError: a text over a border of the rotary embeddings.
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
            state: what is committed; its cache holds the pass's slots as pending until `commit`.
            tokens_BN: the node tokens, the root first.
            depth_N: depth of each node, the root's 0; a node's position is its row's next position plus its depth.
                (B, N) where rows differ.
            sees_NN: True where a node sees another: its ancestors and itself; (B, N, N) where rows differ.
            taps: what to record besides the final hidden states; stacks of heads run after the decoder.
        """
        tokens_BN, depth_N, sees_NN = (x.to(self.heads_device) for x in (tokens_BN, depth_N, sees_NN))
        positions_BN = state.next_position_B[:, None] + depth_N
        mask = self._mask(state, positions_BN, sees_NN)
        with self._recurring(state.cache, taps, sees_NN, tokens_BN):
            return self._pass(state, tokens_BN, positions_BN, mask, taps)

    def read_embeddings(self, state: BackboneState, embeddings_BD: Tensor, taps: Sequence[Tap] = ()) -> Pass:
        """One pass over one new slot of each row, whose input is an embedding in place of a token's.

        `check_embeddings` says whether a model reads embeddings as it reads tokens. The pass's token ids are 0.
        """
        positions_B1 = state.next_position_B[:, None]
        itself_11 = torch.ones(1, 1, dtype=torch.bool, device=positions_B1.device)
        mask = self._mask(state, positions_B1, itself_11)
        tokens_B1, embeddings_B1D = torch.zeros_like(positions_B1), embeddings_BD[:, None].to(self.device)
        with self._recurring(state.cache, taps, itself_11, tokens_B1):
            return self._pass(state, tokens_B1, positions_B1, mask, taps, inputs_embeds=embeddings_B1D)

    def new_cache(self, num_slots: int) -> TreeCache:
        """An empty cache that allocates so many slots in advance."""
        return TreeCache(room=num_slots) if self.recurrence is None else self.recurrence.new_cache(num_slots)

    def _recurring(
        self, cache: Any, taps: Sequence[Tap], sees_NN: Tensor | None, like_BN: Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """How recurrent layers run within it: over nodes that see one another, or (None) over whole rows.

        Args:
            like_BN: of whole rows, False for padding; else any tensor over the slots.
        """
        if self.recurrence is None:
            return contextlib.nullcontext()
        owners = [tap.heads for tap in taps if isinstance(tap, StackTap)]
        if sees_NN is None:
            return self.recurrence.over_whole_rows(cache, owners, like_BN)
        return self.recurrence.over_nodes(cache, owners, sees_NN, len(like_BN))

    def _mask(self, state: BackboneState, positions_BN: Tensor, sees_NN: Tensor) -> Any:
        """What new slots attend to: all that is committed, and those of the pass that they see."""
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
        """The taps, those of stacks computed from the hidden states that were recorded.

        Args:
            mask: the decoder's; None where the pass is causal and nothing else.
        """
        stacks = [tap for tap in taps if isinstance(tap, StackTap)]
        if stacks and mask is None:  # some kinds of attention are causal by their mask alone
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

    def run_layer(
        self,
        layer: nn.Module,
        hidden_BTD: Tensor,
        positions_BT: Tensor,
        mask: Any = None,
        cache: Any = None,
        *,
        values: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Call a decoder layer of the backbone's class with the model's own rotary module.

        Args:
            layer: a layer of the same class as the backbone's.
            mask: what `MaskStyle.finish` returns; of a dict by layer type the layer's own entry is taken.
            cache: a cache that the layer writes under its own `layer_idx`, or None.
            values: tensors to run the layer with in place of its own, by name.
        """
        layer_type = read_layer_type(layer) if self.mask_style.by_layer_type else FULL
        given: dict[str, Any] = {
            "attention_mask": in_dtype_of(hidden_BTD, mask[layer_type] if isinstance(mask, dict) else mask),
            "position_ids": positions_BT,
            "past_key_values": cache,
            "layer_past": cache,
            "use_cache": cache is not None,
            "alibi": None,  # a backbone with it is refused
        }
        if "position_embeddings" in self._layer_takes and self.decoder.rotary_emb is not None:
            given["position_embeddings"] = self._rotary(hidden_BTD, positions_BT, layer_type)
        taken = {name: value for name, value in given.items() if name in self._layer_takes}
        output = (
            layer(hidden_BTD, **taken)
            if values is None
            else torch.func.functional_call(layer, values, (hidden_BTD,), taken)
        )
        return output[0] if isinstance(output, tuple) else output

    def _rotary(self, hidden_BTD: Tensor, positions_BT: Tensor, layer_type: str) -> Tensor | tuple[Tensor, ...]:
        """Cosines and sines, or complex numbers in one tensor (DeepSeek-V2)."""
        by_type = (layer_type,) if self._rotary_by_type else ()
        found = self.decoder.rotary_emb(hidden_BTD, positions_BT, *by_type)
        if isinstance(found, Tensor):
            return found.to(hidden_BTD.device)
        return tuple(x.to(hidden_BTD.device) for x in found)


def in_dtype_of(hidden_BTD: Tensor, mask: Any) -> Any:
    """sdpa wants additive masks in the queries' dtype; layers of float32 heads run on backbones of another dtype."""
    if mask is None or not mask.is_floating_point() or torch.is_autocast_enabled(mask.device.type):
        return mask
    return mask.to(hidden_BTD.dtype)

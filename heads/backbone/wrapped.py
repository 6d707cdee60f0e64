"""What Headway needs of a Hugging Face causal LM: found once, and again after parts of the model were replaced.

No modelling code is copied: the model's own decoder, layers and output layer run. Wrapping a model probes what is
assumed about it, and refuses the model in one sentence where that does not hold. Four facts of transformers 5 are used:
models take 4-D masks as they are, take positions, run hooks on layers, and write caches through `update`.
tests/heads/backbone/test_backbone.py checks them per architecture.
"""
# B batch, T position, N tree node, D model width, V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.gradient_gate import gate
from heads.backbone.masks import FULL, read_mask_style
from heads.backbone.projection import Projection, read_projection
from heads.backbone.recurrent.recurrence import Recurrence, find_recurrence
from heads.backbone.rope import find_rope_border
from heads.backbone.rounding import same_numbers
from heads.backbone.state import (
    HiddenTap,
    HiddenTaps,
    recording,
)
from heads.backbone.support import (
    check_logits,
    find_final_norm,
    find_layers,
    read_layer_type,
    read_output_path,
    refuse_offloaded_weights,
    refuse_other_embeddings,
    refuse_other_widths,
    refuse_what_cannot_roll_back,
    refuse_what_is_no_model,
    unwrap,
)
from heads.products.packed import takes_half_products


class WrappedModel:
    """A model and what was found in it: decoder, layers, embeddings, projection, the kind of mask.

    Args:
        model: a `transformers` causal LM, or a `PeftModel` or `torch.compile` around one.
        check_projection: compare the projection record with the model's own logits on four tokens; on the meta device
            there is nothing to compare.

    Raises:
        ValueError: no causal LM, or one that cannot roll back, that takes or heeds no tree mask, whose weights are
            offloaded, or whose logits differ from those of the projection record.
    """

    def __init__(self, model: Any, *, check_projection: bool = True) -> None:
        refuse_what_is_no_model(model)
        self.model = unwrap(model)
        self.gradient_scale = 1.0
        """LR_MB / LR_B: factor on gradients of heads where they enter a trained backbone."""
        self._read_model()
        self._output_path = read_output_path(self.model)
        if check_projection and self.device.type != "meta":
            check_logits(self.model, self._project, self._as_nodes if self.recurrence is None else None)

    def _read_model(self) -> None:
        model = self.model
        self.config = model.config.get_text_config()
        refuse_what_cannot_roll_back(model)
        refuse_offloaded_weights(model)
        self.mask_style = read_mask_style(self.config)
        self.decoder = model.get_decoder()
        self._embeddings = model.get_input_embeddings()  # kept: transformers searches for it at each call
        refuse_other_embeddings(model, self._embeddings)
        self._unembedding = model.get_output_embeddings()
        self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        refuse_other_widths(model, self.hidden_size)
        rotary = getattr(self.decoder, "rotary_emb", None)
        self._rotary_by_type = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        self.rope_border = find_rope_border(self.decoder)
        self.norm = find_final_norm(self.decoder)
        self.recurrence: Recurrence | None = find_recurrence(model, self.config, self.layers)
        """How recurrent layers follow a tree; None where there are none."""
        last = self.num_layers - 1 if self.recurrence is None else self.recurrence.attention
        self.attention_layer = self.layers[last]
        """The last attention layer, which heads copy; if possible one without a recurrent state beside it."""
        self.attention_tap = self.num_layers - 1 - last
        self._layer_takes = frozenset(inspect.signature(self.attention_layer.forward).parameters)

    hidden_size = property(lambda self: int(self.config.hidden_size))
    vocab_size = property(lambda self: int(self._embeddings.weight.shape[0]))
    num_layers = property(lambda self: len(self.layers))
    dtype = property(lambda self: self._embeddings.weight.dtype)
    device = property(lambda self: self._embeddings.weight.device)
    heads_device = property(lambda self: self._unembedding.weight.device)
    """The device of the unembedding. Heads run there; the states of a backbone on several devices are moved there."""

    @property
    def name(self) -> str:
        named = (getattr(config, "_name_or_path", "") for config in (self.config, self.model.config))
        return next(filter(None, map(str, named)), type(self.model).__name__)  # image-text: the text config has no name

    @property
    def projection(self) -> Projection:
        """The record from hidden states before the final norm to logits; read at each call: sharding swaps tensors."""
        return read_projection(self.model, self.norm)

    def embed(self, tokens: Tensor) -> Tensor:
        """The input embeddings E(x) that heads read; their gradient passes the gate."""
        return gate(self._embeddings(tokens.to(self.device)).to(self.heads_device), self.gradient_scale)

    def logits(self, final_ND: Tensor) -> Tensor:
        """Logits from hidden states after the final norm: the model's own output layer, with its hooks and adapters."""
        output_layer = self.model.get_output_embeddings()
        if isinstance(output_layer, nn.Embedding):  # its forward looks rows up instead of multiplying
            return self.projection.without_norm()(final_ND)
        return self.projection.finish(output_layer(final_ND))

    def _project(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits computed by the output layer, and by the record with the final norm."""
        final_BTD, taps = self.forward(tokens_BT, taps=[0], use_cache=False)
        return self.logits(final_BTD), self.projection(taps[0])

    def _as_nodes(self, tokens_14: Tensor, as_tree: bool) -> Tensor:
        """Logits (1, 4, V) of four tokens that are a path of a tree, with a sibling between the first and the second.

        A model that ignores the mask sees the sibling; one that reads another row of the mask misses ancestors.

        Args:
            as_tree: give the tree's mask and positions; False: five tokens of a text.
        """
        path, given = [0, 2, 3, 4], {}
        if as_tree:
            depth_15 = torch.tensor([[0, 1, 1, 2, 3]], device=self.device)
            sees_155 = torch.ones(1, 5, 5, dtype=torch.bool, device=self.device).tril()
            sees_155[:, 2:, 1] = False
            mask = self.mask_style.finish(sees_155, depth_15, depth_15, self.dtype)
            given = {"attention_mask": mask, "position_ids": depth_15}
        final_15D, _ = self.forward(tokens_14[:, [0, 3, 1, 2, 3]], use_cache=False, **given)
        return self.logits(final_15D[:, path])

    def refresh(self) -> None:
        """Find the parts of the model again if it, its decoder, embeddings or output layer were replaced or hooked.

        `Backbone.read` calls this for every text.

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
        """Whether the output layer computes what its record says; an adapter or a hook may add to it.

        Heads that share the unembedding score with the record.
        """
        output_layer = self.model.get_output_embeddings()
        hooks = output_layer._forward_hooks or output_layer._forward_pre_hooks
        own_forward = "forward" not in vars(output_layer) or takes_half_products(output_layer)
        if type(output_layer) is nn.Linear and not hooks and own_forward:
            return True
        weight_VD = self.projection.weight
        numbers_4D = torch.arange(4 * weight_VD.shape[1], device=weight_VD.device).view(4, -1)
        hidden_4D = numbers_4D.sin().to(weight_VD.dtype)  # no pattern that a low-rank adapter could map to zero
        return same_numbers(self.logits(hidden_4D), self.projection.without_norm()(hidden_4D))

    def forward(self, tokens_BT: Tensor, *, taps: Sequence[HiddenTap] = (), **inputs: Any) -> tuple[Tensor, HiddenTaps]:
        """The decoder's own forward: the hidden states after the final norm, and the taps.

        `inputs_embeds`, if given, are read in place of the tokens.
        """
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = tokens_BT.to(self.device)
        with recording(self.layers, taps, self.heads_device) as recorded:
            output = self.decoder(**inputs)
        final_BTD = output.last_hidden_state.to(self.heads_device)
        if "final" in taps:
            recorded["final"] = final_BTD
        return final_BTD, recorded

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
            mask: what `MaskStyle.finish` returns; from a dict by layer type the layer takes its entry.
            cache: a cache that the layer writes under its own `layer_idx`, or None.
            values: tensors by name, which replace the layer's own in this call.
        """
        layer_type = read_layer_type(layer) if self.mask_style.by_layer_type else FULL
        given: dict[str, Any] = {
            "attention_mask": in_dtype_of(hidden_BTD, mask[layer_type] if isinstance(mask, dict) else mask),
            "position_ids": positions_BT,
            "past_key_values": cache,
            "layer_past": cache,
            "use_cache": cache is not None,
            "alibi": None,  # backbones with alibi are refused
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
    """An additive mask in the queries' dtype, as sdpa wants it: float32 heads run on backbones of another dtype."""
    if mask is None or not mask.is_floating_point() or torch.is_autocast_enabled(mask.device.type):
        return mask
    return mask.to(hidden_BTD.dtype)

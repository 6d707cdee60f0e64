"""Decoder layers that heads own and run over the context, as DynaMo's heads and Hydra++'s prefix layer do.

They read no drafted token, so they run once over what a pass committed, with a key-value cache that follows the
backbone's commit plan, ragged rows and their masked holes included:

stem or f     ┌ stack 1 ─ newest[0]      a stack is layers one after another; all layers write to one cache, each under
at the kept ──┼ stack 2 ─ newest[1]      a slot of its own; a draft reads each stack's output at the last committed
slots         └ stack 3 ─ newest[2]      token
"""
# B batch, T position, A kept slot of a pass, S committed slot, R row that stays, D model width

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from heads.backbone import Backbone, CommitPlan
from heads.cache import TreeCache
from heads.masks import causal

Stack = Callable[[Tensor, Tensor, Any, TreeCache | None], Tensor]
"""Layers one after another: from hidden states (B, T, D), positions (B, T), a mask and a cache to (B, T, D)."""

RESIDUAL_WRITERS = frozenset(
    ("o_proj", "out_proj", "c_proj", "dense", "wo", "down_proj", "dense_4h_to_h", "fc_out", "fc2", "w2")
)
"""What the last linear layer of an attention or MLP block is called in Hugging Face's models."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What the layers have kept: one cache for all, which slots are real, each stack's output at the newest token."""

    cache: TreeCache
    valid_BS: Tensor
    positions_BS: Tensor
    newest: list[Tensor]

    def keep_rows(self, rows_R: Tensor) -> State:
        valid_RS = self.valid_BS[rows_R]
        slots_S = valid_RS.any(dim=0).nonzero().flatten()
        self.cache.keep_rows(rows_R, slots_S)
        return State(
            cache=self.cache,
            valid_BS=valid_RS[:, slots_S],
            positions_BS=self.positions_BS[rows_R][:, slots_S],
            newest=[newest_BD[rows_R] for newest_BD in self.newest],
        )

    def keep_slots(self, num_slots: int) -> State:
        self.cache.keep_slots(num_slots)
        valid_BS, positions_BS = self.valid_BS[:, :num_slots], self.positions_BS[:, :num_slots]
        return replace(self, valid_BS=valid_BS, positions_BS=positions_BS)


def commit(
    backbone: Backbone,
    stacks: Sequence[Stack],
    state: State | None,
    hidden_BAD: Tensor,
    positions_BA: Tensor,
    plan: CommitPlan,
) -> State:
    """Run every stack over the kept slots; the state that follows.

    Args:
        stacks: layers of all stacks write to one cache, under slots of their own.
        hidden_BAD: what the stacks read at the kept slots.
    """
    state = state or empty(len(stacks), hidden_BAD, positions_BA, plan)
    mask, positions_BS = mask_of(backbone, state, positions_BA, plan)
    outputs = [stack(hidden_BAD, positions_BA, mask, state.cache) for stack in stacks]
    state.cache.commit(None, positions_BA.shape[1])
    kept_B1 = plan.valid_BA.any(dim=1)[:, None]  # a finished row keeps what it had
    newest = [
        torch.where(kept_B1, plan.last(output_BAD), old_BD)
        for output_BAD, old_BD in zip(outputs, state.newest, strict=True)
    ]
    valid_BS = torch.cat([state.valid_BS, plan.valid_BA], dim=1)
    return State(cache=state.cache, valid_BS=valid_BS, positions_BS=positions_BS, newest=newest)


def empty(num_stacks: int, hidden_BAD: Tensor, positions_BA: Tensor, plan: CommitPlan) -> State:
    return State(
        cache=TreeCache(),
        valid_BS=plan.valid_BA[:, :0],
        positions_BS=positions_BA[:, :0],
        newest=[torch.zeros_like(hidden_BAD[:, 0])] * num_stacks,
    )


def mask_of(backbone: Backbone, state: State, positions_BA: Tensor, plan: CommitPlan) -> tuple[Any, Tensor]:
    """The kept slots' mask over everything committed, themselves included, and the positions of all that."""
    batch, kept = positions_BA.shape
    before_BAS = state.valid_BS[:, None, :].expand(batch, kept, -1)
    may_attend_BAS = torch.cat([before_BAS, causal(plan.valid_BA)], dim=2)
    positions_BS = torch.cat([state.positions_BS, positions_BA], dim=1)
    return backbone.mask_style.finish(may_attend_BAS, positions_BA, positions_BS, backbone.dtype), positions_BS


def new_layer(backbone: Backbone, start: str, slot: int) -> nn.Module:
    """A decoder layer like the backbone's last, random or copied, that caches under its own slot."""
    layer = without_adapter(in_slot(copy.deepcopy(backbone.layers[-1]), slot)).requires_grad_(True)
    if start == "random":
        layer.apply(backbone.model._init_weights)
    return layer


@torch.no_grad()
def identity_layer(backbone: Backbone, slot: int) -> nn.Module:
    """A random layer that begins as the identity: what its blocks write to the residual stream is zero at first.

    Raises:
        ValueError: a class of layers that is not the identity then.
    """
    layer = new_layer(backbone, "random", slot)
    for name, parameter in layer.named_parameters():
        if not RESIDUAL_WRITERS.isdisjoint(part.removesuffix("_bias") for part in name.split(".")):
            parameter.zero_()
    parameter = next(layer.parameters())
    if not parameter.is_meta and not is_identity(backbone, layer, parameter):
        raise ValueError(
            f"A {type(layer).__name__} does not become the identity by zeroing {', '.join(sorted(RESIDUAL_WRITERS))}, "
            f"so heads behind one would not start as the backbone; give prefix_layers=0."
        )
    return layer


def is_identity(backbone: Backbone, layer: nn.Module, like: Tensor) -> bool:
    """On two tokens."""
    hidden_BTD = torch.linspace(-1, 1, 2 * backbone.hidden_size, dtype=like.dtype, device=like.device).view(1, 2, -1)
    positions_BT = torch.arange(2, device=like.device)[None]
    may_attend_BTT = causal(torch.ones_like(positions_BT, dtype=torch.bool))
    mask = backbone.mask_style.finish(may_attend_BTT, positions_BT, positions_BT, like.dtype)
    return torch.equal(backbone.run_layer(layer, hidden_BTD, positions_BT, mask), hidden_BTD)


def without_adapter(layer: nn.Module) -> nn.Module:
    """The layer with the backbone's LoRA, if it has one, merged into its weights: heads train all of their own."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            layer.set_submodule(name, module.get_base_layer())
    return layer


def in_slot(layer: nn.Module, slot: int) -> nn.Module:
    """The layer, writing keys and values to this layer index of a cache."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = slot  # type: ignore[assignment]
    # A device_map's hooks, copied along, would move tensors to where the backbone's own layer is.
    return remove_hook_from_module(layer, recurse=True)


def refuse_quantised_layers(backbone: Backbone, what: str) -> None:
    """Raise ValueError where no trained copy can be made of the last layer."""
    if not all(p.is_floating_point() for p in backbone.layers[-1].parameters()):
        raise ValueError(
            f"The last layer of {backbone.name} is quantised, and {what} of its kind; load the backbone without "
            f"quantization."
        )

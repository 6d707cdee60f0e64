"""Gather whole weights under any engine, one tensor at a time, and put them in place of the shards within a context.

    with whole_weights(model) as writes:
        if writes:
            checkpoint.save(model.token_heads, folder)

Every process enters the context, since gathering takes all of them, but only the main one holds the tensors (on its CPU
where they were sharded). Inside, its model is an ordinary one, so what is saved does not depend on the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from heads.interface.token_heads import TokenHeads
from train.objective.model import TrainedModel


@contextlib.contextmanager
def whole_weights(model: TrainedModel) -> Iterator[bool]:
    """Put whole tensors in place of shards; yields True in the process that holds them.

    Trained weights are gathered, and so is the embedding, whose fingerprint is stored; other frozen weights are not.
    """
    reshard(model)
    is_main = PartialState().is_main_process
    embedding = model.model.get_input_embeddings().weight
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (parameter.requires_grad or parameter is embedding)
    ]
    whole: dict[int, nn.Parameter] = {}
    for _, _, parameter in places:  # in one order everywhere; tied weights once
        if id(parameter) not in whole:
            tensor = gather(parameter)
            whole[id(parameter)] = nn.Parameter(tensor if is_main else tensor.new_empty(0), parameter.requires_grad)
    try:
        for module, name, parameter in places:
            module._parameters[name] = whole[id(parameter)]
        yield is_main
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


@torch.no_grad()
def gather(parameter: nn.Parameter) -> Tensor:
    """The unsharded tensor; in float32 where DeepSpeed keeps a float32 copy. Every process calls it.

    A tensor that is not sharded is returned without a copy.
    """
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().cpu()
    if not is_deepspeed(parameter):
        return parameter.detach()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter).cpu()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()


def is_deepspeed(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 shards the parameter, or ZeRO-1 or 2 its optimizer state."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def reshard(model: nn.Module) -> None:
    """Undo FSDP2's gathering of the root's weights, which lasts after a forward without backward.

    Gathered weights are not the tensors that the optimizer updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def copy_for_decoding(model: TrainedModel) -> TokenHeads | None:
    """A copy of the heads in the backbone's dtype, made before an engine shards the model and filled at evaluations.

    It is None if there are no heads, or if they have the backbone's dtype.
    """
    heads, dtype = model.token_heads, model.backbone.dtype
    return None if heads is None or heads.in_dtype(dtype) is heads else heads.in_dtype(dtype).requires_grad_(False)


@torch.no_grad()
def filled(copy: TokenHeads, token_heads: TokenHeads) -> TokenHeads:
    """The copy with the present weights of sharded heads. Every process calls it."""
    reshard(token_heads)
    for mine, theirs in zip(copy.parameters(), token_heads.parameters(), strict=True):
        mine.copy_(gather(theirs))
    return copy.eval()

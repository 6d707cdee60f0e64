"""The units of an engine that shards weights, and the weights that stay gathered throughout a forward.

A unit is a module whose weights are gathered while it runs: each decoder layer of the backbone and each head's own
module. Everything else (embeddings, final norm, unembeddings, and layers whose weights heads borrow) is reached from
several places inside `TrainedModel.forward` and stays gathered for all of it. The units are the same for FSDP2 and
ZeRO-3; DynaMo's table 5 wraps by decoder layer too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from train.objective.model import TrainedModel


def find_units(model: TrainedModel) -> list[nn.Module]:
    """The units of a model: decoder layers that no head borrows, then the heads' modules, in the order they run."""
    borrowed = set() if model.token_heads is None else {id(module) for module in model.token_heads.borrowed}
    units = [layer for layer in model.backbone.layers if id(layer) not in borrowed]
    return units + ([] if model.token_heads is None else list(repeated_modules(model.token_heads)))


def repeated_modules(parent: nn.Module) -> Iterator[nn.Module]:
    """The modules in `nn.ModuleList`s of `parent`, each the module of one head or one layer of a head.

    A list's entry that is only a container, without a `forward` of its own, is searched for further lists.
    """
    for child in parent.children():
        if isinstance(child, nn.ModuleList):
            for entry in child:
                yield from repeated_modules(entry) if is_container(entry) else [entry]


def is_container(module: nn.Module) -> bool:
    """Whether a module has no `forward`; nothing calls such a module, so its hooks would never run."""
    return "forward" not in {name for kind in type(module).__mro__[:-1] if kind is not nn.Module for name in vars(kind)}


def parameters_outside_units(model: TrainedModel) -> list[nn.Parameter]:
    inside = {id(p) for unit in find_units(model) for p in unit.parameters()}
    return [p for p in model.parameters() if id(p) not in inside]


def shard(model: TrainedModel, accelerator: Any) -> None:
    """Shard for FSDP2, in place, with the launch file's settings; accelerate then wraps nothing more.

    accelerate would wrap by class names, which cannot tell a borrowed layer from the others, and would cast the loss to
    the training dtype and sum gradients in it.
    """
    plugin = accelerator.state.fsdp_plugin
    options: dict[str, Any] = {"mp_policy": mixed_precision(accelerator), "offload_policy": plugin.cpu_offload}
    if (mesh := getattr(accelerator, "torch_device_mesh", None)) is not None:
        options["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    else:
        options["mesh"] = torch.distributed.init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for unit in find_units(model):
        fully_shard(unit, reshard_after_forward=plugin.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def mixed_precision(accelerator: Any) -> MixedPrecisionPolicy:
    """Compute in the run's dtype; gradients are summed over processes in float32."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if (dtype := names.get(accelerator.mixed_precision)) is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def keep_gathered(model: TrainedModel) -> None:
    """Tell ZeRO-3 which weights `TrainedModel.forward` reaches outside the modules that they belong to."""
    import deepspeed

    for parameter in parameters_outside_units(model):
        deepspeed.zero.register_external_parameter(model, parameter)

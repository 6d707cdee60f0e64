"""AdamW's state by the name of each weight: one file that any engine, on any number of processes, resumes from.

`optimizer.safetensors` holds `NAME/exp_avg`, `NAME/exp_avg_sq` and `NAME/step` for each trained weight that had a
gradient, unsharded and in float32 (float64 for weights in float64). An engine's own checkpoints would fit only the same
engine and number of processes. Learning rates come from the config and the schedule, not from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from train.engine.gathering import is_deepspeed, reshard

TENSORS = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Every process calls it; the main one writes. Before the first step the file holds no tensors."""
    reshard(model)
    main, base = PartialState().is_main_process, base_optimizer(optimizer)
    link_states(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model):
        for key, value in read_state(parameter, base):
            if main:
                tensors[f"{name}/{key}"] = value.cpu().contiguous()
    if main:
        save_file(tensors, folder / TENSORS)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load the state that `save_optimizer` wrote into a wrapped model's optimizer. Every process calls it.

    Raises:
        FileNotFoundError: the folder holds no such state.
        RuntimeError: the state belongs to other weights.
    """
    reshard(model)
    tensors, base = load_file(folder / TENSORS), base_optimizer(optimizer)
    named = trained_parameters(model)
    if tensors:
        known = {f"{name}/{key}" for name, _ in named for key in (*MOMENTS, "step")}
        if wrong := set(tensors) - known:
            raise RuntimeError(f"the optimizer's state belongs to other weights: {', '.join(sorted(wrong)[:3])}")
        start_state(optimizer)
        link_states(optimizer)
        for name, parameter in named:
            for key in (*MOMENTS, "step"):
                if (value := tensors.get(f"{name}/{key}")) is not None:
                    write_state(parameter, base, key, value)


def load_schedule(schedule: Any, optimizer: Any, state: dict[str, Any]) -> list[tuple[float, float]]:
    """Resume a schedule at its saved step, with the present config's peak rates.

    Returns:
        The peak rates in the checkpoint and now, of each group where they differ.
    """
    groups = base_optimizer(optimizer).param_groups
    before, now = state["base_lrs"], list(schedule.base_lrs)
    schedule.load_state_dict(state | {"base_lrs": now})
    schedule._last_lr = [rate * of(schedule.last_epoch) for rate, of in zip(now, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(groups, schedule._last_lr, strict=True):
        group["lr"] = rate
    return [pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]]


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def base_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's and DeepSpeed's wrappers; its groups hold parameters or flat shards."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def link_states(optimizer: Any) -> None:
    """Link weights to their shards of the moments again under ZeRO-1 and 2, which do so once, before all may exist."""
    while optimizer is not None:
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        optimizer = getattr(optimizer, "optimizer", None)


def read_state(parameter: nn.Parameter, base: Any) -> Iterator[tuple[str, Tensor]]:
    """The moments, unsharded, and the number of steps."""
    if not base.state:
        return
    if is_deepspeed(parameter):
        from deepspeed.utils import safe_get_full_optimizer_state

        yield from ((key, safe_get_full_optimizer_state(parameter, key)) for key in MOMENTS)
        step = next(iter(base.state.values()))["step"]  # shared by a flat group; safetensors needs a copy for each
        yield "step", torch.as_tensor(step, dtype=torch.float32).clone()
        return
    for key in (*MOMENTS, "step") if parameter in base.state else ():  # else it never had a gradient
        value = base.state[parameter][key]
        yield key, value.full_tensor() if isinstance(value, DTensor) else value


def start_state(optimizer: Any) -> None:
    """Create zero moments for every parameter or shard, as the first step would; `step` is 0."""
    base = base_optimizer(optimizer)
    for parameter in stepped_tensors(optimizer):
        state = base.state[parameter]
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        on_device = parameter.device if base.defaults.get("fused") else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)


def stepped_tensors(optimizer: Any) -> list[Tensor]:
    """The tensors that AdamW updates: parameters or flat shards. ZeRO-3 puts its shards into groups only for a step."""
    while optimizer is not None:
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            return list(optimizer.fp32_partitioned_groups_flat)
        last, optimizer = optimizer, getattr(optimizer, "optimizer", None)
    return [parameter for group in last.param_groups for parameter in group["params"]]


def write_state(parameter: nn.Parameter, base: Any, key: str, value: Tensor) -> None:
    if is_deepspeed(parameter):
        write_deepspeed_state(parameter, base, key, value)
        return
    place = base.state[parameter][key]
    if isinstance(place, DTensor):
        value = distribute_tensor(value.to(place.device), place.device_mesh, place.placements, src_data_rank=None)
    place.copy_(value)


def write_deepspeed_state(parameter: nn.Parameter, base: Any, key: str, value: Tensor) -> None:
    """Write one process's shard of a moment; `step` is the same for all shards."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if key == "step":
        for state in base.state.values():
            state["step"] = torch.full_like(state["step"], float(value))
    elif hasattr(parameter, "ds_id"):
        share = parameter.partition_numel()  # type: ignore[attr-defined]
        whole = nn.functional.pad(value.flatten(), (0, share * PartialState().num_processes - value.numel()))
        safe_set_local_optimizer_state(parameter, whole.narrow(0, share * PartialState().process_index, share), key)
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)

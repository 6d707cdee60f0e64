"""Which engine runs: said on the first line of a run. One that was asked for and is not active is an error."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

SUPPORTED = {
    DistributedType.NO: "one process",
    DistributedType.MULTI_GPU: "DDP",
    DistributedType.MULTI_CPU: "DDP over CPUs",
}
ASKED_BY_ENVIRONMENT = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def describe_engine() -> str:
    """One line: engine, processes, device, threads.

    Raises:
        ValueError: an engine was asked for that this version does not train with.
    """
    state = PartialState()
    for variable, name in ASKED_BY_ENVIRONMENT.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ValueError(
                f"The launch asks for {name}; this version trains in one process or with DDP, and no other engine "
                f"takes its place silently: use launch/single.yaml or launch/ddp.yaml."
            )
    if state.distributed_type not in SUPPORTED:
        raise ValueError(
            f"The engine {state.distributed_type.value} is not supported; use launch/single.yaml or launch/ddp.yaml."
        )
    refuse_lost_processes(state.num_processes)
    threads = f" with {torch.get_num_threads()} threads" if state.device.type == "cpu" else ""
    count = "" if state.num_processes == 1 else f" on {state.num_processes} processes"
    return f"engine: {SUPPORTED[state.distributed_type]}{count}, {state.device.type}{threads}"


def refuse_lost_processes(num_processes: int) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process; it leaves an address to meet at and no count.

    Raises:
        ValueError: several processes were asked for and one runs.
    """
    launched, asked = "ACCELERATE_MIXED_PRECISION" in os.environ, "MASTER_ADDR" in os.environ
    if num_processes == 1 and launched and asked and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "The launch asks for several processes and started one, as accelerate does with --cpu; leave --cpu out and "
            "set trainer.use_cpu: true, or unset MASTER_ADDR if one process is what you want."
        )


def use_all_cores() -> None:
    """Give a single CPU process all cores: `accelerate launch` sets OMP_NUM_THREADS=1 where nobody chose a number."""
    if PartialState().num_processes == 1 and torch.get_num_threads() == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

"""The engine of a run, named on its first line. An engine that was requested and is not active is an error.

The launch file chooses it (launch/*.yaml). accelerate fails silently in two cases that are handled here: FSDP over CPU
processes would train plain DDP, and DeepSpeed over CPU processes needs gloo and no `use_cpu`. So two CPU processes run
the same code as a cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

logger = logging.getLogger(__name__)


class Engine(Enum):
    """What trains; the value is its name in messages."""

    ONE = "one process"
    DDP = "DDP"
    FSDP2 = "FSDP2"
    ZERO1 = "DeepSpeed ZeRO-1"
    ZERO2 = "DeepSpeed ZeRO-2"
    ZERO3 = "DeepSpeed ZeRO-3"

    @property
    def shards_weights(self) -> bool:
        """Weights are whole only inside the wrapped module's forward, and every process has to take part in that."""
        return self in (Engine.FSDP2, Engine.ZERO3)

    @property
    def is_deepspeed(self) -> bool:
        return self in (Engine.ZERO1, Engine.ZERO2, Engine.ZERO3)


def requested_engine() -> Engine | None:
    """The engine that the launch file names; None for one process and for DDP.

    Raises:
        ValueError: a kind of FSDP or DeepSpeed that is not supported.
    """
    if is_set("ACCELERATE_USE_FSDP"):
        if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
            raise ValueError(
                f"The launch asks for FSDP version {version}; heads are trained with version 2: set fsdp_version: 2 "
                f"under fsdp_config, as launch/fsdp2.yaml does."
            )
        return Engine.FSDP2
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage not in ("1", "2", "3"):
            raise ValueError(f"The launch asks for ZeRO stage {stage}; allowed are 1, 2 and 3: see launch/zero2.yaml.")
        return Engine[f"ZERO{stage}"]
    return None


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


def on_cpu(trainer_fields: Mapping[str, Any]) -> bool:
    """Whether a run trains on the CPU: it was requested, or there is no accelerator."""
    return bool(trainer_fields.get("use_cpu")) or not torch.accelerator.is_available()


def device_fields(trainer_fields: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments that start the processes of the requested engine.

    Accelerate switches DeepSpeed off where `use_cpu` is set, so DeepSpeed on CPUs gets only the backend's name.

    Raises:
        ValueError: DeepSpeed on CPUs in half precision, or beside an accelerator, which it would use instead.
    """
    if not on_cpu(trainer_fields):
        return {}
    if not torch.accelerator.is_available():  # libraries import DeepSpeed where it is installed, and it would warn
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    engine = requested_engine()
    if engine is None or not engine.is_deepspeed:
        return {"use_cpu": True}
    if torch.accelerator.is_available():
        raise ValueError(
            "trainer.use_cpu was given with DeepSpeed, which uses any accelerator that it sees; hide it "
            "(CUDA_VISIBLE_DEVICES= in the environment) or choose another launch file."
        )
    if trainer_fields.get("bf16") or trainer_fields.get("fp16"):
        raise ValueError(
            "trainer.bf16 or fp16 was given with DeepSpeed on CPUs, where it trains in float32; leave it out, or use "
            "launch/ddp.yaml or launch/fsdp2.yaml."
        )
    leave_out_inference_operator()
    return {"use_cpu": False, "ddp_backend": "gloo"}


def leave_out_inference_operator() -> None:
    """Spare a minute in which DeepSpeed compiles an operator that only inference calls (deepspeed/comm/torch.py).

    To know what is compatible, DeepSpeed calls the compiler, and distutils prints its command lines.
    """
    if importlib.util.find_spec("deepspeed") is not None:  # if it is missing, TrainingArguments say so
        import deepspeed.ops

        with contextlib.redirect_stdout(io.StringIO()):
            getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def announce_compiling() -> None:
    """Call before TrainingArguments: at its first start DeepSpeed compiles Adam for CPUs, a silent minute or more."""
    engine = requested_engine()
    compiles = engine is not None and engine.is_deepspeed and offloads_optimizer()
    if not compiles or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root())).rglob("cpu_adam.so")
    if not any(built):
        logger.info("DeepSpeed compiles cpu_adam now, which takes a minute or more; later starts reuse it.")


def offloads_optimizer() -> bool:
    return os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu"


def start_engine() -> Engine:
    """Call between TrainingArguments, which start the processes, and the Trainer, which wraps the model.

    Raises:
        ValueError: fewer processes run than were launched, or the requested engine cannot be active.
    """
    state, requested = PartialState(), requested_engine()
    refuse_lost_processes(state.num_processes)
    if requested is Engine.FSDP2:
        if state.num_processes == 1:
            raise ValueError(
                "The launch asks for FSDP2 on one process, where nothing can be sharded; use launch/single.yaml, or "
                "more processes."
            )
        if state.distributed_type is DistributedType.MULTI_CPU:
            # accelerate allows FSDP with MULTI_GPU only; that code path reads the device from `state.device` alone
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return requested
    if requested is not None:
        if state.distributed_type is not DistributedType.DEEPSPEED:
            raise not_active(requested, state.distributed_type.value)
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # imports deepspeed

        unset_hf_deepspeed_config()  # weights are loaded whole, since heads start from them, and are split later
        return requested
    if state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return Engine.DDP
    if state.distributed_type is not DistributedType.NO:
        raise ValueError(
            f"The engine {state.distributed_type.value} is not supported; use one of the files in launch/."
        )
    return Engine.ONE


def describe_engine(engine: Engine) -> str:
    """One line: engine, processes, device, threads."""
    state = PartialState()
    threads = f" with {torch.get_num_threads()} threads" if state.device.type == "cpu" else ""
    count = "" if engine is Engine.ONE else f" on {state.num_processes} processes"
    return f"engine: {engine.value}{count}, {state.device.type}{threads}"


def check_active(engine: Engine, accelerator: Any) -> None:
    """Check that the accelerator, once it exists, uses the engine that was announced.

    Raises:
        ValueError: it uses another one.
    """
    kind = accelerator.distributed_type
    stage = accelerator.state.deepspeed_plugin.zero_stage if kind is DistributedType.DEEPSPEED else None
    active = {
        DistributedType.NO: Engine.ONE,
        DistributedType.MULTI_GPU: Engine.DDP,
        DistributedType.MULTI_CPU: Engine.DDP,
        DistributedType.FSDP: Engine.FSDP2 if accelerator.is_fsdp2 else None,
        DistributedType.DEEPSPEED: Engine[f"ZERO{stage}"] if stage else None,
    }.get(kind)
    if active is not engine:
        raise not_active(engine, kind.value)


def not_active(engine: Engine, found: str) -> ValueError:
    return ValueError(
        f"The launch asks for {engine.value}, but {found} is active; start with `accelerate launch --config_file "
        f"launch/….yaml train.py`, and leave --cpu and ACCELERATE_USE_CPU out."
    )


def refuse_lost_processes(num_processes: int) -> None:
    """Refuse processes that are not connected: each would train alone and write into the same folder.

    `accelerate launch --cpu --num_processes 2` starts one process; it sets MASTER_ADDR but not WORLD_SIZE.

    Raises:
        ValueError: several processes were requested and one runs.
    """
    launched, has_address = "ACCELERATE_MIXED_PRECISION" in os.environ, "MASTER_ADDR" in os.environ
    if num_processes == 1 and launched and has_address and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "The launch asks for several processes and started one, as accelerate does with --cpu; leave --cpu out and "
            "set trainer.use_cpu: true, or unset MASTER_ADDR if one process is what you want."
        )
    if num_processes != int(os.environ.get("WORLD_SIZE", num_processes)):
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were launched and this one knows of {num_processes}; start them "
            f"with `accelerate launch --config_file launch/….yaml train.py`."
        )


def use_all_cores() -> None:
    """Give a single CPU process all cores: `accelerate launch` sets OMP_NUM_THREADS=1 where nobody chose a number."""
    if PartialState().num_processes == 1 and torch.get_num_threads() == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

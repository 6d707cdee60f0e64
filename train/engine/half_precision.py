"""Decide whether bfloat16 products are faster on a machine, as `trainer.bf16: auto` does.

A CPU that has instructions for them (AVX512-BF16, AMX, or ARM's BF16) multiplies faster than in float32. One that has
none converts every number to float32 first, so that `trainer.bf16: true` loses mantissa there and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

AUTO = "auto"


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16; torch 2.11 and older name only those of x86."""
    if hasattr(torch.cpu, "get_capabilities"):
        found: Any = torch.cpu.get_capabilities()
        return any(name.endswith("bf16") and has_it is True for name, has_it in found.items())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def settled_bf16(trainer_fields: Mapping[str, Any], device_type: str, *, trains_in_float32: bool) -> dict[str, Any]:
    """The fields of `trainer` with the choice that `bf16: auto` leaves to the machine.

    Args:
        trains_in_float32: the engine trains in float32 alone, as DeepSpeed does on CPUs.

    >>> settled_bf16({"bf16": "auto", "max_steps": 3}, "cpu", trains_in_float32=True)
    {'bf16': False, 'max_steps': 3}
    """
    if trainer_fields.get("bf16") != AUTO:
        return dict(trainer_fields)
    return {**trainer_fields, "bf16": not trains_in_float32 and pays_on(device_type)}


def autocast_dtype(arguments: Any) -> torch.dtype | None:
    """The dtype of a run's autocast, by its TrainingArguments; None in float32."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in halves.items() if getattr(arguments, name)), None)


def pays_on(device_type: str) -> bool:
    """Whether this CPU has the instructions, or this GPU's generation has them; a GPU elsewhere is assumed to."""
    if device_type == "cpu":
        return multiplies_bfloat16()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def advice_on_bfloat16(device_type: str, *, bf16: bool) -> str:
    """A sentence if the other value of `trainer.bf16` is better on this CPU; empty if it is not, and on accelerators.

    >>> advice_on_bfloat16("cuda", bf16=True)
    ''
    """
    if device_type != "cpu" or bf16 == multiplies_bfloat16():
        return ""
    if bf16:
        return (
            "trainer.bf16 was given, and this CPU has no instructions for bfloat16 (AVX512-BF16, AMX): its products "
            "are converted to float32 and gain no speed; leave it out, unless the run is to be compared with another's."
        )
    return "this CPU has instructions for bfloat16: with trainer.bf16: true a step takes less time than in float32."

"""Whether products in bfloat16 are worth it on this machine's CPU.

A CPU that has instructions for them (AVX512-BF16, AMX, or ARM's BF16) multiplies faster than in float32. One that has
none converts every number to float32 first, so that `trainer.bf16: true` loses mantissa there and gains no speed.
"""

from __future__ import annotations

from typing import Any

import torch


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16; torch 2.11 and older name only those of x86."""
    if hasattr(torch.cpu, "get_capabilities"):
        found: Any = torch.cpu.get_capabilities()
        return any(name.endswith("bf16") and has_it is True for name, has_it in found.items())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def advice_on_bfloat16(device_type: str, *, bf16: bool) -> str:
    """A sentence where `trainer.bf16` should be the other way on this CPU; empty where it is right, and on devices.

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

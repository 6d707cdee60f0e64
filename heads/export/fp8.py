"""Read and write weights in 8-bit floats with a scale for each block, as DeepSeek-V3 stores its own.

    w = code · scale of its block      code: float8_e4m3fn, ±448 at most      scale: amax of the block / 448

The scales of NAME are the tensor NAME_scale_inv, one for each block; the last blocks of rows and columns may be cut by
the matrix's end. quantization_config.weight_block_size in config.json is the block. Scales may be powers of two
(float8_e8m0fnu).
Sources: DeepSeek-V3 `inference/kernel.py` (`weight_dequant`), and transformers `integrations/finegrained_fp8.py`.
"""
# … experts, if any, R row, C column; S, U the same in blocks

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.export.folder import CONFIG

SUFFIX = "_scale_inv"
CODES = torch.float8_e4m3fn
LARGEST = float(torch.finfo(CODES).max)
DEFAULT_BLOCK = (128, 128)


def block_of(config: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        ValueError: the files are quantised in another way, or the block is not two positive integers.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method", "fp8") if isinstance(settings, dict) else settings
    if method != "fp8":
        raise ValueError(
            f"{folder / CONFIG} has quant_method {method!r}; allowed are modules in FP8 with scales by block, and "
            f"unquantised ones: give the model in one of these."
        )
    block = settings.get("weight_block_size") or DEFAULT_BLOCK
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ValueError(f"{folder / CONFIG} has weight_block_size {block!r}; allowed are two positive integers.")
    return block[0], block[1]


def dequantised(name: str, codes_RC: Tensor, scales_SU: Tensor | None, block: tuple[int, int]) -> Tensor:
    """(…, R, C): the numbers that codes stand for, in float32; weights that are not in FP8 are returned as they are.

    >>> codes = torch.tensor([[2.0, 4.0, 8.0]]).to(torch.float8_e4m3fn)
    >>> dequantised("w", codes, torch.tensor([[0.5, 2.0]]), (2, 2))
    tensor([[ 1.,  2., 16.]])

    Raises:
        ValueError: codes without scales or scales without codes, scales of another number, or entries that are no
            finite floats.
    """
    if codes_RC.dtype == CODES and scales_SU is not None:
        rows, columns = codes_RC.shape[-2:] if codes_RC.ndim > 1 else (0, 0)
        wanted = (*codes_RC.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if tuple(scales_SU.shape) != wanted:
            raise ValueError(
                f"{name}{SUFFIX} has shape {tuple(scales_SU.shape)}; blocks of {block[0]} × {block[1]} need {wanted}."
            )
        weight_RC = codes_RC.float() * spread(scales_SU.float(), codes_RC, block)
    elif codes_RC.dtype.itemsize > 1 and codes_RC.is_floating_point() and scales_SU is None:
        weight_RC = codes_RC
    else:
        beside = "beside" if scales_SU is not None else "without"
        raise ValueError(
            f"{name} is {str(codes_RC.dtype).removeprefix('torch.')} {beside} {SUFFIX[1:]}; read are floats of 16 bits "
            f"and more, and float8_e4m3fn beside its scales."
        )
    if not bool(weight_RC.isfinite().all()):
        raise ValueError(f"{name} has entries that are no finite floats; copy its file again.")
    return weight_RC


def quantised(weight_RC: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (…, R, C) and scales (…, S, U).

    Each block's largest number becomes the largest code, or a code down to half of it where scales are powers of two.
    """
    weight_RC = weight_RC.detach().cpu().float()
    rows, columns = weight_RC.shape[-2:]
    more = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(weight_RC, more)
    blocks = torch.unflatten(torch.unflatten(padded, -1, (-1, block[1])), -3, (-1, block[0]))
    scales_SU = blocks.abs().amax(dim=(-3, -1)) / LARGEST
    scales_SU = torch.where(scales_SU > 0, scales_SU, torch.ones_like(scales_SU))
    if scale_dtype == torch.float8_e8m0fnu:
        scales_SU = scales_SU.log2().ceil().exp2()
    stored_SU = scales_SU.to(scale_dtype)
    codes_RC = (weight_RC / spread(stored_SU.float(), weight_RC, block)).clamp(-LARGEST, LARGEST).to(CODES)
    return codes_RC, stored_SU


def spread(scales_SU: Tensor, like_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """(…, R, C): each entry's scale."""
    rows, columns = like_RC.shape[-2:]
    tall_RU = scales_SU.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return tall_RU.repeat_interleave(block[1], dim=-1)[..., :columns]


def unchanged(stored_RC: Tensor, weight_RC: Tensor) -> bool:
    """Whether heads still hold what was read, up to bfloat16, to which saving may have rounded them."""
    return torch.equal(stored_RC.bfloat16(), weight_RC.detach().cpu().bfloat16())


def near(weight_RC: Tensor, codes_RC: Tensor, scales_SU: Tensor, block: tuple[int, int]) -> bool:
    """Whether codes are the weights, up to half a unit of the codes' three bits, or half of the smallest code."""
    each_RC = spread(scales_SU.float(), codes_RC, block)
    wanted_RC = weight_RC.detach().cpu().float()
    allowed_RC = torch.maximum(wanted_RC.abs() * 2**-4, each_RC * 2**-10) * 1.001
    return bool(((codes_RC.float() * each_RC - wanted_RC).abs() <= allowed_RC).all())

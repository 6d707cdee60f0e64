"""Write and read one GGUF file: typed metadata and tensors, through the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.extras import needs_extra

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
USE = "The format gguf was requested"


def library() -> Any:
    """The package gguf.

    Raises:
        MissingExtraError: it is not installed.
    """
    with needs_extra("gguf", USE):
        import gguf
    return gguf


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str
) -> None:
    """
    Args:
        metadata: values by full key: strings, floats (stored as float32), integers (as uint32, in lists int32), lists.
        dtype: the dtype of matrices, one of `DTYPES`; vectors stay float32, which llama.cpp requires of norms.
    """
    writer = library().GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, tensor in tensors.items():
        array, kind = as_array(tensor, dtype)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def as_array(tensor: Tensor, dtype: str) -> tuple[Any, Any]:
    """The numbers as the package gguf takes them, and their kind if numpy has no such dtype."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.to(torch.int64).numpy(), None
    if tensor.ndim < 2 or dtype == "f32":
        return tensor.float().numpy(), None
    if dtype == "f16":
        return tensor.to(torch.float16).numpy(), None
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy(), library().GGMLQuantizationType.BF16


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's metadata and tensors, to check what was written."""
    reader = library().GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, {found.name: as_tensor(found) for found in reader.tensors}


def as_tensor(found: Any) -> Tensor:
    shape = [int(size) for size in reversed(found.shape)]
    data = np.array(found.data)
    if found.tensor_type.name == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(data).reshape(shape)

"""Read tensors by name from a model's safetensors, which are one file or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.inside import find_inside

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def find_shards(folder: str | Path) -> dict[str, Path]:
    """The file of each tensor of a model's folder, by the tensor's name.

    Raises:
        ValueError: no safetensors, a damaged file, or an index that leads out of the folder.
    """
    folder = Path(folder)
    index = find_inside(folder, INDEX)
    if index.is_file():
        return read_index(index)
    whole = find_inside(folder, WHOLE)
    if not whole.is_file():
        raise ValueError(f"{folder} holds neither {WHOLE} nor {INDEX}; give the model's folder as safetensors.")
    with open_shard(whole) as file:
        return dict.fromkeys(file.keys(), whole)


def read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor that an index names.

    Raises:
        ValueError: no index, or one that leads out of its folder.
    """
    try:
        names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = set(names.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of tensors ({type(error).__name__}); copy it again.") from None
    places = {file: find_inside(index.parent, file) for file in files}
    return {str(name): places[file] for name, file in names.items()}


def open_shard(path: Path) -> safe_open:
    """
    Raises:
        ValueError: a file that is missing or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or missing ({type(error).__name__}); copy it again.") from None


def read_named(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, one at a time, file by file.

    Raises:
        ValueError: a file that is damaged, or that lacks a tensor which the index names in it.
    """
    for path in sorted(set(files.values())):
        wanted = [name for name, where in files.items() if where == path]
        with open_shard(path) as file:
            if missing := sorted(set(wanted) - set(file.keys())):
                raise ValueError(f"{path} lacks {', '.join(missing[:6])}, which the index says it has; copy it again.")
            for name in wanted:
                yield name, file.get_tensor(name)

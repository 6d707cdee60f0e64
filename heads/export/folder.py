"""Open a foreign folder, whose config.json and tensors are not trusted, and put the tensors into heads.

Files of tensors are safetensors, or `.pt` and `.bin` read with `weights_only=True`, which refuses pickles that hold
code. Names in an index must not lead out of the folder (heads/inside.py).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from heads.backbone.model import Backbone
from heads.export.shards import read_index
from heads.families import build_config, create, family_module
from heads.inside import find_inside
from heads.interface.token_heads import TokenHeads

CONFIG = "config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""transformers' names for files of tensors."""
SHOWN = 6  # problems in one sentence
MOST_DIGITS = 4000


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        ValueError: no folder, no file, or one that is no JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds {CONFIG} and the tensors beside it.")
    path = find_inside(folder, CONFIG)
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG}; give the folder as it was released.")
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), parse_int=short_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give the folder as it was released.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__} in place of an object; give the folder as released.")
    return found


def short_integer(digits: str) -> int:
    """An integer of a JSON file, without Python's own error for very long ones.

    Raises:
        ValueError: it has more digits than any number of a model has.
    """
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def try_config(folder: str | Path) -> dict[str, Any]:
    """`read_config`, but empty where that raises, for recognising a folder."""
    try:
        return read_config(folder)
    except ValueError:
        return {}


def number_of(config: Mapping[str, Any], key: str, folder: str | Path, *, least: int = 1, most: int = 1 << 20) -> int:
    """A whole number of config.json.

    Raises:
        ValueError: it is missing, or no number in that range.

    >>> number_of({"medusa_num_heads": 4}, "medusa_num_heads", "a folder")
    4
    """
    found = config.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise ValueError(
            f"{Path(folder) / CONFIG} has {key} {found!r:.40}; allowed are integers from {least} to {most}."
        )
    return found


def find_tensors(folder: str | Path, names: Sequence[str]) -> Path:
    """The one file of tensors among these names.

    Raises:
        ValueError: none of them, or several, whose contents might differ.
    """
    found = [path for path in (find_inside(folder, name) for name in names) if path.is_file()]
    if len(found) != 1:
        given = " and ".join(path.name for path in found) or "none"
        raise ValueError(f"{folder} holds {given} of {', '.join(names)}; give a folder with one of them.")
    return found[0]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name, on the CPU; for a path that ends in `.index.json`, those of its shards.

    Raises:
        ValueError: a damaged file, a pickle with code, names that repeat, or an index that leads out of the folder.
    """
    if path.name.endswith(".index.json"):
        return read_shards(path)
    try:
        found = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except pickle.UnpicklingError:
        with path.open("rb") as file:
            if not file.read(2).startswith((b"PK", b"\x80")):
                raise ValueError(
                    f"{path} is no file of tensors (a pointer of Git LFS, a web page?); get it again."
                ) from None
        raise ValueError(
            f"{path} holds more than tensors, so reading it could run code; convert it to safetensors where it is from."
        ) from None
    except (
        SafetensorError,
        RuntimeError,
        EOFError,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path} is damaged or no file of tensors ({type(error).__name__}); copy it again.") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{path} holds something else than tensors by name; give a state dict.")
    return {str(name): tensor for name, tensor in found.items()}


def read_shards(index: Path) -> dict[str, Tensor]:
    """All tensors in the files that an index names, even tensors that the index does not name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(read_index(index).values())):
        shard = read_tensors(path)
        if repeated := set(shard) & set(tensors):
            raise ValueError(f"{index} has {', '.join(sorted(repeated)[:3])} in two files; copy the folder again.")
        tensors |= shard
    return tensors


def create_with(
    family: str, backbone: Backbone, tensors: Mapping[str, Tensor], folder: str | Path, **config: Any
) -> TokenHeads:
    """New heads that hold these tensors, by their native names.

    They are created on the meta device first, so that a config with larger sizes than the tensors costs no memory.

    Raises:
        ValueError: tensors misshapen, missing or extra, by name, or entries that are no finite floats.
    """
    fields = {name: value for name, value in config.items() if name != "draft_tokens"}
    if (tokens_S := config.get("draft_tokens")) is not None:
        fields["draft_vocabulary"] = len(tokens_S)
    with torch.device("meta"):
        sketch = family_module(family).Heads(build_config(family, **fields), backbone)
    check_shapes(sketch, tensors, folder)
    return load_tensors(create(family, backbone, **config), tensors, folder)


def check_shapes(token_heads: TokenHeads, tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    """
    Raises:
        ValueError: tensors misshapen, missing or extra, by name.
    """
    wanted = token_heads.state_dict()
    problems = [
        f"{name} has shape {tuple(tensors[name].shape)} in place of {tuple(wanted[name].shape)}"
        for name in sorted(set(tensors) & set(wanted))
        if tensors[name].shape != wanted[name].shape
    ]
    problems += [f"missing {name}" for name in sorted(set(wanted) - set(tensors))]
    problems += [f"extra {name}" for name in sorted(set(tensors) - set(wanted))]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"The tensors in {folder} do not fit {token_heads.family} heads on {token_heads.backbone.name}: "
            f"{'; '.join(problems[:SHOWN])}{more}."
        )


def load_tensors(token_heads: TokenHeads, tensors: Mapping[str, Tensor], folder: str | Path) -> TokenHeads:
    """Put tensors by their native names into new heads of these shapes.

    Raises:
        ValueError: entries that are no finite floats.
    """
    wanted = token_heads.state_dict()
    numbers = {name: tensor for name, tensor in tensors.items() if wanted[name].is_floating_point()}
    bad = [name for name, x in numbers.items() if not x.is_floating_point() or not bool(x.float().isfinite().all())]
    if bad:
        raise ValueError(
            f"{folder} has {', '.join(bad[:SHOWN])} with entries that are no finite floats; copy it again."
        )
    token_heads.load_state_dict(dict(tensors))
    return token_heads


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str) -> None:
    """Write config.json and one file of tensors, whose name ends in .safetensors or .pt; shared memory is copied."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    if name.endswith(".safetensors"):
        # save_file would write a file that only its owner may read.
        (folder / name).write_bytes(to_bytes(whole, metadata={"format": "pt"}))
    else:
        torch.save(whole, folder / name)
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def refuse_kind(folder: str | Path, format: str, reason: str) -> ValueError:
    """The error for a folder of another kind."""
    return ValueError(
        f"{folder} is no folder of the format {format}: {reason}. headway import --list shows the formats."
    )

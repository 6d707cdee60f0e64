"""Find the tensors of multi-token-prediction modules in a model's files, and the part of `mtp` heads that each fills.

`place_of` serves reading and writing: it gives the view of the heads' tensors into which a foreign tensor is read, and
from which it is written. Experts are stored one by one in released files, and fused in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.export.folder import number_of, read_config
from heads.export.fp8 import DEFAULT_BLOCK, SUFFIX, block_of
from heads.export.shards import find_shards, read_named

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a checkpoint names the tensors of its modules.

    Attributes:
        module: prefix of a module's norms and projection; {n} is its number.
        block: prefix of its decoder layer.
        after_layers: whether {n} continues the numbers of the backbone's layers.
        names: the foreign name of each of our parts.
        copies: tensors that repeat the backbone's embedding or unembedding, and which of the two.
        options: fields of the heads' Config for such modules.
    """

    module: str
    block: str
    names: Mapping[str, str]
    after_layers: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Modules:
    """The tensors of modules in a folder's files, by their foreign names.

    Attributes:
        files: the file of each tensor.
        native: our name of each tensor, as if experts were not fused; scales have none.
        copied: which of the backbone's tensors each copy repeats.
        scales: the name of each weight's scales, where it is stored in FP8.
        block: rows and columns that share one scale.
    """

    layout: Layout
    files: dict[str, Path]
    native: dict[str, str]
    copied: dict[str, str]
    scales: dict[str, str]
    block: tuple[int, int]

    def read_scales(self) -> dict[str, Tensor]:
        """The scales by the names of their weights."""
        found = dict(read_named({name: self.files[name] for name in self.scales.values()}))
        return {weight: found[name] for weight, name in self.scales.items()}

    @property
    def count(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.native.values())


def find_modules(folder: Path, layouts: Iterable[Layout]) -> Modules | None:
    """The modules of a model's folder; None if its files have none."""
    config = read_config(folder)
    inner = config.get("text_config") or config
    if not isinstance(inner, dict):
        raise ValueError(f"{folder} has a text_config that is no object; give the model's folder as it was released.")
    num_layers = number_of({"num_hidden_layers": 0, **inner}, "num_hidden_layers", folder, least=0)
    shards = find_shards(folder)
    for layout in layouts:
        named = {name: native_name(layout, name, num_layers) for name in shards}
        native = {name: ours for name, ours in named.items() if ours is not None}
        if any(ours.endswith(".eh_proj.weight") for ours in native.values()):
            copied = {name: native.pop(name).partition(":")[2] for name in list(native) if ":" in native[name]}
            files = {name: shards[name] for name in (*native, *copied)}
            scales = {name: name + SUFFIX for name in (*native, *copied) if name + SUFFIX in native}
            for name in scales.values():
                native.pop(name)
            block = block_of(config, folder) if scales else DEFAULT_BLOCK
            return Modules(layout=layout, files=files, native=native, copied=copied, scales=scales, block=block)
    return None


def native_name(layout: Layout, name: str, num_layers: int) -> str | None:
    """Our name of a foreign tensor; `copy:KIND` if it repeats the backbone's; None if it is no part of a module.

    >>> layout = Layout(module="mtp.", block="mtp.layers.{n}.", names={"eh_proj.weight": "fc.weight"})
    >>> native_name(layout, "mtp.fc.weight", 48), native_name(layout, "mtp.layers.0.mlp.gate.weight", 48)
    ('layers.0.eh_proj.weight', 'layers.0.mtp_block.mlp.gate.weight')
    >>> native_name(layout, "model.layers.0.mlp.gate.weight", 48) is None
    True
    """
    parts = {theirs: ours for ours, theirs in layout.names.items()}
    for place, in_block in ((layout.block, True), (layout.module, False)):
        pattern = re.escape(place).replace(r"\{n\}", r"(?P<n>\d+)")
        if (found := re.match(pattern, name)) is None:
            continue
        index = int(found.groupdict().get("n") or 0) - (num_layers if layout.after_layers else 0)
        rest = name[found.end() :]
        if index < 0:
            return None
        if rest in layout.copies:
            return f"copy:{layout.copies[rest]}"
        if rest in parts and (not in_block or layout.block == layout.module):
            return f"layers.{index}.{parts[rest]}"
        return f"layers.{index}.mtp_block.{rest}" if in_block else f"layers.{index}.{rest}"
    return None


def place_of(state: Mapping[str, Tensor], native: str) -> Tensor | None:
    """The view that one foreign tensor fills: a whole tensor of the heads, or one expert's part of a fused one."""
    if native in state:
        return state[native]
    found = EXPERT.fullmatch(native)
    fused = None if found is None else state.get(f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}")
    if found is None or fused is None or int(found[2]) >= len(fused):
        return None
    expert = fused[int(found[2])]
    if found[3] == "down":
        return expert
    half = len(expert) // 2
    return expert[:half] if found[3] == "gate" else expert[half:]

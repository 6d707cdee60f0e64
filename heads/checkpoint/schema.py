"""The fields of heads.json, which `save` writes beside the tensors of heads; they are checked when it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.families import build_config
from heads.inside import is_one_name
from heads.validation import build, validated

FORMAT_VERSION = 1
TENSORS, DESCRIPTION = "heads.safetensors", "heads.json"
RUN_FOLDERS = ("best", "last")
"""Where a training run saves heads, below its output_dir."""


@validated
@dataclass(kw_only=True)
class BackboneDescription:
    """The backbone that heads belong to.

    Attributes:
        name: a folder or a name on the hub.
        architecture: its class in transformers; None in older files.
        embedding_fingerprint: entries of its embedding, which differ in another backbone of the same sizes.
    """

    name: str
    hidden_size: int
    vocab_size: int
    embedding_fingerprint: list[float]
    architecture: str | None = None


@validated
@dataclass(kw_only=True)
class TrainedBackbone:
    """The backbone that was trained with the heads and lies beside them.

    Attributes:
        folder: name of its folder inside the heads' folder.
        adapter: the folder holds a LoRA adapter, not a whole model.
        fingerprint: entries of the trained weights.
    """

    folder: str
    fingerprint: list[float]
    adapter: bool = False

    def validate_folder(self) -> None:
        if not is_one_name(self.folder):
            raise ValueError(
                f"trained_backbone.folder={self.folder!r} was given; allowed is the name of a folder beside the heads."
            )


@validated
@dataclass(kw_only=True)
class HeadsDescription:
    """A whole heads.json.

    Attributes:
        config: fields of the family's Config.
        sha256: checksum of the tensors' file, so that files that do not belong together are refused.
        trained_backbone: null where the backbone was frozen.
        measured_accuracy: [k - 1][r]: share of positions at which rank r of head k was right, from which trees are
            grown; null where not measured.
        recipe: how the heads were made: resolved config, versions, commit, measurements.
        merged_from: the folder whose adapter was merged into the backbone.
        packed_layers: the microscaling format of each packed layer, by name; null for heads in floating point.
    """

    format_version: int
    family: str
    config: dict[str, Any]
    backbone: BackboneDescription
    sha256: str
    trained_backbone: TrainedBackbone | None = None
    num_parameters: int | None = None
    measured_accuracy: list[list[float]] | None = None
    recipe: dict[str, Any] | None = None
    merged_from: str | None = None
    packed_layers: dict[str, str] | None = None

    def validate_accuracy(self) -> None:
        rows = self.measured_accuracy
        if rows is not None and not (rows and rows[0] and all(len(row) == len(rows[0]) for row in rows)):
            raise ValueError(
                f"measured_accuracy has {[len(row) for row in rows]} ranks of its heads; allowed are equally long "
                f"lists of numbers, one for each head, or null."
            )


def read_description(folder: str | Path) -> HeadsDescription:
    """Read heads.json.

    Raises:
        ValueError: no such file, a damaged one, a later format version, or a field with a value that `save` never
            writes, which the sentence names.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        inside = [str(Path(folder) / name) for name in RUN_FOLDERS if (Path(folder) / name / DESCRIPTION).is_file()]
        instead = f"{' or '.join(inside)}, where its run saved heads" if inside else "a folder that heads were saved to"
        raise ValueError(f"{folder} holds no {DESCRIPTION}; give {instead}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON ({error}); it was damaged or cut short: save or copy the heads again."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it is no description of heads: give their folder.")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version}; this version reads up to {FORMAT_VERSION}.")
    try:
        description = build(HeadsDescription, content, of=DESCRIPTION)
        build_config(description.family, **description.config)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error} Save or copy the heads again.") from None
    return description


def look_up(record: Any, *names: str) -> Any:
    """What a record has below names; None where there is nothing.

    >>> look_up({"a": {"b": 1}}, "a", "b"), look_up({"a": [1]}, "a", "b")
    (1, None)
    """
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record

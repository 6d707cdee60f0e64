"""tree.json: the best tree for these heads on this machine, as `headway tune-tree` found it, and its conditions.

    {"paths": [[0], [0, 0]], "kind": "static", "lookup": 10, "compile": false, "packed": false, "prediction": {…},
     "measured_on": {…}, "heads_sha256": …, "other_batches": [{…}]}

A tree is meant for the batch size that it was measured at, `measured_on.batch`; `other_batches` holds entries of the
same form for other sizes. `kind` is "static" (the tree of `paths`), "dynamic" (`dynamic` holds nodes, depth and width;
`paths` the best static tree) or "plain" (no tree was faster than plain decoding). The file lies beside the heads:
`heads.load` parses it, and `TreeDecoding(token_heads)` uses it where it fits (heads/decoding/defaults.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from heads.decoding.proposers.prompt_lookup import MAX_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.inside import find_inside
from heads.interface.token_heads import TokenHeads
from heads.validation import build, validated, within

Kind = Literal["static", "dynamic", "plain"]
TUNED_TREE = "tree.json"


@dataclass(frozen=True, kw_only=True)
class TunedTree:
    """The content of a tree.json.

    Attributes:
        paths: the best static tree; empty if no static tree is faster than plain decoding.
        dynamic: the best dynamic tree, if it is better than the static one.
        lookup: length of the looked-up chain; 0: no chain; None: the file has only paths.
        compile: whether passes were faster as compiled graphs.
        packed: whether its passes were measured on packed weights (heads.pack_weights), which compiled ones do not use.
        prediction: predicted and measured speeds, for people to read.
        measured_on: machine, versions, batch and context; "device_type" and "dtype" decide whether the file is used.
        heads_sha256: checksum of the heads' tensors; None if the heads were never saved.
        other_batches: the entries for other batch sizes, one for each.
        path: the file that it was read from; not compared.
    """

    kind: Kind
    paths: tuple[tuple[int, ...], ...] = ()
    dynamic: DynamicTree | None = None
    lookup: int | None = 0
    compile: bool = False
    packed: bool = False
    prediction: Mapping[str, Any] = field(default_factory=dict)
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    heads_sha256: str | None = None
    other_batches: tuple[TunedTree, ...] = ()
    path: Path | None = field(default=None, compare=False)

    @property
    def batch(self) -> int | None:
        """The number of rows that it was measured with; None if the file does not say."""
        return self.measured_on.get("batch")

    @property
    def entries(self) -> tuple[TunedTree, ...]:
        """The entries for all batch sizes, this one first."""
        return (self, *self.other_batches)

    def for_batch(self, batch: int) -> TunedTree | None:
        """The entry for this batch size, or one without a batch size; None if there is neither."""
        return next((one for one in self.entries if one.batch in (None, batch)), None)

    def nearest(self, batch: int) -> TunedTree:
        """The entry whose batch size is nearest by ratio, the smaller one of two that are equally near."""
        known = sorted(self.entries, key=lambda one: one.batch or batch)
        return min(known, key=lambda one: abs(math.log((one.batch or batch) / batch)))

    @property
    def tree(self) -> Tree | DynamicTree:
        """The tree that `TreeDecoding` uses."""
        if self.kind == "plain":
            return Tree.root_only()
        return self.dynamic if self.dynamic is not None else Tree(self.paths)

    @property
    def static_tree(self) -> Tree | None:
        """The tree for a rule that cannot use a dynamic one; None if the file has no static tree."""
        if self.kind != "dynamic":
            return Tree.root_only() if self.kind == "plain" else Tree(self.paths)
        return Tree(self.paths) if self.paths else None

    @property
    def heads_used(self) -> int:
        return self.tree.depth or 0

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to heads and a machine; a file of paths alone was not."""
        return bool(self.measured_on) or self.heads_sha256 is not None

    def as_dict(self) -> dict[str, Any]:
        return {
            "paths": [list(path) for path in self.paths],
            "kind": self.kind,
            **({} if self.dynamic is None else {"dynamic": asdict(self.dynamic)}),
            "lookup": self.lookup,
            "compile": self.compile,
            "packed": self.packed,
            "prediction": dict(self.prediction),
            "measured_on": dict(self.measured_on),
            "heads_sha256": self.heads_sha256,
            **({"other_batches": [one.as_dict() for one in self.other_batches]} if self.other_batches else {}),
        }

    def as_json(self) -> str:
        content = self.as_dict()
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def why_unusable(self, token_heads: TokenHeads) -> str | None:
        """The reason why it does not fit these heads on their present device; None if it fits."""
        backbone = token_heads.backbone
        here = {"device_type": backbone.device.type, "dtype": name_dtype(backbone.dtype)}
        for name, found in here.items():
            if self.measured_on.get(name) != found:
                return f"it was measured on {name} {self.measured_on.get(name)!r} and this is {found!r}"
        if self.heads_sha256 is not None and self.heads_sha256 != token_heads.checksum:
            return "it was fitted to other weights of the heads"
        return None


@dataclass(frozen=True)
class UnreadableTree:
    """A damaged tree.json. Heads load all the same; `TreeDecoding` raises `reason` if it needs the file."""

    reason: str


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_tree_file(path: str | Path) -> TunedTree:
    """A tree.json, or a file of paths alone, {"paths": [[0], [0, 0], …]}.

    Raises:
        ValueError: the file is missing, cannot be read or holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        return replace(parse(content), path=Path(path))
    except FileNotFoundError:
        raise ValueError(f"The tree file {path} does not exist; trees lie in configs/trees/.") from None
    except OSError as error:
        raise ValueError(
            f"The tree file {path} cannot be read ({error.strerror or error}); give a JSON file of paths, or the "
            f"tree.json in a folder of heads."
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        said = str(error).rstrip(".")
        raise ValueError(
            f'The tree file {path} must hold {{"paths": [[0], [0, 0], …]}}, or what `headway tune-tree` wrote; {said}.'
        ) from None


@validated
@dataclass(kw_only=True)
class TreeFile:
    """The fields of a tree.json as they stand in JSON; `TunedTree` says what they mean."""

    paths: list[list[int]] | None = None
    kind: Kind = "static"
    dynamic: dict[str, Any] | None = None
    lookup: int | None = within(0, MAX_LOOKUP, default=None)
    compile: bool = False
    packed: bool = False
    prediction: dict[str, Any] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    heads_sha256: str | None = None
    other_batches: list[dict[str, Any]] = field(default_factory=list)

    def validate_batch(self) -> None:
        batch = self.measured_on.get("batch")
        if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
            raise ValueError(f"measured_on.batch={batch!r} was given; allowed are integers of at least 1, or null.")

    def validate_kind(self) -> None:
        if self.paths is None and self.kind != "plain":
            raise ValueError(f"kind={self.kind!r} was given without paths; give both.")
        if self.dynamic is None and self.kind == "dynamic":
            raise ValueError("kind='dynamic' was given without dynamic; give its nodes, depth and width.")


def parse(content: Any) -> TunedTree:
    """The file's content with every field checked.

    Raises:
        ValueError, TypeError: the content is no JSON object, or a field has a value that is not allowed.
    """
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    fields = build(TreeFile, {"lookup": 0, **content} if "kind" in content else content, of=TUNED_TREE)
    others = [parse(one) for one in fields.other_batches]
    batches = [fields.measured_on.get("batch"), *(one.batch for one in others)]
    if others and (None in batches or len(set(batches)) < len(batches) or any(one.other_batches for one in others)):
        raise ValueError(f"other_batches has the batch sizes {batches[1:]} beside {batches[0]}; each stands there once")
    without = fields.kind == "plain" or (fields.kind == "dynamic" and not fields.paths)
    return TunedTree(
        kind=fields.kind,
        paths=() if without else Tree(fields.paths or []).paths[1:],
        dynamic=DynamicTree(**fields.dynamic or {}) if fields.kind == "dynamic" else None,
        lookup=fields.lookup,
        compile=fields.compile,
        packed=fields.packed,
        prediction=fields.prediction,
        measured_on=fields.measured_on,
        heads_sha256=fields.heads_sha256,
        other_batches=tuple(others),
    )


def find_tuned_tree(folder: str | Path) -> TunedTree | UnreadableTree | None:
    """The tree.json in a folder of heads; None if the folder has none."""
    path = Path(folder) / TUNED_TREE
    if not path.is_file():
        return None
    try:
        return read_tree_file(find_inside(folder, TUNED_TREE))
    except ValueError as error:
        return UnreadableTree(str(error))

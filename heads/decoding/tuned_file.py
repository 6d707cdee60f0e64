"""tree.json: what `headway tune-tree` found best for these heads on this machine, and where it holds.

    {"paths": [[0], [0, 0]], "kind": "static", "lookup": 10, "compile": false, "prediction": {…}, "measured_on": {…},
     "heads_sha256": …}

`kind` is "static" (the tree of `paths`), "dynamic" (`dynamic` holds nodes, depth and width; `paths` the best static
tree) or "plain" (no tree is faster than none: the heads draft nothing). The file lies beside the heads: `heads.load`
parses it, and `TreeDecoding(token_heads)` uses it. A tree that was fitted to another device or dtype, or to other
heads, is used only where its file is asked for by name, and either way a warning says so.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from heads.decoding.proposers.prompt_lookup import MAX_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads
from heads.validation import build, validated, within

Kind = Literal["static", "dynamic", "plain"]
TUNED_TREE = "tree.json"


@dataclass(frozen=True, kw_only=True)
class TunedTree:
    """What a tree.json says.

    Attributes:
        paths: of the best static tree; none where no static tree is faster than plain decoding.
        dynamic: the best dynamic tree, where it is better than the static one.
        lookup: length of the chain beside the tree; 0: none; None: the file has paths alone and does not say.
        compile: passes were faster as compiled graphs.
        prediction: the speeds that were predicted and measured, for people.
        measured_on: machine, versions, batch and context; "device_type" and "dtype" decide whether the file is used.
        heads_sha256: of the heads' tensors; None where they were never saved.
        path: the file that it was read from; it takes no part in comparisons.
    """

    kind: Kind
    paths: tuple[tuple[int, ...], ...] = ()
    dynamic: DynamicTree | None = None
    lookup: int | None = 0
    compile: bool = False
    prediction: Mapping[str, Any] = field(default_factory=dict)
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    heads_sha256: str | None = None
    path: Path | None = field(default=None, compare=False)

    @property
    def tree(self) -> Tree | DynamicTree:
        """What `TreeDecoding` decodes with."""
        if self.kind == "plain":
            return Tree.root_only()
        return self.dynamic if self.dynamic is not None else Tree(self.paths)

    @property
    def static_tree(self) -> Tree | None:
        """The tree for a rule that cannot use a dynamic one; None: the file has no static tree."""
        if self.kind != "dynamic":
            return Tree.root_only() if self.kind == "plain" else Tree(self.paths)
        return Tree(self.paths) if self.paths else None

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to heads and a machine, as a file of paths alone was not."""
        return bool(self.measured_on) or self.heads_sha256 is not None

    def as_json(self) -> str:
        content = {
            "paths": [list(path) for path in self.paths],
            "kind": self.kind,
            **({} if self.dynamic is None else {"dynamic": asdict(self.dynamic)}),
            "lookup": self.lookup,
            "compile": self.compile,
            "prediction": dict(self.prediction),
            "measured_on": dict(self.measured_on),
            "heads_sha256": self.heads_sha256,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def why_unusable(self, token_heads: TokenHeads) -> str | None:
        """Why it does not fit these heads on their present device; None: it does."""
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
    """A damaged tree.json. Heads load all the same; `TreeDecoding` raises `reason` where it needs the file."""

    reason: str


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_tree_file(path: str | Path) -> TunedTree:
    """A tree.json, or a file of paths alone, {"paths": [[0], [0, 0], …]}.

    Raises:
        ValueError: the file is missing, cannot be read or holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return replace(parse(content), path=Path(path))
    except FileNotFoundError:
        raise ValueError(f"The tree file {path} does not exist; trees lie in configs/trees/.") from None
    except OSError as error:
        raise ValueError(
            f"The tree file {path} cannot be read ({error.strerror or error}); give a JSON file of paths, or the "
            f"tree.json in a folder of heads."
        ) from None
    except (ValueError, TypeError) as error:
        said = str(error).rstrip(".")
        raise ValueError(
            f'The tree file {path} must hold {{"paths": [[0], [0, 0], …]}}, or what `headway tune-tree` wrote; {said}.'
        ) from None


@validated
@dataclass(kw_only=True)
class TreeFile:
    """The fields of a tree.json as JSON has them; `TunedTree` has what they stand for."""

    paths: list[list[int]] | None = None
    kind: Kind = "static"
    dynamic: dict[str, Any] | None = None
    lookup: int | None = within(0, MAX_LOOKUP, default=None)
    compile: bool = False
    prediction: dict[str, Any] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=dict)
    heads_sha256: str | None = None

    def validate_kind(self) -> None:
        if self.paths is None and self.kind != "plain":
            raise ValueError(f"kind={self.kind!r} was given without paths; give both.")
        if self.dynamic is None and self.kind == "dynamic":
            raise ValueError("kind='dynamic' was given without dynamic; give its nodes, depth and width.")


def parse(content: Any) -> TunedTree:
    """The file's content with every field checked.

    Raises:
        ValueError, TypeError: it is no object, or a field has a value that is not allowed.
    """
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    fields = build(TreeFile, {"lookup": 0, **content} if "kind" in content else content, of=TUNED_TREE)
    without = fields.kind == "plain" or (fields.kind == "dynamic" and not fields.paths)
    return TunedTree(
        kind=fields.kind,
        paths=() if without else Tree(fields.paths or []).paths[1:],
        dynamic=DynamicTree(**fields.dynamic or {}) if fields.kind == "dynamic" else None,
        lookup=fields.lookup,
        compile=fields.compile,
        prediction=fields.prediction,
        measured_on=fields.measured_on,
        heads_sha256=fields.heads_sha256,
    )


def find_tuned_tree(folder: str | Path) -> TunedTree | UnreadableTree | None:
    """What the tree.json in a folder of heads says; None where there is none."""
    path = Path(folder) / TUNED_TREE
    if not path.is_file():
        return None
    try:
        return read_tree_file(path)
    except ValueError as error:
        return UnreadableTree(str(error))


def usable_tuned_tree(token_heads: TokenHeads) -> TunedTree | None:
    """The tree that was fitted to these heads, if there is one and it fits the present device and dtype.

    Raises:
        ValueError: the heads' tree.json is malformed.
    """
    tuned = token_heads.tuned_tree
    if isinstance(tuned, UnreadableTree):
        raise ValueError(tuned.reason)
    if not isinstance(tuned, TunedTree):
        return None
    if reason := tuned.why_unusable(token_heads):
        name, folder = (TUNED_TREE, "HEADS") if tuned.path is None else (tuned.path, tuned.path.parent)
        warnings.warn(
            f"{name} is not used: {reason}; `headway tune-tree {folder}` fits a tree to these heads here.",
            stacklevel=4,
        )
        return None
    return tuned


def open_tuned_tree(token_heads: TokenHeads, path: str | Path) -> TunedTree:
    """A tree file that was given by name. It is used; a warning says where it was fitted to something else.

    Raises:
        ValueError: the file is missing or malformed.
    """
    tuned = read_tree_file(path)
    if tuned.fitted and (reason := tuned.why_unusable(token_heads)):
        warnings.warn(
            f"{path} is used since it was asked for, but {reason}; `headway tune-tree` fits one to these heads here.",
            stacklevel=4,
        )
    return tuned

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

from heads.decoding.proposers.prompt_lookup import check_lookup
from heads.decoding.trees.dynamic import DynamicTree, check_integer
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads

Kind = Literal["static", "dynamic", "plain"]
KINDS: tuple[Kind, ...] = ("static", "dynamic", "plain")
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
    except (ValueError, KeyError, TypeError) as error:
        said = str(error).rstrip(".")
        raise ValueError(
            f'The tree file {path} must hold {{"paths": [[0], [0, 0], …]}}, or what `headway tune-tree` wrote; {said}.'
        ) from None


def parse(content: Any) -> TunedTree:
    """The file's content with every field checked.

    Raises:
        ValueError, KeyError, TypeError: they are not.
    """
    kind = content.get("kind", "static") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise ValueError(f"its kind is {kind!r}, allowed are {', '.join(KINDS)}")
    without = kind == "plain" or (kind == "dynamic" and content["paths"] == [])
    paths = () if without else Tree(content["paths"]).paths[1:]
    lookup = content.get("lookup", 0 if "kind" in content else None)
    compiles = content.get("compile", False)
    if not isinstance(compiles, bool):
        raise ValueError(f"its compile is {compiles!r}, allowed are true and false")
    checksum = content.get("heads_sha256")
    if not isinstance(checksum, str | None):
        raise ValueError(f"its heads_sha256 is {checksum!r}, allowed are a string and null")
    objects = {name: content.get(name, {}) for name in ("prediction", "measured_on")}
    if not all(isinstance(value, dict) for value in objects.values()):
        raise ValueError("its prediction and measured_on must be objects")
    return TunedTree(
        kind=kind,
        paths=paths,
        dynamic=DynamicTree(**content["dynamic"]) if kind == "dynamic" else None,
        lookup=None if lookup is None else check_lookup(check_integer(lookup, f"lookup={lookup!r}")),
        compile=compiles,
        heads_sha256=checksum,
        **objects,
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

"""tree.json: what `headway tune-tree` found best for these heads on this machine, and where it holds.

    {"paths": [[0], [0, 0]], "kind": "static", "lookup": 10, "prediction": {…}, "measured_on": {…}, "heads_sha256": …}

`kind` is "static" (the tree of `paths`), "dynamic" (`dynamic` holds nodes, depth and width; `paths` the best static
tree) or "plain" (no tree pays: nothing is drafted). The file lies beside the heads; `heads.load` remembers where, and
`TreeDecoding(token_heads)` reads it. What was fitted to another device, dtype or to other heads is not used.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from heads.decoding.dynamic_tree import DynamicTree
from heads.decoding.lookup import check_lookup
from heads.decoding.tree import Tree
from heads.interface import TokenHeads

Kind = Literal["static", "dynamic", "plain"]
KINDS: tuple[Kind, ...] = ("static", "dynamic", "plain")


@dataclass(frozen=True, kw_only=True)
class TunedTree:
    """What a tree.json says.

    Attributes:
        paths: of the best static tree; none where no tree pays.
        dynamic: the best dynamic tree, where it is better than the static one.
        lookup: tokens to look up beside the tree; 0: none.
        prediction: what was predicted on which evidence, for people.
        measured_on: machine, versions, batch and context; "device_type" and "dtype" decide whether the file is used.
        heads_sha256: of the heads' tensors; None where they were never saved.
    """

    kind: Kind
    paths: tuple[tuple[int, ...], ...] = ()
    dynamic: DynamicTree | None = None
    lookup: int = 0
    prediction: Mapping[str, Any] = field(default_factory=dict)
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    heads_sha256: str | None = None

    @property
    def tree(self) -> Tree | DynamicTree:
        """What `TreeDecoding` decodes with."""
        if self.kind == "plain":
            return Tree.root_only()
        return self.dynamic if self.dynamic is not None else Tree(self.paths)

    def as_json(self) -> str:
        content = {
            "paths": [list(path) for path in self.paths],
            "kind": self.kind,
            **({} if self.dynamic is None else {"dynamic": asdict(self.dynamic)}),
            "lookup": self.lookup,
            "prediction": dict(self.prediction),
            "measured_on": dict(self.measured_on),
            "heads_sha256": self.heads_sha256,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def not_for(self, token_heads: TokenHeads) -> str | None:
        """Why it must not be used for these heads where they are now; None: it may be."""
        backbone = token_heads.backbone
        here = {"device_type": backbone.device.type, "dtype": name_dtype(backbone.dtype)}
        for name, found in here.items():
            if self.measured_on.get(name) != found:
                return f"it was measured on {name} {self.measured_on.get(name)!r} and this is {found!r}"
        if self.heads_sha256 is not None and self.heads_sha256 != token_heads.checksum:
            return "it was fitted to other weights of the heads"
        return None


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_tree_file(path: str | Path) -> TunedTree:
    """A tree.json, or a file of paths alone, {"paths": [[0], [0, 0], …]}.

    Raises:
        ValueError: the file is missing or holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return parse(content)
    except FileNotFoundError:
        raise ValueError(f"The tree file {path} does not exist; trees lie in configs/trees/.") from None
    except (ValueError, KeyError, TypeError) as error:
        said = str(error).rstrip(".")
        raise ValueError(
            f'The tree file {path} must hold {{"paths": [[0], [0, 0], …]}}, or what `headway tune-tree` wrote; {said}.'
        ) from None


def parse(content: Any) -> TunedTree:
    """The fields of a file, each of its kind.

    Raises:
        ValueError, KeyError, TypeError: they are not.
    """
    kind = content.get("kind", "static") if isinstance(content, dict) else None
    if kind not in KINDS:
        raise ValueError(f"its kind is {kind!r}, allowed are {', '.join(KINDS)}")
    if kind == "plain":
        paths: tuple[tuple[int, ...], ...] = ()
    else:
        paths = Tree(content["paths"]).paths[1:]
    objects = {name: content.get(name, {}) for name in ("prediction", "measured_on")}
    if not all(isinstance(value, dict) for value in objects.values()):
        raise ValueError("its prediction and measured_on must be objects")
    return TunedTree(
        kind=kind,
        paths=paths,
        dynamic=DynamicTree(**content["dynamic"]) if kind == "dynamic" else None,
        lookup=check_lookup(operator.index(content.get("lookup", 0))),
        heads_sha256=content.get("heads_sha256"),
        **objects,
    )


def usable_tuned_tree(token_heads: TokenHeads) -> TunedTree | None:
    """The tree.json that lies beside the heads, where there is one and it was made for what runs here.

    Raises:
        ValueError: the file is malformed.
    """
    path = token_heads.tuned_tree
    if path is None or not path.is_file():
        return None
    tuned = read_tree_file(path)
    if reason := tuned.not_for(token_heads):
        warnings.warn(
            f"{path} is not used: {reason}; `headway tune-tree {path.parent}` fits a tree to these heads here.",
            stacklevel=4,
        )
        return None
    return tuned

"""The tree, the lookup length and whether passes are compiled, for each batch size of a `TreeDecoding`: as given, as
tuned for that size, or by default.

A tree.json that was fitted to another device or dtype, to other heads or to another batch size is used only if the
caller names its file. A warning is given whether it is used or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from heads.backbone.compiling.graph import what_stops_compiling
from heads.backbone.model import Backbone
from heads.decoding.acceptance.rules import Rule
from heads.decoding.proposers.heads import DraftIndices
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP, MAX_GROWTH, check_lookup
from heads.decoding.trees.dynamic import DynamicTree, check_integer
from heads.decoding.trees.static import TYPICAL_ACCURACY, Tree, grow_tree
from heads.decoding.tuned_file import TUNED_TREE, TunedTree, UnreadableTree, read_tree_file
from heads.interface.token_heads import TokenHeads
from heads.products.packed import is_multiplied_row_by_row, is_packed

DEFAULT_NODES, DEFAULT_NODES_ON_CPU = 16, 8
LEAST_NODES = 2  # the root and one drafted token
AnyTree = Tree | DynamicTree | Sequence[Sequence[int]] | str | Path | int
"""A tree in any of the forms that `TreeDecoding` takes."""


def check_sampled_tree(rule: Rule, tree: Tree | DynamicTree) -> None:
    if rule.samples_drafts and isinstance(tree, DynamicTree):
        raise ValueError(
            "rule='rejection' was given with a dynamic tree, whose nodes are the likeliest ones and not sampled; "
            "give a static tree (a node budget or a list of paths), or rule='exact'."
        )


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """The settings of one call; `indices` are the tree's, and are used by all of its passes."""

    tree: Tree | DynamicTree
    lookup: int
    compile: bool
    indices: DraftIndices

    @property
    def max_depth(self) -> int:
        """Of the deepest draft that a pass may verify: the tree's depth, or a looked-up chain at its longest."""
        return max(self.tree.depth or 0, MAX_GROWTH * self.lookup)


class SettingsByBatch:
    """The settings of a `TreeDecoding` for each batch size: its arguments, else those of tree.json for that size, else
    the defaults.

    For a rule that samples its drafts, which needs a static tree, that of the heads' tree.json is used.

    Raises:
        ValueError: an argument that is not allowed, or a tree.json that is malformed or does not fit the heads or rule.
    """

    def __init__(
        self, token_heads: TokenHeads, tree: AnyTree | None, lookup: int | None, compile: bool | None, rule: Rule
    ) -> None:
        self.token_heads, self.rule = token_heads, rule
        self.lookup = None if lookup is None else check_lookup(check_integer(lookup, f"lookup={lookup!r}"))
        self.tuned: TunedTree | None = None
        self.tree: Tree | DynamicTree | Sequence[Sequence[int]] | int | None = None
        self.asked_for = isinstance(tree, str | Path)
        if isinstance(tree, str | Path):
            self.tuned = open_tuned_tree(token_heads, tree)
        elif tree is None:
            self.tuned = usable_tuned_tree(token_heads)
        else:
            self.tree = tree
        entries = () if self.tuned is None else self.tuned.entries
        may_compile = compile is None and any(one.compile for one in entries) and can_compile(token_heads.backbone)
        self.compiled = [one.batch for one in entries if one.compile and may_compile]
        self.compile = bool(compile)
        self.by_batch = {one.batch: self.build(one, one.batch or 1) for one in entries}
        self._untuned: dict[int, TreeSettings] = {}
        self._said: set[int] = set()

    def untuned(self, batch: int) -> TreeSettings:
        """The settings where tree.json has no entry, built once for each node budget."""
        nodes = default_nodes(self.token_heads.backbone.heads_device, batch)
        if nodes not in self._untuned:
            self._untuned[nodes] = self.build(None, batch)
        return self._untuned[nodes]

    def at(self, batch: int) -> TreeSettings:
        tuned = None if self.tuned is None else self.tuned.for_batch(batch)
        if tuned is None and self.tuned is not None and self.asked_for:
            tuned = self.tuned.nearest(batch)
        return self.untuned(batch) if tuned is None else self.by_batch[tuned.batch]

    def of_call(self, batch: int) -> TreeSettings:
        """The settings for a call, which warns once for each batch size."""
        settings = self.at(batch)
        if batch not in self._said:
            self._said.add(batch)
            self.warn(batch, settings)
        return settings

    def warn(self, batch: int, settings: TreeSettings) -> None:
        """Warn of a batch size that tree.json has no entry for, of weights in another form than it measured, of packed
        weights that its compiled passes do not use, and without tree.json of weights whose products make trees slow.
        """
        backbone = self.token_heads.backbone
        if self.tuned is None:
            if not settings.compile:
                warn_of_costly_rows(backbone)
            return
        warn_of_batch(self.tuned, batch, asked_for=self.asked_for)
        used = self.tuned.for_batch(batch) or (self.tuned.nearest(batch) if self.asked_for else None)
        if used is not None and used.batch in self.compiled:
            warn_of_unused_packing(self.tuned.path, backbone)
        elif used is not None and not self.compile:
            warn_of_form(used, self.tuned.path, backbone)

    def build(self, tuned: TunedTree | None, batch: int) -> TreeSettings:
        tree, lookup = self.tree, self.lookup
        if tuned is not None:
            tree = tuned.static_tree if self.rule.samples_drafts and not self.asked_for else tuned.tree
            lookup = tuned.lookup if lookup is None else lookup
        chosen = choose_tree(self.token_heads, tree, batch)
        check_sampled_tree(self.rule, chosen)
        return TreeSettings(
            tree=chosen,
            lookup=DEFAULT_LOOKUP if lookup is None else lookup,
            compile=self.compile or (tuned is not None and tuned.batch in self.compiled),
            indices=DraftIndices(chosen, grounded=self.token_heads.grounded),
        )


def usable_tuned_tree(token_heads: TokenHeads) -> TunedTree | None:
    """The tree that was fitted to these heads, if there is one and it fits the model's device and dtype.

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
    """A tree file that the caller named. A warning is given if it was fitted to other heads or another machine.

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


def warn_of_batch(tuned: TunedTree, batch: int, *, asked_for: bool) -> None:
    """Warn if a tree.json has no entry for this batch size.

    Args:
        asked_for: whether the caller named the file; the entry of the nearest batch size is then used.
    """
    if tuned.for_batch(batch) is not None:
        return
    known = ", ".join(str(one.batch) for one in tuned.entries)
    name, folder = (TUNED_TREE, "HEADS") if tuned.path is None else (tuned.path, tuned.path.parent)
    used = f"what it says about {tuned.nearest(batch).batch} is used" if asked_for else "the default tree is used"
    warnings.warn(
        f"{name} was measured at batch size {known}, and this is a batch of {batch}: {used}; "
        f"`headway tune-tree {folder} --batch {batch}` adds this size.",
        stacklevel=2,
    )


def warn_of_form(used: TunedTree, path: Path | None, backbone: Backbone) -> None:
    """Warn if an entry of the tree.json at `path` was measured on packed weights and these are plain, or vice versa."""
    if not used.fitted or used.packed == (here := is_packed(backbone.model)):
        return
    forms, name, folder = ("plain", "packed"), path or TUNED_TREE, path.parent if path else "HEADS"
    warnings.warn(
        f"{name} was measured on {forms[used.packed]} weights, and the backbone's are {forms[here]} here: it is used "
        f"all the same; `headway tune-tree {folder}{' --pack' * here}` fits a tree to {forms[here]} ones.",
        stacklevel=3,
    )


def warn_of_unused_packing(path: Path | None, backbone: Backbone) -> None:
    """Warn if the weights are packed and the tree.json at `path` asks for compiled passes, which use plain ones."""
    if is_packed(backbone.model):
        warnings.warn(
            f"{path or TUNED_TREE} asks for compiled passes, which use plain weights: packing them has no effect; give "
            f"--no-compile (in Python compile=False), or leave them unpacked.",
            stacklevel=3,
        )


def warn_of_costly_rows(backbone: Backbone) -> None:
    """Warn of 16-bit weights on a processor without instructions for them, which PyTorch multiplies row by row."""
    if is_multiplied_row_by_row(backbone.layers[-1]):
        dtype = str(backbone.dtype).removeprefix("torch.")
        warnings.warn(
            f"This processor has no instructions for {dtype}, so a pass over eight tokens takes about five plain "
            f"steps; give --pack (in Python call heads.pack_weights on the model and on the heads), which reads each "
            f"weight once for all of them.",
            stacklevel=3,
        )


def can_compile(backbone: Backbone) -> bool:
    """Whether the passes of this backbone can be compiled, as tree.json asks; a warning says why not."""
    obstacle = what_stops_compiling(backbone)
    if obstacle:
        warnings.warn(f"tree.json asks for compiled passes, but {obstacle}; they run uncompiled.", stacklevel=4)
    return not obstacle


def choose_tree(
    token_heads: TokenHeads, tree: Tree | DynamicTree | Sequence[Sequence[int]] | int | None, batch: int = 1
) -> Tree | DynamicTree:
    """A tree from any of the forms that `TreeDecoding` takes, files excepted.

    Args:
        batch: rows that are decoded together, on which the default's nodes depend.

    Raises:
        ValueError: a malformed tree, or one that is deeper or has higher ranks than the heads can draft.
    """
    if tree is None or isinstance(tree, int):
        nodes = default_nodes(token_heads.backbone.heads_device, batch) if tree is None else tree
        accuracy = token_heads.measured_accuracy or TYPICAL_ACCURACY
        return grow_tree(nodes, token_heads.num_heads, [row[: token_heads.num_scored] for row in accuracy])
    if isinstance(tree, DynamicTree):
        depth = token_heads.num_heads if tree.depth is None else tree.depth
        chosen: Tree | DynamicTree = replace(tree, depth=depth)
    else:
        depth = (chosen := tree if isinstance(tree, Tree) else Tree(tree)).depth
    if depth > token_heads.max_depth:
        deepest = "" if token_heads.max_depth == token_heads.num_heads else f" that draft {token_heads.max_depth} deep"
        raise ValueError(
            f"The tree is {depth} deep but there are {token_heads.num_heads} heads{deepest}; "
            f"give paths of at most {token_heads.max_depth} ranks."
        )
    worst = 0 if isinstance(chosen, DynamicTree) else max((rank for path in chosen.paths for rank in path), default=0)
    if worst >= token_heads.num_scored:
        have = "the vocabulary has" if token_heads.draft_tokens_S is None else "the heads score"
        raise ValueError(
            f"The tree asks for rank {worst} but {have} {token_heads.num_scored} tokens; give ranks below that."
        )
    return chosen


def default_nodes(device: torch.device, batch: int = 1) -> int:
    """Nodes of the default tree of each row, the root included.

    Further nodes are nearly free where reading the weights bounds a pass, but not on a CPU: its matrix products of five
    and more rows cost several times the matrix-vector products of a plain pass, and the looked-up chain adds rows too.
    So on a CPU the rows of a batch share the nodes, as far as each keeps one drafted token
    (benchmarks/results/batches.md).

    >>> [default_nodes(torch.device("cpu"), batch) for batch in (1, 2, 4, 16)]
    [8, 4, 2, 2]
    """
    return max(LEAST_NODES, DEFAULT_NODES_ON_CPU // batch) if device.type == "cpu" else DEFAULT_NODES

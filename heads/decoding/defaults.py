"""Tree, length of the looked-up chain and kind of passes of a `TreeDecoding`: as given, as tuned, or by default."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from heads.backbone.compiled import what_stops_compiling
from heads.backbone.model import Backbone
from heads.decoding.acceptance.rules import Rule
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP, check_lookup
from heads.decoding.trees.dynamic import DynamicTree, check_integer
from heads.decoding.trees.static import TYPICAL_ACCURACY, Tree, grow_tree
from heads.decoding.tuned_file import open_tuned_tree, usable_tuned_tree
from heads.interface.token_heads import TokenHeads

DEFAULT_NODES, DEFAULT_NODES_ON_CPU = 16, 8
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
    """The arguments of `TreeDecoding`, each with a value."""

    tree: Tree | DynamicTree
    lookup: int
    compile: bool


def choose_settings(
    token_heads: TokenHeads, tree: AnyTree | None, lookup: int | None, compile: bool | None, rule: Rule
) -> TreeSettings:
    """The arguments that were given; for others what tree.json says; and the defaults where it says nothing.

    A rule that samples its drafts cannot use a dynamic tree: then the static tree of tree.json is used.
    """
    tuned = None
    if tree is None:
        tuned = usable_tuned_tree(token_heads)
        tree = None if tuned is None else tuned.static_tree if rule.samples_drafts else tuned.tree
    elif isinstance(tree, str | Path):
        tuned = open_tuned_tree(token_heads, tree)
        tree = tuned.tree
    if lookup is None:
        lookup = DEFAULT_LOOKUP if tuned is None or tuned.lookup is None else tuned.lookup
    if compile is None:
        compile = tuned is not None and tuned.compile and can_compile(token_heads.backbone)
    return TreeSettings(
        tree=choose_tree(token_heads, tree),
        lookup=check_lookup(check_integer(lookup, f"lookup={lookup!r}")),
        compile=compile,
    )


def can_compile(backbone: Backbone) -> bool:
    """Whether passes that tree.json alone wants compiled can be; a warning says why not."""
    obstacle = what_stops_compiling(backbone)
    if obstacle:
        warnings.warn(f"tree.json asks for compiled passes, but {obstacle}; they run uncompiled.", stacklevel=4)
    return not obstacle


def choose_tree(
    token_heads: TokenHeads, tree: Tree | DynamicTree | Sequence[Sequence[int]] | int | None
) -> Tree | DynamicTree:
    """A tree from any of the forms that `TreeDecoding` takes but a file, no deeper than the heads draft."""
    if tree is None or isinstance(tree, int):
        nodes = default_nodes(token_heads.backbone.heads_device) if tree is None else tree
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


def default_nodes(device: torch.device) -> int:
    """Nodes of the default tree, the root included.

    Where reading weights bounds a pass, further nodes are nearly free. A CPU pays for each: its matrix products of five
    and more rows cost several times the matrix-vector products of a plain pass, and the looked-up chain adds rows too.
    """
    return DEFAULT_NODES_ON_CPU if device.type == "cpu" else DEFAULT_NODES

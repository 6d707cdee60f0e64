"""Decide whether a tree.json is used for a call, and which of its batch sizes.

A tree that was fitted to another device or dtype, to other heads or to another batch size is used only if the caller
names its file; a warning is given in both cases. Without a fitting one, heads decode with the default tree.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from heads.decoding.tuned_file import TUNED_TREE, TunedTree, UnreadableTree, read_tree_file
from heads.interface.token_heads import TokenHeads


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
    """A tree file that the caller named. A warning says if it was fitted to something else.

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

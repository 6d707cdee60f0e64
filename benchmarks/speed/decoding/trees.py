"""The trees of a run: fitted to this machine as `headway tune-tree` does it, in a form that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from torch import Tensor

from benchmarks.shared import (
    say,
)
from benchmarks.speed.decoding.stored import Part, Store
from heads.checkpoint.opening import Opened
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import TunedTree, parse
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.report import verdict
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import build_tuned_tree

REPETITION_PENALTY = 1.1
FITTED_ON = 16  # prompts at least: trees fitted to fewer fit these prompts and no others
Trees = dict[str, Tree | DynamicTree]


def fitted_trees(store: Store, opened: Mapping[str, Opened], prompts: Sequence[Tensor], new_tokens: int) -> Part:
    """The trees of an earlier call, or new ones."""
    return store.read("trees") or store.measure(
        "trees", lambda: {kind: fit_trees(one, prompts, new_tokens) for kind, one in opened.items()}
    )


def fit_trees(opened: Opened, prompts: Sequence[Tensor], new_tokens: int) -> dict[str, Any]:
    """Fit a tree to each of the heads.

    Returns:
        By the heads' name: the verdict in words, the chosen tree, and the fastest tree without lookup; the last is None
        if no draft was accepted.
    """
    config = TuneConfig(new_tokens=new_tokens, repetition_penalty=REPETITION_PENALTY, checked_prompts=FITTED_ON // 2)
    found: dict[str, Any] = {}
    for name, token_heads in opened.token_heads.items():
        tuning = tune(token_heads, prompts, config, clock=clock_of(opened.model.device))
        chosen = build_tuned_tree(token_heads, tuning, num_prompts=len(prompts))
        finalists = sorted(tuning.finalists.values(), key=lambda choice: choice.tokens_per_second)
        alone = as_tuned(finalists[-1].tree).as_dict() if finalists else None
        found[name] = {"verdict": verdict(tuning), "chosen": chosen.as_dict(), "alone": alone}
    return found


def as_tuned(tree: Tree | DynamicTree) -> TunedTree:
    """A tree in the form in which tree.json has it."""
    if isinstance(tree, DynamicTree):
        return TunedTree(kind="dynamic", dynamic=tree)
    return TunedTree(kind="static", paths=tree.paths[1:])


def use_trees(console: Console, opened: Opened, fitted: Mapping[str, Any]) -> Trees:
    """Let `TreeDecoding` use the choices, and print them; returns the fastest trees without lookup.

    They take the place of the tree.json beside shipped heads, which was fitted on another machine.
    """
    alone: Trees = {}
    for name, token_heads in opened.token_heads.items():
        say(console, f"{name}: {fitted[name]['verdict']}")
        token_heads.tuned_tree = parse(fitted[name]["chosen"])
        if fitted[name]["alone"] is not None:
            alone[name] = parse(fitted[name]["alone"]).tree
    return alone

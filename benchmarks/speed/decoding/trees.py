"""The trees of a run: fitted to this machine as `headway tune-tree` does it, in a form that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.shared import say
from benchmarks.speed.decoding.stored import Part, Store
from heads.checkpoint.opening import Opened
from heads.decoding.defaults import default_nodes
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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What was fitted to one folder of heads on this machine.

    Attributes:
        chosen: what `headway tune-tree` would write; the tree.json beside shipped heads is of another machine.
        alone: the fastest tree without lookup; None if no draft was accepted.
    """

    chosen: TunedTree
    alone: Tree | DynamicTree | None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Fitted:
        alone = None if stored["alone"] is None else parse(stored["alone"]).tree
        return cls(chosen=parse(stored["chosen"]), alone=alone)

    def shape(self, *, lookup: bool, device: torch.device) -> Tree | DynamicTree | int | None:
        """The tree of a row of heads alone, or of heads with lookup.

        If tuning found lookup alone to be the fastest, a row with lookup uses the tree without lookup beside the chain,
        or the default tree if there is none, since lookup without heads has a row of its own.
        """
        if lookup and self.chosen.kind != "plain":
            return self.chosen.tree
        if self.alone is None:
            return default_nodes(device) if self.chosen.kind == "plain" else self.chosen.tree
        return self.alone


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


def read_trees(console: Console, opened: Opened, fitted: Mapping[str, Any]) -> dict[str, Fitted]:
    """The stored choices for each of the heads, whose verdicts are printed."""
    for name in opened.token_heads:
        say(console, f"{name}: {fitted[name]['verdict']}")
    return {name: Fitted.read(fitted[name]) for name in opened.token_heads}

"""Trees for a benchmark's heads, fitted here as `headway tune-tree` fits them, and written nowhere.

A tree.json beside shipped heads would be another machine's. Texts for the fit have a repetition penalty, like the block
whose targets count, and are written behind prompts that are not measured on.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from torch import Tensor

from heads.checkpoint.opening import Opened
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.report import verdict
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import build_tuned_tree


def fit_trees(
    console: Console, opened: Opened, prompts: Sequence[Tensor], config: TuneConfig
) -> dict[str, Tree | DynamicTree]:
    """Fit a tree to each of the heads, which `TreeDecoding` uses from then on, and print what was chosen.

    Returns:
        By name of the heads the tree that is the fastest without a looked-up chain; none where no draft is accepted.
    """
    alone: dict[str, Tree | DynamicTree] = {}
    for name, token_heads in opened.token_heads.items():
        tuning = tune(token_heads, prompts, config, clock=clock_of(opened.model.device))
        console.print(f"{name}: {verdict(tuning)}", highlight=False, soft_wrap=True)
        token_heads.tuned_tree = build_tuned_tree(token_heads, tuning, num_prompts=len(prompts))
        if tuning.finalists:
            alone[name] = max(tuning.finalists.values(), key=lambda choice: choice.tokens_per_second).tree
    return alone

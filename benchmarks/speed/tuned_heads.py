"""Trees for a benchmark's heads, fitted here as `headway tune-tree` fits them, and gone when the benchmark ends.

A tree.json beside shipped heads would be another machine's. Texts for the fit have a repetition penalty, like the block
whose targets count, and are written behind prompts that are not measured on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from torch import Tensor

from heads.checkpoint.opening import Opened
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.outcome import tuned_tree
from heads.tuning.report import verdict
from heads.tuning.tune import tune


@contextlib.contextmanager
def tuned(
    console: Console, opened: Opened, prompts: Sequence[Tensor], config: TuneConfig
) -> Iterator[dict[str, Tree | DynamicTree]]:
    """For a while `TreeDecoding` uses trees that were fitted here; what was chosen is printed.

    Yields:
        By name of the heads the tree that is the fastest without a looked-up chain; none where no draft is accepted.
    """
    before = {name: token_heads.tuned_tree for name, token_heads in opened.token_heads.items()}
    alone: dict[str, Tree | DynamicTree] = {}
    with TemporaryDirectory() as folder:
        for name, token_heads in opened.token_heads.items():
            tuning = tune(token_heads, prompts, config, clock=clock_of(opened.model.device))
            console.print(f"{name}: {verdict(tuning)}", highlight=False, soft_wrap=True)
            path = Path(folder) / f"{name}.json"
            path.write_text(tuned_tree(token_heads, tuning, num_prompts=len(prompts)).as_json(), encoding="utf-8")
            token_heads.tuned_tree = path
            if tuning.finalists:
                alone[name] = max(tuning.finalists.values(), key=lambda choice: choice.tokens_per_second).tree
        try:
            yield alone
        finally:
            for name, token_heads in opened.token_heads.items():
                token_heads.tuned_tree = before[name]

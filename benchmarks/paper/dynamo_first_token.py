"""Does training with heads help the first token? `python -m benchmarks.paper.dynamo_first_token`.

DynaMo (table 9, appendix C.2.3) finds a lower PPL_1 than that of the same backbone trained as long without heads. Here
the demo's backbone with DynaMo heads is compared with the backbone before training, and with one trained without heads
on the same data, with the same steps and rate (it is trained first if its run is missing: 15 minutes on one core).
Losses are compared block by block.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shared import figures_table, parser_of, run_benchmark, say
from heads.backbone.loading import BackboneConfig, load_backbone
from heads.checkpoint.opening import open_heads
from heads.evaluation.predictions import read_blocks

LONGER = Path("checkpoints/runs/demo-base-longer")
COMMAND = (
    *("train.py", "--config", "configs/demo/dynamo.yaml", "--family", "null", "--heads", "{}"),
    *("--rates.heads_to_base", "null", "--output_dir", str(LONGER), "--overwrite", "true"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console()
    if not (LONGER / "last").is_dir():
        subprocess.run([Path(sys.executable).parent / "accelerate", "launch", *COMMAND], check=True)
    opened = open_heads([options.heads])
    tokens_BT = torch.stack(
        [block.tokens_T for block in read_blocks(opened, (), options.blocks, 256) if len(block.tokens_T) == 256]
    )
    models = {
        "backbone": load(opened.source),
        "backbone, as long without heads": load(LONGER / "last"),
        "backbone, with DynaMo heads": opened.model,
    }
    losses = {name: block_losses(model, tokens_BT) for name, model in models.items()}
    console.print(show(losses))
    with_heads, without = losses["backbone, with DynaMo heads"], losses["backbone, as long without heads"]
    verdict = "no worse" if with_heads.mean() <= without.mean() else "worse"
    say(console, f"PPL₁ with heads is {verdict} than without after the same training")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_first_token", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument("--blocks", type=int, default=256, help="held-out blocks of 256 tokens")
    return parser


def load(folder: str | Path) -> Any:
    return load_backbone(BackboneConfig(name_or_path=str(folder), dtype="float32"))


@torch.no_grad()
def block_losses(model: Any, tokens_BT: Tensor) -> Tensor:
    """(B,): each block's mean -log p of the next token."""
    losses = []
    for part_BT in tokens_BT.split(16):
        logits_BTV = model(part_BT).logits[:, :-1].float()
        losses_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), part_BT[:, 1:], reduction="none")
        losses.append(losses_BT.mean(dim=1))
    return torch.cat(losses).double()


def show(losses: dict[str, Tensor]) -> Table:
    """A table of each PPL₁, and of each loss minus the last one's, with the standard error over blocks."""
    title = f"first token on {len(next(iter(losses.values())))} held-out blocks"
    table = figures_table(title, "", "PPL₁", "loss over the last row's", "standard error")
    last = list(losses.values())[-1]
    for name, loss in losses.items():
        over = loss - last
        error = float(over.std()) / math.sqrt(len(over))
        table.add_row(name, f"{math.exp(loss.mean()):.3f}", f"{float(over.mean()):+.4f}", f"{error:.4f}")
    return table


if __name__ == "__main__":
    run_benchmark(main)

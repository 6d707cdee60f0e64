"""Heads on a frozen backbone beside training both, on the demo backbone: `python -m benchmarks.paper.joint_training`.

Four runs have the same heads, data and steps, and each adds one thing: heads on a frozen backbone; a trained adapter on
the backbone; a warm-in of the heads' loss; self-distillation of the backbone (Medusa-2). PPL_1 is the backbone's on
held-out blocks. Tokens per pass are measured greedily with the heads alone on the trained backbone. Finished rows are
stored in --out and not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.paper.trained_rows import short_run, train_row, what_trains
from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, wide_console
from benchmarks.stored_rows import StoredRow, load_or_measure
from heads.checkpoint.adapter import LoraSettings
from train.config import RatesConfig, TrainConfig, read_config
from train.objective.weights import SelfDistillationConfig, WarmInConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointRow:
    """Measurements of one variant; `kl` is the divergence from the backbone before training, None without a teacher."""

    name: str
    trained: int
    steps: int
    seconds: float
    tokens_per_pass: float
    ppl_before: float
    ppl_after: float
    kl: float | None


def frozen(config: TrainConfig) -> TrainConfig:
    config = dataclasses.replace(joint(config), warm_in=WarmInConfig())
    return dataclasses.replace(config, rates=RatesConfig(heads=config.rates.heads), lora=LoraSettings())


def joint(config: TrainConfig) -> TrainConfig:
    constant = WarmInConfig(coefficient=config.warm_in.coefficient)
    return dataclasses.replace(config, warm_in=constant, self_distillation=SelfDistillationConfig())


def warmed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, self_distillation=SelfDistillationConfig())


def distilled(config: TrainConfig) -> TrainConfig:
    return config


VARIANTS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "heads on a frozen backbone": frozen,
    "with an adapter": joint,
    "with an adapter, warm-in": warmed,
    "with an adapter, warm-in, self-distillation": distilled,
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    rows = [row_of(name, options) for name in VARIANTS]
    say(console, describe_cpu())
    console.print(table(rows, f"{options.steps} steps of {options.batch} × {options.block_size} tokens"))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.joint_training", __doc__)
    parser.add_argument("--config", default="configs/demo/medusa2.yaml", help="the last row; others leave parts out")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each variant")
    parser.add_argument("--batch", type=int, default=8, help="blocks of a step")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of a block")
    parser.add_argument("--eval-blocks", type=int, default=48, help="held-out blocks")
    parser.add_argument("--out", default="checkpoints/runs/joint_training", help="finished rows are stored here")
    return parser


def row_of(name: str, options: argparse.Namespace) -> JointRow:
    """The stored row of a variant, or a new one, which is trained and measured without saving its weights."""
    config = VARIANTS[name](shortened(options))
    config.check()
    stored = StoredRow(
        folder=Path(options.out),
        name=name.replace(", ", "-").replace(" ", "_"),
        settings=what_trains(config) | {"output_dir": ""},
    )

    def measure(folder: Path) -> JointRow:
        before: list[float] = []
        trained = train_row(
            dataclasses.replace(config, output_dir=str(folder)),
            at_start=lambda trainer: before.append(trainer.backbone_loss()),
        )
        found = trained.trainer.evaluate()
        return JointRow(
            name=name,
            trained=trained.parameters,
            steps=options.steps,
            seconds=trained.seconds,
            tokens_per_pass=found["eval_tokens_per_pass"],
            ppl_before=math.exp(before[0]),
            ppl_after=math.exp(found["eval_backbone_loss"]),
            kl=found.get("eval_backbone_kl"),
        )

    return load_or_measure(stored, JointRow, measure)


def shortened(options: argparse.Namespace) -> TrainConfig:
    """The config with this benchmark's steps and blocks, without evaluations or checkpoints."""
    config = read_config(["--config", options.config])
    data = dataclasses.replace(config.data, block_size=options.block_size, max_eval_blocks=options.eval_blocks)
    return short_run(config, steps=options.steps, batch=options.batch, data=data, output_dir=options.out)


def table(rows: Sequence[JointRow], title: str) -> Table:
    measured = ("tokens per pass", "PPL₁ before", "PPL₁ after", "KL from before")
    made = figures_table(title, "", "trained", "seconds", *measured)
    for row in sorted(rows, key=lambda row: list(VARIANTS).index(row.name)):
        kl = "–" if row.kl is None else f"{row.kl:.4f}"
        figures = (f"{row.tokens_per_pass:.2f}", f"{row.ppl_before:.3f}", f"{row.ppl_after:.3f}", kl)
        made.add_row(row.name, f"{row.trained:,}", f"{row.seconds:.0f}", *figures)
    return made


if __name__ == "__main__":
    run_benchmark(main)

"""What training the backbone with its heads gives, on the demo backbone: `python -m benchmarks.paper.joint_training`.

The same heads, data and steps four times, each row with one thing more: heads on a frozen backbone; an adapter on the
backbone trained with them; the heads' loss warmed in; the backbone taught by itself as it was (Medusa-2). PPL_1 is
the backbone's on held-out blocks, tokens per pass are of greedy decoding by the heads alone, with the backbone as it
has become. Finished rows are kept in --json and not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import transformers
from rich import box
from rich.table import Table
from transformers import PrinterCallback, set_seed

from benchmarks.consoles import wide_console
from benchmarks.paper.dynamo_ablation import read_rows, write_rows
from heads.backbone.loading import load_tokenizer
from heads.checkpoint.adapter import LoraSettings
from heads.evaluation.tables import describe_machine
from train.config import RatesConfig, TrainConfig, read_config
from train.data.packing import build_datasets
from train.loop.building import build_model, build_trainer, training_arguments
from train.objective.weights import SelfDistillationConfig, WarmInConfig
from train.run import explain_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one variant; `kl` is from the backbone as it was, where the run keeps that."""

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
    rows: list[Row] = read_rows(options, Row)
    for name in VARIANTS:
        if name not in {row.name for row in rows}:
            print(f"{name} …", file=sys.stderr, flush=True)
            rows.append(run_variant(name, options))
            write_rows(rows, options)
    machine = describe_machine(torch.device("cpu"))
    console.print(f"{machine['cpu']}, {machine['threads']} threads", highlight=False, soft_wrap=True)
    console.print(table(rows, f"{options.steps} steps of {options.batch} × {options.block_size} tokens"))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.joint_training", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--config",
        default="configs/demo/medusa2.yaml",
        help="the last row's; others leave out (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each variant (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="blocks of a step (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--eval-blocks", type=int, default=48, help="held-out blocks (default: %(default)s)")
    parser.add_argument("--json", help="keep finished rows here, and go on from them")
    return parser


def run_variant(name: str, options: argparse.Namespace) -> Row:
    """Train one variant and measure it; nothing is saved but the row."""
    with tempfile.TemporaryDirectory() as folder:
        config = VARIANTS[name](shortened(options, folder))
        config.check()
        arguments = training_arguments(config)
        set_seed(config.seed)
        tokenizer = load_tokenizer(config.backbone)
        model = build_model(config, arguments.device)
        data = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=model.backbone.vocab_size)
        trainer = build_trainer(config, arguments, model, tokenizer, data)
        trainer.remove_callback(PrinterCallback)  # the table is what is printed
        before = math.exp(trainer.backbone_loss())  # the run's own measurement of it is part of its seconds
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        found = trainer.evaluate()
        return Row(
            name=name,
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            steps=options.steps,
            seconds=seconds,
            tokens_per_pass=found["eval_tokens_per_pass"],
            ppl_before=before,
            ppl_after=math.exp(found["eval_backbone_loss"]),
            kl=found.get("eval_backbone_kl"),
        )


def shortened(options: argparse.Namespace, folder: str) -> TrainConfig:
    """The config with this benchmark's steps and blocks, and nothing evaluated or saved on the way."""
    config = read_config(["--config", options.config])
    data = dataclasses.replace(config.data, block_size=options.block_size, max_eval_blocks=options.eval_blocks)
    fields = {
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "eval_on_start": False,
        "disable_tqdm": True,
        "logging_steps": options.steps,
    }
    return dataclasses.replace(
        config,
        output_dir=folder,
        data=data,
        evaluation=dataclasses.replace(config.evaluation, every_steps=0),
        trainer=config.trainer | fields,
        report_to=[],
        save_every_steps=0,
    )


def table(rows: Sequence[Row], title: str) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("", no_wrap=True)
    for column in ("trained", "seconds", "tokens per pass", "PPL₁ before", "after", "KL from the original"):
        made.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: list(VARIANTS).index(row.name)):
        kl = "–" if row.kl is None else f"{row.kl:.4f}"
        figures = (f"{row.tokens_per_pass:.2f}", f"{row.ppl_before:.3f}", f"{row.ppl_after:.3f}", kl)
        made.add_row(row.name, f"{row.trained:,}", f"{row.seconds:.0f}", *figures)
    return made


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    explain_errors(main)

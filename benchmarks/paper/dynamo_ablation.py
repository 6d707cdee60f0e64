"""Table 9 of DynaMo on the demo backbone: `python -m benchmarks.paper.dynamo_ablation`. Every variant is trained.

Each variant is its config in configs/pile/ablation/ (the paper's setting on Pythia-70M) with the demo's backbone, data
and steps in place of the paper's, and the demo's three rates in place of LR_B, LR_M and LR_MB. PPL_n is exp of the mean
loss on held-out blocks; PPL_{1:n} is their geometric mean. Finished rows are stored in --out and not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.paper.trained_rows import StoredRow, load_or_measure, short_run, train_row
from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, wide_console
from train.config import RatesConfig, TrainConfig, read_config
from train.loop.batches import collate
from train.objective.losses import chunked_cross_entropy
from train.objective.model import TrainedModel

CONFIGS = Path("configs/pile/ablation")
PAPER_RATES = {"base": 1e-5, "heads": 1e-3, "heads_to_base": 1e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationVariant:
    """A row of table 9.

    Attributes:
        config: file in configs/pile/ablation; None is the untrained backbone.
        paper: the paper's PPL_1, PPL_2, PPL_3; None where it has none.
        trains: measured after training; False measures the variant before its first step.
    """

    name: str
    config: str | None
    paper: tuple[float | None, float | None, float | None]
    trains: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationRow:
    """Measurements of one variant; `ppl` has PPL_1, PPL_2, PPL_3, None where a variant has no such head."""

    name: str
    trained: int
    steps: int
    seconds: float
    ppl: list[float | None]


VARIANTS = (
    AblationVariant(name="backbone", config=None, paper=(20.2, None, None)),
    AblationVariant(name="backbone+", config="dynamo_70m_plus", paper=(20.1, None, None)),
    AblationVariant(name="T1-L2", config="dynamo_70m_t1_l2", paper=(21.4, 1455.8, None)),
    AblationVariant(name="T1-L2-M(-1)R", config="dynamo_70m_t1_l2_m1r", paper=(20.3, 645.3, None)),
    AblationVariant(name="96M-T2: own unembedding", config="dynamo_96m_t2", paper=(19.9, 252.4, None)),
    AblationVariant(name="74M-T2 (C): copied layer at LR_B", config="dynamo_74m_t2_c", paper=(18.3, 296.4, None)),
    AblationVariant(name="copied layer, not trained", config="dynamo_74m_t2_c", paper=(None, None, None), trains=False),
    AblationVariant(name="70M-T2 (LoRA)", config="dynamo_70m_t2_lora", paper=(20.2, 1368.1, None)),
    AblationVariant(name="99M-T2: own layer and unembedding", config="dynamo_99m_t2", paper=(18.3, 111.5, None)),
    AblationVariant(name="74M-T2 (NP): last tap", config="dynamo_74m_t2_np", paper=(18.8, 131.1, None)),
    AblationVariant(name="74M-T2-H: heads only", config="dynamo_74m_t2_h", paper=(20.2, 119.1, None)),
    AblationVariant(name="74M-T2", config="dynamo_74m_t2", paper=(18.3, 112.4, None)),
    AblationVariant(name="77M-T2: two layers a head", config="dynamo_77m_t2", paper=(18.3, 86.7, None)),
    AblationVariant(name="77M-T3", config="dynamo_77m_t3", paper=(18.3, 111.4, 262.0)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    demo = read_config(["--config", options.config])
    demo.data.block_size = options.block_size
    rows = [row_of(variant, demo, options) for variant in VARIANTS]
    say(console, describe_cpu())
    console.print(table(rows, f"{options.steps} steps of {options.batch} × {options.block_size} tokens"))
    for text, holds in claims({row.name: row for row in rows}):
        say(console, f"  {text}: {'yes' if holds else 'no'}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_ablation", __doc__)
    parser.add_argument("--config", default="configs/demo/dynamo.yaml", help="whose backbone, data and rates")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each variant")
    parser.add_argument("--batch", type=int, default=8, help="blocks of a step")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of a block")
    parser.add_argument("--eval-blocks", type=int, default=64, help="held-out blocks")
    parser.add_argument("--out", default="checkpoints/runs/dynamo_ablation", help="finished rows are stored here")
    return parser


def row_of(variant: AblationVariant, demo: TrainConfig, options: argparse.Namespace) -> AblationRow:
    """The stored row of a variant, or a new one, which is trained and measured without saving its weights."""
    trains = variant.trains and variant.config is not None
    config = on_the_demo(variant, demo, options)

    def measure(folder: Path) -> AblationRow:
        found = train_row(dataclasses.replace(config, output_dir=str(folder)), steps=trains)
        return AblationRow(
            name=variant.name,
            trained=found.parameters if trains else 0,
            steps=options.steps if trains else 0,
            seconds=found.seconds,
            ppl=perplexities(found.model, found.data.eval, options.eval_blocks),
        )

    return load_or_measure(stored_row(variant, config, options), AblationRow, measure)


def on_the_demo(variant: AblationVariant, demo: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """The variant's config with the demo's backbone, data, steps and rates."""
    path = CONFIGS / f"{variant.config or 'dynamo_70m_plus'}.yaml"
    config = read_config(["--config", str(path)])
    lora = {"lora_targets": None} if config.heads.get("lora_rank") else {}  # the demo's layers have other names
    rates = translate(config.rates, demo.rates, with_heads=config.family is not None)
    config = dataclasses.replace(config, backbone=demo.backbone, data=demo.data, rates=rates)
    config = dataclasses.replace(config, evaluation=demo.evaluation, trainer=demo.trainer, heads=config.heads | lora)
    return short_run(config, steps=options.steps, batch=options.batch)


def translate(rates: RatesConfig, demo: RatesConfig, *, with_heads: bool) -> RatesConfig:
    """Replace LR_B, LR_M and LR_MB of table 4 by the demo's rates, in whichever field they are.

    Raises:
        ValueError: a rate is none of the three.
    """
    by_value: dict[float | None, float | None] = {value: getattr(demo, name) for name, value in PAPER_RATES.items()}
    by_value |= {None: None, 0.0: 0.0}
    given = dataclasses.asdict(rates) if with_heads else {"base": rates.base}
    if not set(given.values()) <= set(by_value):
        raise ValueError(
            f"{given} has rates that are not table 4's {PAPER_RATES}; give those in configs/pile/ablation."
        )
    return RatesConfig(**{name: by_value[value] for name, value in given.items()})  # type: ignore[arg-type]


@torch.no_grad()
def perplexities(model: TrainedModel, blocks: Any, count: int) -> list[float | None]:
    """PPL_1, PPL_2, PPL_3. A backbone with shifted labels has PPL_2; PPL_1 only where its first layer looks ahead."""
    model.eval()
    found = mean_losses(model, blocks, count, lookahead=0.0)
    if model.lookahead:
        found[1] = mean_losses(model, blocks, count, lookahead=1.0)[2]
    return [math.exp(found[n]) if n in found else None for n in (1, 2, 3)]


def mean_losses(model: TrainedModel, blocks: Any, count: int, *, lookahead: float) -> dict[int, float]:
    """The mean of -log p(x_{t+n}) over the first blocks, by label shift n."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for start in range(0, min(count, len(blocks)), 16):
        batch = collate([blocks[i] for i in range(start, min(start + 16, count, len(blocks)))])
        states = model.backbone_states(
            batch["input_ids"], batch["loss_mask"], batch["document_ids"], lookahead=lookahead
        )
        for rows in model.head_rows(states, with_backbone=True):
            loss = chunked_cross_entropy(rows.projection, rows.hidden_RD, rows.labels_R)
            sums[rows.shift] = sums.get(rows.shift, 0.0) + float(loss)
            counts[rows.shift] = counts.get(rows.shift, 0) + len(rows.labels_R)
    return {shift: total / counts[shift] for shift, total in sums.items()}


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """PPL_{1:n} of PPL_1 … PPL_n.

    >>> round(geometric_mean([18.3, 111.4]), 1)
    45.2
    """
    known = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(values) else None


def table(rows: Sequence[AblationRow], title: str) -> Table:
    perplexities = ("PPL₁", "PPL₂", "PPL₃", "PPL₁₂", "PPL₁₂₃", "paper's PPL₁, PPL₂, PPL₃")
    made = figures_table(title, "variant", "trained", "seconds", *perplexities)
    papers = {variant.name: variant.paper for variant in VARIANTS}
    for row in sorted(rows, key=lambda row: list(papers).index(row.name)):
        measured = [*row.ppl, geometric_mean(row.ppl[:2]), geometric_mean(row.ppl)]
        paper = ", ".join("–" if value is None else f"{value:.1f}" for value in papers[row.name])
        cells = ["–" if value is None else f"{value:.2f}" for value in measured]
        made.add_row(row.name, f"{row.trained:,}", f"{row.seconds:.0f}", *cells, paper)
    return made


def claims(rows: dict[str, AblationRow]) -> list[tuple[str, bool]]:
    """The statements of table 9, compared with these rows."""

    def ppl(name: str, n: int) -> float:
        return rows[name].ppl[n - 1] or math.nan

    best, alone, untrained = "74M-T2", "74M-T2-H: heads only", "copied layer, not trained"
    return [
        (
            "PPL₁ of 74M-T2 is no worse than the backbone's after the same training, to half a percent",
            ppl(best, 1) <= 1.005 * ppl("backbone+", 1),
        ),
        (
            "heads only leaves PPL₁ as it was",
            math.isclose(ppl(alone, 1), ppl("backbone", 1), rel_tol=1e-4),
        ),
        *(
            (f"PPL₂ of 74M-T2 is below {name}", ppl(best, 2) < ppl(name, 2))
            for name in ("T1-L2", "T1-L2-M(-1)R", "96M-T2: own unembedding", "70M-T2 (LoRA)", "74M-T2 (NP): last tap")
        ),
        ("PPL₂ of 74M-T2 is far below a copied layer's without training", 2 * ppl(best, 2) < ppl(untrained, 2)),
        ("two layers a head beat one", ppl("77M-T2: two layers a head", 2) < ppl(best, 2)),
    ]


def stored_row(variant: AblationVariant, config: TrainConfig, options: argparse.Namespace) -> StoredRow:
    content = dataclasses.asdict(config) | {"output_dir": None, "trains": variant.trains, "blocks": options.eval_blocks}
    return StoredRow(folder=Path(options.out), name=variant.name.split(":")[0].replace(" ", "_"), settings=content)


if __name__ == "__main__":
    run_benchmark(main)

"""Train the variants of DynaMo's table 9 on the demo backbone: `python -m benchmarks.paper.dynamo_ablation`.

Each variant is its config in configs/pile/ablation/ (the paper's setting on Pythia-70M) with the demo's backbone, data
and steps in place of the paper's, and the demo's three rates in place of LR_B, LR_M and LR_MB. PPL_n is exp of the mean
loss on held-out blocks; PPL_{1:n} is their geometric mean. All variants with three seeds take some five hours on two
cores. Each finished row is stored in --out and not trained again, so an interrupted call can be repeated; --rows and
--seeds train only some rows. The table shows every finished row.

The row CTC is not reproduced: the paper defines neither its blank nor which alignments of two tokens count.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.paper.orderings import compare, orderings
from benchmarks.paper.trained_rows import (
    named_rows,
    short_run,
    train_row,
    what_trains,
)
from benchmarks.shared import (
    describe_cpu,
    figures_table,
    or_dash,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    with_spread,
)
from benchmarks.stored_rows import StoredRow, defaults_of, load_or_measure
from train.config import RatesConfig, TrainConfig, read_config
from train.loop.batches import collate
from train.objective.losses import chunked_cross_entropy
from train.objective.model import TrainedModel

CONFIGS = Path("configs/pile/ablation")
PAPER_RATES = {"base": 1e-5, "heads": 1e-3, "heads_to_base": 1e-6}
BEST = "74M-T2"
"""The paper's reference: one decoder layer for the second token."""
LEAST_GAIN = 0.05
"""The share by which PPL₁ is below PPL₂ at least where a row has learnt to predict the next token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationVariant:
    """A row of table 9.

    Attributes:
        config: file in configs/pile/ablation; None is the untrained backbone, or a row that is not reproduced.
        paper: the paper's PPL_1, PPL_2, PPL_3; None where it has none.
        reproduced: False for a row that the paper leaves undefined.
    """

    name: str
    what: str = ""
    config: str | None
    paper: tuple[float | None, float | None, float | None]
    reproduced: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationRow:
    """Measurements of one variant with one seed; `ppl` has PPL_1, PPL_2, PPL_3, None where it has no such head."""

    name: str
    seed: int
    trained: int
    steps: int
    seconds: float
    ppl: list[float | None]


VARIANTS = (
    AblationVariant(name="backbone", what="as it is", config=None, paper=(20.2, None, None)),
    AblationVariant(name="backbone+", what="trained as long", config="dynamo_70m_plus", paper=(20.1, None, None)),
    AblationVariant(name="T1-L2", config="dynamo_70m_t1_l2", paper=(21.4, 1455.8, None)),
    AblationVariant(name="T1-L2-M(-1)R", config="dynamo_70m_t1_l2_m1r", paper=(20.3, 645.3, None)),
    AblationVariant(name="96M-T2", what="own unembedding", config="dynamo_96m_t2", paper=(19.9, 252.4, None)),
    AblationVariant(name="74M-T2-C", what="copied layer at LR_B", config="dynamo_74m_t2_c", paper=(18.3, 296.4, None)),
    AblationVariant(name="70M-T2-LoRA", config="dynamo_70m_t2_lora", paper=(20.2, 1368.1, None)),
    AblationVariant(name="74M-T2-CTC", config=None, paper=(18.5, 115.4, None), reproduced=False),
    AblationVariant(name="99M-T2", what="layer and unembedding", config="dynamo_99m_t2", paper=(18.3, 111.5, None)),
    AblationVariant(name="74M-T2-NP", what="last tap", config="dynamo_74m_t2_np", paper=(18.8, 131.1, None)),
    AblationVariant(name="74M-T2-H", what="heads only", config="dynamo_74m_t2_h", paper=(20.2, 119.1, None)),
    AblationVariant(name="74M-T2", config="dynamo_74m_t2", paper=(18.3, 112.4, None)),
    AblationVariant(name="77M-T2", what="two layers a head", config="dynamo_77m_t2", paper=(18.3, 86.7, None)),
    AblationVariant(name="77M-T3", config="dynamo_77m_t3", paper=(18.3, 111.4, 262.0)),
)
Found = Mapping[str, Sequence[AblationRow]]
"""Finished rows by variant, one for each seed."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    demo = read_config(["--config", options.config])
    demo.data.block_size = options.block_size
    for seed in range(options.seeds):  # every variant once before any twice, so that an interrupted call has most
        for variant in [] if options.report else chosen(options.rows):
            row_of(variant, seed, demo, options)
    found = {variant.name: finished(variant, demo, options) for variant in VARIANTS}
    say(console, describe_cpu())
    console.print(table(found, f"up to {options.steps} steps of {options.batch} × {options.block_size} tokens"))
    for line in statements(found):
        say(console, f"  {line}")
    say(console, f"rows are stored in {options.out}; trained at {' and '.join(sorted(made_at(demo, options)))}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_ablation", __doc__)
    names = [variant.name for variant in VARIANTS if variant.reproduced]
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"train only these of {', '.join(names)}")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each row")
    parser.add_argument("--report", action="store_true", help="print finished rows and train none")
    parser.add_argument("--config", default="configs/demo/dynamo.yaml", help="run with the backbone, data and rates")
    parser.add_argument("--batch", type=int, default=8, help="blocks of a step")
    parser.add_argument("--block-size", type=int, default=128, help="tokens of a block")
    parser.add_argument("--eval-blocks", type=int, default=64, help="held-out blocks")
    parser.add_argument(
        "--out", default="benchmarks/results/rows/dynamo_ablation", help="finished rows are stored here"
    )
    return parser


def chosen(names: Sequence[str] | None) -> list[AblationVariant]:
    """The named rows in the order of `VARIANTS`, by default all that are reproduced.

    Raises:
        ValueError: an unknown name, or the row that is not reproduced.
    """
    return named_rows([variant for variant in VARIANTS if variant.reproduced], names)


def row_of(variant: AblationVariant, seed: int, demo: TrainConfig, options: argparse.Namespace) -> AblationRow:
    """The stored row of a variant, or a new one, which is trained and measured without saving its weights."""
    trains = variant.config is not None
    seed = seed if trains else 0  # the untrained backbone has one row
    config = on_the_demo(variant, seed, demo, options)

    def measure(folder: Path) -> AblationRow:
        found = train_row(dataclasses.replace(config, output_dir=str(folder)), steps=trains)
        return AblationRow(
            name=variant.name,
            seed=seed,
            trained=found.parameters if trains else 0,
            steps=options.steps if trains else 0,
            seconds=found.seconds,
            ppl=perplexities(found.model, found.data.eval, options.eval_blocks),
        )

    return load_or_measure(stored_row(variant, config, options), AblationRow, measure)


def finished(variant: AblationVariant, demo: TrainConfig, options: argparse.Namespace) -> list[AblationRow]:
    """The finished rows of a variant with the seeds and steps of this call."""
    if not variant.reproduced:
        return []
    seeds = range(options.seeds if variant.config is not None else 1)
    stored = [stored_row(variant, on_the_demo(variant, seed, demo, options), options) for seed in seeds]
    return [AblationRow(**row) for row in (place.read() for place in stored) if row is not None]


def made_at(demo: TrainConfig, options: argparse.Namespace) -> set[str]:
    """The commits and versions of all finished rows."""
    return {
        stored_row(variant, on_the_demo(variant, row.seed, demo, options), options).made()
        for variant in chosen(None)
        for row in finished(variant, demo, options)
    }


def on_the_demo(variant: AblationVariant, seed: int, demo: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """The variant's config with the demo's backbone, data, steps and rates."""
    path = CONFIGS / f"{variant.config or 'dynamo_70m_plus'}.yaml"
    config = read_config(["--config", str(path)])
    lora = {"lora_targets": None} if config.heads.get("lora_rank") else {}  # the demo's layers have other names
    rates = translate(config.rates, demo.rates, with_heads=config.family is not None)
    config = dataclasses.replace(config, backbone=demo.backbone, data=demo.data, rates=rates, seed=seed)
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
    """PPL_1, PPL_2, PPL_3. A backbone with shifted labels has PPL_2, and PPL_1 if its first layer looks ahead."""
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


def table(found: Found, title: str) -> Table:
    """A line for each row of the paper: means over seeds with deviations, or why there are none."""
    paper = [f"paper\nPPL{n}" for n in "₁₂₃"]
    columns = ("what", "steps\n× seeds", "trained", "PPL₁", "PPL₂", "PPL₃", "PPL₁₂", "PPL₁₂₃")
    made = figures_table(title, "variant", *columns, *paper, left=2)
    for variant in VARIANTS:
        theirs = (or_dash(value, ".1f") for value in variant.paper)
        made.add_row(
            variant.name,
            variant.what if variant.reproduced else "not reproduced",
            *cells_of(variant, found[variant.name]),
            *theirs,
        )
    return made


def cells_of(variant: AblationVariant, rows: Sequence[AblationRow]) -> list[str]:
    if not rows:
        return ["not run" if variant.reproduced else "–", *[""] * 6]
    by_seed = [[*row.ppl, geometric_mean(row.ppl[:2]), geometric_mean(row.ppl)] for row in rows]
    columns = [[value for value in values if value is not None] for values in zip(*by_seed, strict=True)]
    done = f"{rows[0].steps} × {len(rows)}" if rows[0].steps else "–"
    return [done, f"{rows[0].trained / 1e6:.2f} M", *(perplexity_cell(values) for values in columns)]


def perplexity_cell(values: Sequence[float]) -> str:
    """The mean over seeds and its deviation, with a decimal less from 10 on; a dash where a variant has no such head.

    >>> perplexity_cell([6.04, 6.06]), perplexity_cell([116.0, 116.6]), perplexity_cell([])
    ('6.05±0.01', '116.3±0.4', '–')
    """
    return with_spread(values, "{:.2f}" if min(values) < 10 else "{:.1f}") if values else "–"


def statements(found: Found) -> list[str]:
    """The orderings of table 9 as these rows have them, in PPL₁ and PPL₂."""
    lines, seeds = [], {row.seed for rows in found.values() for row in rows}
    for n in (1, 2):
        paper = {variant.name: value for variant in chosen(None) if (value := variant.paper[n - 1])}
        if n == 1:
            del paper["T1-L2"]  # its one distribution is of x_{t+2}
        logs = {name: log_perplexities(found[name], n, seeds) for name in paper}
        pairs = orderings(paper, BEST)
        lines += [f"PPL{'₁₂'[n - 1]} of {compare(ordering, logs, unlearnt(found))}" for ordering in pairs]
    return [*lines, heads_only(found)]


def unlearnt(found: Found) -> set[str]:
    """Rows whose PPL₁ is no less than their PPL₂ but for LEAST_GAIN, in the mean over seeds.

    T1-L2-M(-1)R may look at x_{t+1} for PPL₁, and copying it is what there is to learn.
    """
    ratios = {
        name: [row.ppl[0] / row.ppl[1] for row in rows if row.ppl[0] is not None and row.ppl[1] is not None]
        for name, rows in found.items()
    }
    return {name for name, of_seeds in ratios.items() if of_seeds and statistics.mean(of_seeds) > 1 - LEAST_GAIN}


def log_perplexities(rows: Sequence[AblationRow], n: int, seeds: Iterable[int]) -> dict[int, float]:
    """log PPL_n by seed; the untrained backbone has the same for all seeds."""
    logs = {row.seed: math.log(value) for row in rows if (value := row.ppl[n - 1]) is not None}
    return dict.fromkeys(seeds, logs[0]) if logs and not rows[0].steps else logs


def heads_only(found: Found) -> str:
    """Whether heads that are trained on a frozen backbone leave its PPL₁ as it was, with every seed."""
    statement = "PPL₁ of 74M-T2-H is the backbone's"
    ours = [row.ppl[0] for row in found["74M-T2-H"]]
    if not ours or not found["backbone"]:
        return f"{statement}: not run"
    backbone = found["backbone"][0].ppl[0]
    holds = all(math.isclose(value, backbone, rel_tol=1e-6) for value in ours)  # type: ignore[arg-type]
    return (
        f"{statement}: {'holds' if holds else 'does not hold'} ({', '.join(f'{v:.4f}' for v in ours)}, {backbone:.4f})"
    )


def stored_row(variant: AblationVariant, config: TrainConfig, options: argparse.Namespace) -> StoredRow:
    trains = variant.config is not None
    content = what_trains(config) | {"trains": trains, "blocks": options.eval_blocks}
    name = f"{variant.name}-{config.seed}"
    return StoredRow(folder=Path(options.out), name=name, settings=content, defaults=defaults_of(config))


if __name__ == "__main__":
    run_benchmark(main)

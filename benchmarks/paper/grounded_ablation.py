"""Ablations of grounded heads on the demo backbone: `python -m benchmarks.paper.grounded_ablation`.

Rows are those of Ankner et al., sections 5.1 and 5.3 (figures 2 and 5 to 8), and later options. Each row is
configs/demo/grounded.yaml with its own changes; blocks, their order, steps, batch and seed are the same. No block is
seen twice (the paper trains for one epoch). Each finished row is stored in --out and not trained again, so an
interrupted call can be repeated; --rows and --seeds train only some rows. Each family has the better rate of 5e-3
(`grounded`) and 1e-2 (`medusa`, `gru`, `eagle`; docs/decisions.md).

Tokens per pass are measured greedily with the heads alone (no prompt lookup) over held-out prompts: once with a static
tree of --nodes nodes grown from the row's own accuracy by rank on held-out blocks, and once with Medusa's tree of 63
nodes for all rows, as the paper compares its families on "the exact same tree structure" (section 3.2).

The paper's offsets 0, 2, 4, 8 and 16 of LLaMA-7B's 32 layers correspond to 0, ½, 1, 2 and 4 of this backbone's 8
layers; 1, 2 and 4 are trained.
"""
# K head

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.paper.grounded_report import claims, draw
from benchmarks.paper.trained_rows import (
    Trained,
    named_rows,
    read_overridden,
    short_run,
    step_seconds,
    train_row,
    what_trains,
)
from benchmarks.shared import (
    describe_cpu,
    figures_table,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    with_spread,
    write_figures,
)
from benchmarks.stored_rows import StoredRow, defaults_of, load_or_measure
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine
from train.config import TrainConfig
from train.data.hidden_states import checksum
from train.regenerate.output import is_finished

DECODED_TOGETHER = 8
REGENERATED = "checkpoints/runs/regenerated/python-stdlib.jsonl"
REGENERATE = (
    f"python -m train regenerate-data --config configs/demo/grounded.yaml --out {REGENERATED} --prompts-per-text 3 "
    "--max-new-tokens 192 --batch-size 64"
)


ONE_TREE = Path("configs/trees/medusa_63.json")

FAST: Mapping[str, Any] = {"rates": {"heads": 1.0e-2}}
"""The better rate of families whose heads are small beside grounded ones."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row and its changes to the config.

    Attributes:
        figure: the paper's figure; "–" for a row that the paper does not have.
        needs: a file that another command (`REGENERATE`) writes.
    """

    name: str
    figure: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroundedRow:
    """Measurements of one variant with one seed.

    Attributes:
        tokens_per_pass: with the row's own tree.
        on_one_tree: tokens per pass with the tree that all rows share.
        evaluations: metrics on held-out blocks during and after training: `step`, `head1_top1`, ….
    """

    name: str
    seed: int
    parameters: int
    seconds: float
    tokens_per_pass: float
    on_one_tree: float
    evaluations: list[dict[str, float]]


VARIANTS = (
    Variant(name="medusa", figure="2", changes={"family": "medusa", **FAST}),
    Variant(name="grounded", figure="2, 5–8"),
    Variant(name="layers_2", figure="5", changes={"heads": {"num_hidden_layers": 2}}),
    Variant(name="layers_3", figure="5", changes={"heads": {"num_hidden_layers": 3}}),
    Variant(name="layers_4", figure="5", changes={"heads": {"num_hidden_layers": 4}}),
    Variant(name="offset_1", figure="6", changes={"heads": {"hidden_offset": 1}}),
    Variant(name="offset_2", figure="6", changes={"heads": {"hidden_offset": 2}}),
    Variant(name="offset_4", figure="6", changes={"heads": {"hidden_offset": 4}}),
    Variant(name="embeddings", figure="7", changes={"heads": {"hidden_offset": 8}}),
    Variant(name="gru", figure="8", changes={"family": "gru", **FAST}),
    Variant(name="prefix", figure="–", changes={"heads": {"prefix_layers": 1}}),
    Variant(name="soft", figure="–", changes={"loss": {"hard": 0.0, "soft": 1.0}}),
    Variant(name="medusa_soft", figure="–", changes={"family": "medusa", **FAST, "loss": {"hard": 0.0, "soft": 1.0}}),
    Variant(name="eagle_soft", figure="–", changes={"family": "eagle", **FAST, "loss": {"hard": 0.0, "soft": 1.0}}),
    Variant(name="soft_top_n", figure="–", changes={"loss": {"hard": 0.0, "soft": 1.0, "top_n": 64}}),
    Variant(name="regression", figure="–", changes={"loss": {"regression": 0.1}}),
    Variant(name="hydra++", figure="–", changes={"heads": {"prefix_layers": 1}, "loss": {"hard": 0.0, "soft": 1.0}}),
    Variant(
        name="gru++",
        figure="–",
        changes={"family": "gru", **FAST, "heads": {"prefix_layers": 1}, "loss": {"hard": 0.0, "soft": 1.0}},
    ),
    Variant(name="draft_1024", figure="–", changes={"heads": {"draft_vocabulary": 1024}}),
    Variant(name="regenerated", figure="–", changes={"data": {"train": [{"path": REGENERATED}]}}, needs=REGENERATED),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    variants = [variant for variant in chosen(options.rows) if is_possible(variant)]
    for seed in range(options.seeds):  # every row once before any twice, so that an interrupted call has most
        for variant in [] if options.report else variants:
            row_of(variant, seed, options)
    rows = {variant.name: found for variant in variants if (found := finished(variant, options))}
    configs = {variant.name: config_of(variant, 0, options) for variant in variants if variant.name in rows}
    costs = step_seconds(configs, options.rounds, options.batch) if options.rounds and rows else {}
    say(console, describe_cpu())
    console.print(table(rows, costs, f"{options.steps} steps of {options.batch} blocks"))
    missing = [variant.name for variant in variants if variant.name not in rows]
    say(console, f"  not run with these settings: {', '.join(missing) or 'none'}")
    for line in claims(rows):
        say(console, f"  {line}")
    made = {stored_row(variant, row.seed, options).made() for variant in variants for row in rows.get(variant.name, [])}
    say(console, f"rows are stored in {options.out}; trained at {' and '.join(sorted(made)) or 'no commit yet'}")
    if options.json:
        content = {name: [dataclasses.asdict(row) for row in found] for name, found in rows.items()}
        machine = describe_machine(torch.device("cpu"))
        write_figures(options.json, {"machine": machine, "rows": content, "step_seconds": costs})
    if rows:
        picture = options.picture or str(Path(options.out) / "ablation.png")
        draw(rows, picture)
        say(console, f"picture: {picture}")


def is_possible(variant: Variant) -> bool:
    """Whether the file that a row needs exists; otherwise prints the command that writes it."""
    if variant.needs is None or is_finished(Path(variant.needs)):
        return True
    print(f"{variant.name} is skipped: {variant.needs} is not finished; write it with {REGENERATE}", flush=True)
    return False


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.grounded_ablation", __doc__)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"train only these of {', '.join(names)}")
    parser.add_argument("--report", action="store_true", help="print finished rows and train none")
    parser.add_argument("--config", default="configs/demo/grounded.yaml", help="run that the rows change")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each row")
    parser.add_argument("--batch", type=int, default=16, help="blocks of a step")
    parser.add_argument("--eval-blocks", type=int, default=48, help="held-out blocks")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each row")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts of 64 tokens")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--nodes", type=int, default=64, help="nodes of the tree, the root included")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of timing a step; 0: none")
    parser.add_argument(
        "--no-cache", action="store_true", help="run the backbone in every step, not once for all rows with one tap"
    )
    parser.add_argument("--out", default="checkpoints/runs/grounded_ablation", help="rows and heads are stored here")
    parser.add_argument("--json", metavar="FILE", help="write all rows with their evaluations here")
    parser.add_argument("--picture", metavar="FILE", help="draw figures 2 and 5 to 8 into this PNG")
    return parser


def chosen(names: Sequence[str] | None) -> list[Variant]:
    """The named rows, in the order of `VARIANTS`.

    Raises:
        ValueError: an unknown name.
    """
    return named_rows(VARIANTS, names)


def stored_row(variant: Variant, seed: int, options: argparse.Namespace) -> StoredRow:
    config = config_of(variant, seed, options)
    return StoredRow(
        folder=Path(options.out),
        name=f"{variant.name}-{seed}",
        settings=settings(config, options),
        defaults={"config": defaults_of(config)},
    )


def finished(variant: Variant, options: argparse.Namespace) -> list[GroundedRow]:
    """The finished rows of a variant with the seeds and settings of this call."""
    stored = [stored_row(variant, seed, options).read() for seed in range(options.seeds)]
    return [GroundedRow(**row) for row in stored if row is not None]


def row_of(variant: Variant, seed: int, options: argparse.Namespace) -> GroundedRow:
    """The stored row, or a new one, which is stored beside its heads."""

    def measure(folder: Path) -> GroundedRow:
        config = dataclasses.replace(config_of(variant, seed, options), output_dir=str(folder))
        trained = train_row(config, blocks=options.steps * options.batch)
        row = GroundedRow(
            name=variant.name,
            seed=seed,
            parameters=trained.parameters,
            seconds=trained.seconds,
            evaluations=evaluations(trained),
            tokens_per_pass=tokens_per_pass(trained, options.nodes, options),
            on_one_tree=tokens_per_pass(trained, ONE_TREE, options),
        )
        trained.trainer.write_heads("last", {"step": options.steps, "tokens_per_pass": row.tokens_per_pass})
        return row

    return load_or_measure(stored_row(variant, seed, options), GroundedRow, measure)


def config_of(variant: Variant, seed: int, options: argparse.Namespace) -> TrainConfig:
    """The demo's config with the row's changes, and with the steps, batch and evaluations of this call."""
    config = read_overridden(options.config, variant.changes)
    config = dataclasses.replace(
        config,
        seed=seed,
        cache_hidden_states=not options.no_cache,
        data=dataclasses.replace(config.data, max_eval_blocks=options.eval_blocks),
        evaluation=dataclasses.replace(config.evaluation, num_prompts=1, new_tokens=2),
    )
    return short_run(config, steps=options.steps, batch=options.batch, every_steps=max(1, options.steps // 4))


def settings(config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Everything a row depends on: its config, its decoding, and the content of the files that it reads."""
    content = what_trains(config)
    decoding = {name: getattr(options, name) for name in ("prompts", "new_tokens", "nodes")}
    files = sorted(Path(config.backbone.name_or_path).glob("*.safetensors"))
    files += [Path(source.path) for source in config.data.train if Path(source.path).is_file()]
    decoding["one_tree"] = checksum(ONE_TREE)
    return {"config": content, "decoding": decoding, "files": {str(file): checksum(file) for file in files}}


def evaluations(trained: Trained) -> list[dict[str, float]]:
    """The run's evaluations, with one after the last step added where it is missing."""
    trainer = trained.trainer

    def found() -> list[dict[str, float]]:
        return [entry for entry in trainer.state.log_history if "eval_head1_top1" in entry]

    if not found() or found()[-1]["step"] != trainer.state.global_step:
        trainer.evaluate()
    return [{name.removeprefix("eval_"): value for name, value in entry.items()} for entry in found()]


@torch.no_grad()
def tokens_per_pass(trained: Trained, tree: int | Path, options: argparse.Namespace) -> float:
    """Tokens per backbone pass, greedy, with heads alone; prompts have one length, so a batch needs no padding."""
    model, token_heads = trained.model, trained.model.token_heads
    assert token_heads is not None, "every row has heads"
    model.eval()
    shipped = token_heads.in_dtype(model.backbone.dtype)
    shipped.measured_accuracy = token_heads.measured_accuracy
    source = trained.trainer.config.backbone.name_or_path
    prompts_NT = torch.cat(default_prompts(source, trained.tokenizer, options.prompts))
    decoding = TreeDecoding(shipped, tree=tree, lookup=0)
    tokens = passes = 0
    for prompts_BT in prompts_NT.split(DECODED_TOGETHER):
        output = model.backbone.model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=decoding,
        )
        tokens, passes = tokens + output.stats.tokens, passes + output.stats.row_passes
    return tokens / passes


def table(rows: Mapping[str, Sequence[GroundedRow]], costs: Mapping[str, float], title: str) -> Table:
    """One line for each row; seconds of a step include the backbone's forward and are measured interleaved."""
    accuracies = ("figure", "seeds", "top-1 by head, %", "top-5 by head, %")
    per_pass = ("tokens per pass,\nover medusa", "on one tree,\nover medusa")
    made = figures_table(title, "row", *accuracies, *per_pass, "parameters", "a step,\nseconds", "of\nmedusa's")
    figures = {variant.name: variant.figure for variant in VARIANTS}
    for name, found in rows.items():
        made.add_row(
            name,
            figures[name],
            str(len(found)),
            *(by_head(found, metric) for metric in ("top1", "top5")),
            *(beside_medusa(rows, name, field) for field in ("tokens_per_pass", "on_one_tree")),
            f"{found[0].parameters:,}",
            f"{costs[name]:.2f}" if name in costs else "–",
            f"{costs[name] / costs['medusa']:.2f}" if name in costs and "medusa" in costs else "–",
        )
    for found in list(rows.values())[:1]:
        own = [f"{100 * found[0].evaluations[-1][f'backbone_{metric}']:.1f}" for metric in ("top1", "top5")]
        made.add_row("backbone, next token", "", "", *own, "1.00", "1.00", "", "", "")
    return made


def beside_medusa(rows: Mapping[str, Sequence[GroundedRow]], name: str, field: str) -> str:
    """A row's figure, and by how much it is above medusa's."""
    values = [getattr(row, field) for row in rows[name]]
    if name == "medusa" or "medusa" not in rows:
        return with_spread(values, "{:.2f}")
    gain = statistics.mean(values) - statistics.mean(getattr(row, field) for row in rows["medusa"])
    return f"{with_spread(values, '{:.2f}')} {gain:+.2f}"


def by_head(found: Sequence[GroundedRow], metric: str) -> str:
    """Top-1 of each head at the end of training, in percent, as mean over seeds."""
    last = [row.evaluations[-1] for row in found]
    heads = range(1, 1 + sum(name.endswith("_top1") and name.startswith("head") for name in last[0]))
    return "  ".join(with_spread([100 * entry[f"head{k}_{metric}"] for entry in last], "{:.1f}") for k in heads)


if __name__ == "__main__":
    run_benchmark(main)

"""The command `headway evaluate`: perplexities and accuracies of heads on text that they never saw, and pictures."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.decoding import open_cooccurrence, refuse_heads
from heads.decoding.dynamo.joint import JointConfig
from heads.evaluation.accuracy import HeadAccuracy
from heads.evaluation.accuracy_on_text import measure_accuracy
from heads.evaluation.blocks import read_blocks
from heads.evaluation.dynamic_perplexity import Deciding, DynamicPerplexity, measure_dynamic
from heads.evaluation.joint_picture import draw_joint_maps
from heads.evaluation.perplexity import BATCH, Block, Perplexity, measure_perplexity
from heads.evaluation.perplexity_report import (
    Panel,
    accuracy_table,
    draw_dynamic,
    draw_panels,
    draw_validation_loss,
    dynamic_table,
    perplexity_rows,
    perplexity_table,
)
from heads.evaluation.tables import describe_machine, progress_bar, versions
from heads.ngrams.table import NgramTable

METRICS = ("perplexity", "accuracy")
THRESHOLDS = ",".join(f"{i / 10:g}" for i in range(11))


def evaluate_command(
    heads: Annotated[
        Path | None, typer.Argument(metavar="[HEADS]", show_default=False, help="Folder that heads were saved to.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Folder or hub name of the backbone; by default the one of the heads.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(METRICS)}, with commas; perplexity, unless --heatmaps is given.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Texts to measure on (.txt, .jsonl, …), may be repeated; by default held out."
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Pieces of text at most, spread over all of it.")] = 16,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a piece; each is read on its own.")] = 256,
    thresholds: Annotated[
        str | None, typer.Option(help=f"ε_b to measure PPL_d at, with commas; by default {THRESHOLDS}.")
    ] = None,
    cooccurrence: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Table of n-grams for co-occurrence masks; by default none.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the distributions that decide PPL_d's n.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Candidates of each place that decide PPL_d's n.")] = 50,
    repetition_penalty: Annotated[float, typer.Option(help="In the decisions of PPL_d's n; 1: none.")] = 1.1,
    training: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run's metrics.jsonl: --picture shows its validation loss.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of PPL_d against tokens per pass, or of --training's loss.")
    ] = None,
    heatmaps: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of the joint distribution behind --prompt, six ways.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text for --heatmaps.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures, settings and machine here.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of backbone and heads; auto: float32 on a CPU.")] = "auto",
) -> None:
    """Multi-token perplexity and accuracy of heads on held-out text; pictures of thresholds, training and joints."""
    wanted = read_metrics_option(metrics, with_heatmaps=heatmaps is not None)
    sweep = read_thresholds(thresholds or THRESHOLDS)
    check_options(heads, wanted, training, picture, heatmaps, prompt, cooccurrence)
    measured, swept = heads is not None and bool(wanted), heads is not None and "perplexity" in wanted
    refuse_unused({"--json": json_file is not None, "--text": bool(text)}, "is about measuring", used=measured)
    refuse_unused({"--thresholds": thresholds is not None}, "is about perplexity", used=swept)
    refuse_unused(
        {"--cooccurrence": cooccurrence is not None},
        "is about perplexity or heat maps",
        used=swept or heatmaps is not None,
    )
    panels: list[Panel] = [] if training is None else [partial(draw_validation_loss, metrics=training)]
    if heads is not None:
        opened = open_heads([heads], backbone, dtype)
        if heatmaps is not None:
            (token_heads,) = opened.token_heads.values()
            draw_joint_maps(token_heads, opened.tokenizer, prompt or "", cooccurrence or "", heatmaps)
            say(f"heat maps: {heatmaps}")
        if wanted:
            deciding = Deciding(config=JointConfig(top_k=top_k), temperature=temperature, penalty=repetition_penalty)
            pieces = read_blocks(opened, text or [], blocks, block_tokens)
            asked = bool(thresholds) or (picture is not None and not panels)
            run = Run(opened, wanted, pieces, sweep if can_sweep(opened, asked=asked) else [], deciding, cooccurrence)
            run.measure()
            run.show()
            if json_file is not None:
                run.write(json_file)
                say(f"figures: {json_file}")
            panels[:0] = run.panels()
    if picture is not None:
        draw_panels(panels, picture)
        say(f"picture: {picture}")


class Run:
    """One measurement: what is asked for, what was found, and how it is shown."""

    def __init__(
        self,
        opened: Opened,
        wanted: Sequence[str],
        blocks: Sequence[Block],
        thresholds: Sequence[float],
        deciding: Deciding,
        cooccurrence: Path | None,
    ) -> None:
        ((self.name, self.heads),) = opened.token_heads.items()
        self.wanted, self.blocks, self.thresholds, self.folder = wanted, blocks, thresholds, cooccurrence
        opened_table = None if cooccurrence is None else NgramTable.open(cooccurrence, opened.tokenizer)
        table = open_cooccurrence(opened_table, self.heads.num_heads + 1, self.heads.backbone.vocab_size)
        self.deciding = dataclasses.replace(deciding, cooccurrence=table)
        self.console = Console()
        self.perplexity: Perplexity | None = None
        self.dynamic: list[DynamicPerplexity] = []
        self.accuracy: list[HeadAccuracy] = []

    def measure(self) -> None:
        batches = -(-len(self.blocks) // BATCH)
        passes = len(self.wanted) + (len(self.thresholds) if "perplexity" in self.wanted else 0)
        with progress_bar(self.console, "measuring", batches * passes) as report:
            if "accuracy" in self.wanted:
                self.accuracy = measure_accuracy(self.heads, self.blocks, report)
            if "perplexity" in self.wanted:
                self.perplexity = measure_perplexity(self.heads, self.blocks, report)
                if self.thresholds:
                    self.dynamic = measure_dynamic(self.heads, self.blocks, self.thresholds, self.deciding, report)

    def show(self) -> None:
        texts = len({block.text for block in self.blocks})
        title = f"{self.name}, {len(self.blocks)} pieces of {texts} texts"
        if self.accuracy:
            self.console.print(accuracy_table(self.accuracy, title))
        if self.perplexity is not None:
            given = ", given the true tokens in between" if self.heads.grounded else ""
            self.console.print(perplexity_table(self.perplexity, title + given))
        if self.dynamic:
            masked = "co-occurrence masks" if self.folder else "no co-occurrence mask"
            self.console.print(dynamic_table(self.dynamic, f"{title}, {masked}"))

    def panels(self) -> list[Panel]:
        return [partial(draw_dynamic, points=self.dynamic)] if self.dynamic else []

    def write(self, path: Path) -> None:
        """All figures, and what is needed to measure them again."""
        found = {} if self.perplexity is None else dict(perplexity_rows(self.perplexity))
        config = dataclasses.asdict(self.deciding.config)
        del config["threshold"]
        settings = {"temperature": self.deciding.temperature, "repetition_penalty": self.deciding.penalty, **config}
        content = {
            "heads": self.name,
            "perplexity": {name: dataclasses.asdict(estimate) for name, estimate in found.items()},
            "given_true_tokens_between": self.heads.grounded,
            "dynamic": [dataclasses.asdict(point) for point in self.dynamic],
            "accuracy": [
                {name: getattr(meter, name) for name in ("top1", "top5", "agreement", "loss")}
                for meter in self.accuracy
            ],
            "text": {
                "blocks": len(self.blocks),
                "texts": len({block.text for block in self.blocks}),
                "tokens": sum(len(block.tokens_T) for block in self.blocks),
            },
            "settings": settings | {"cooccurrence": None if self.folder is None else str(self.folder)},
            "machine": describe_machine(self.heads.backbone.device),
            "versions": versions(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_metrics_option(metrics: str | None, *, with_heatmaps: bool) -> list[str]:
    """The names between commas.

    >>> read_metrics_option(None, with_heatmaps=False), read_metrics_option("accuracy, perplexity", with_heatmaps=True)
    (['perplexity'], ['accuracy', 'perplexity'])
    """
    if metrics is None:
        return [] if with_heatmaps else ["perplexity"]
    names = [name.strip() for name in metrics.split(",")]
    for name in names:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"--metrics has {name!r}; allowed are {', '.join(METRICS)}.{hint}")
    return names


def read_thresholds(text: str) -> list[float]:
    """Numbers from 0 to 1 between commas.

    >>> read_thresholds("0, 0.5,1")
    [0.0, 0.5, 1.0]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--thresholds has {text!r}; give numbers from 0 to 1 with commas, as 0,0.5,1.") from None
    if not all(0 <= threshold <= 1 for threshold in found):
        raise ValueError(f"--thresholds has {text!r}; all must lie from 0 (all tokens) to 1 (one token).")
    return found


def check_options(
    heads: Path | None,
    wanted: Sequence[str],
    training: Path | None,
    picture: Path | None,
    heatmaps: Path | None,
    prompt: str | None,
    cooccurrence: Path | None,
) -> None:
    """Options that need each other; found before a model is loaded."""
    if heads is None and training is None:
        raise ValueError("There is nothing to evaluate; give a folder of heads, or --training with --picture.")
    if training is not None and picture is None:
        raise ValueError("--training is drawn into a picture; give --picture FILE.")
    if (heatmaps is None) != (prompt is None):
        raise ValueError("--heatmaps FILE and --prompt TEXT need each other; give both, or neither.")
    if heatmaps is not None and (heads is None or cooccurrence is None):
        raise ValueError(
            "--heatmaps shows co-occurrence masks of heads; give the folder of heads and --cooccurrence FOLDER, a "
            "table that headway count-ngrams makes."
        )
    if picture is not None and training is None and "perplexity" not in wanted:
        raise ValueError("--picture has nothing to draw; give --metrics perplexity, or --training FILE.")


def refuse_unused(given: dict[str, bool], what_for: str, *, used: bool) -> None:
    """Options that would be passed over without a word."""
    if names := [name for name, is_given in given.items() if is_given and not used]:
        raise ValueError(f"{', '.join(names)} {what_for}, which was not asked for; leave it out or add --metrics.")


def can_sweep(opened: Opened, *, asked: bool) -> bool:
    """Can PPL_d be measured on these heads; if it was asked for, that it cannot is an error."""
    (token_heads,) = opened.token_heads.values()
    try:
        refuse_heads(token_heads)
    except ValueError as error:
        if asked:
            raise
        say(f"PPL_d is left out: {error}")
        return False
    return True


def say(text: str) -> None:
    """What is said about the figures goes to stderr."""
    typer.echo(text, err=True)

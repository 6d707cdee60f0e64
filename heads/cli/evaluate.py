"""The command `headway evaluate`: heads on held-out text (heads/evaluation/evaluate.py), or with a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heads.checkpoint.opening import Opened
from heads.cli.hub import BY_NAME
from heads.cli.option_groups import given_options, with_groups
from heads.cli.options import JsonOption, LoadingOptions, TextOptions, held_out_rows, print_aside
from heads.cli.suites import SuiteOptions, refuse_words, run_suite
from heads.decoding.dynamo.joint import check_independent
from heads.decoding.dynamo.settings import JointConfig
from heads.evaluation.evaluate import METRICS, THRESHOLDS, evaluate, read_metrics, read_thresholds
from heads.evaluation.lossy.dynamic_perplexity import DecisionSettings
from heads.evaluation.lossy.joint_picture import draw_joint_maps
from heads.evaluation.perplexity_report import Panel, draw_panels, draw_validation_loss
from heads.evaluation.pictures import new_figure
from heads.evaluation.predictions import read_blocks
from heads.evaluation.tables import write_content

OF_MEASURING = ("json_file", "text", "blocks", "block_tokens")
OF_SWEEP = ("thresholds", "temperature", "top_k", "repetition_penalty")
OF_LOADING = ("backbone", "dtype", "pack")
"""Parameters that have no effect where nothing is measured, without PPL_d, or without heads."""


@dataclass(frozen=True, kw_only=True)
class DynamicOptions:
    """Dynamic decoding (PPL_d)."""

    thresholds: Annotated[
        str | None, typer.Option(metavar="X,X,…", help="Values of ε_b for PPL_d, with commas; by default 0, 0.1, …, 1.")
    ] = None
    cooccurrence: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Table of n-grams for co-occurrence masks; by default none.")
    ] = None
    temperature: Annotated[
        float, typer.Option(metavar="X", help="Temperature of the distributions that decide PPL_d's n.")
    ] = 0.7
    top_k: Annotated[int, typer.Option(metavar="N", min=1, help="Candidates of each token that decide PPL_d's n.")] = 50
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Repetition penalty when PPL_d's n is decided; 1: no penalty.")
    ] = 1.1

    @property
    def sweep(self) -> list[float]:
        return read_thresholds(self.thresholds or THRESHOLDS)

    def settings(self) -> DecisionSettings:
        config = JointConfig(top_k=self.top_k)
        return DecisionSettings(config=config, temperature=self.temperature, penalty=self.repetition_penalty)


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """Pictures."""

    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of PPL_d against tokens per pass, or of --training's loss.")
    ] = None
    training: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A run's metrics.jsonl: --picture shows its validation loss.")
    ] = None
    heatmaps: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of the joint distribution after --prompt, six ways.")
    ] = None
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text for --heatmaps.")] = None


@with_groups
def evaluate_command(
    context: typer.Context,
    heads: Annotated[
        Path | None, typer.Argument(metavar="HEADS", show_default=False, help="Folder or hub name of heads."), BY_NAME
    ] = None,
    *,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help=f"Of {', '.join(METRICS)}, with commas; perplexity, unless --heatmaps is given."
        ),
    ] = None,
    json_file: JsonOption = None,
    suite: SuiteOptions,
    texts: TextOptions,
    dynamic: DynamicOptions,
    pictures: PictureOptions,
    loading: LoadingOptions,
) -> None:
    """Multi-token perplexity and accuracy of heads on held-out text; pictures of thresholds, training and joints.

    With --suite NAME: speed by category, judged quality or tasks, with a report to read in a browser. Its own options
    come after HEADS; headway evaluate --suite NAME --suite-help lists them.
    """
    if suite.suite is not None:
        run_suite(context, heads, suite, loading)
        return
    refuse_words(context, suite)
    wanted = read_metrics(metrics, with_heatmaps=pictures.heatmaps is not None)
    sweep, settings = dynamic.sweep, dynamic.settings()
    check_options(context, heads, wanted, pictures, dynamic)
    if pictures.picture is not None or pictures.heatmaps is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    panels: list[Panel] = []
    if pictures.training is not None:
        panels.append(partial(draw_validation_loss, metrics=pictures.training))
    opened = None if heads is None else loading.open(heads)
    if opened is not None and pictures.heatmaps is not None:
        (token_heads,) = opened.token_heads.values()
        draw_joint_maps(
            token_heads, opened.tokenizer, pictures.prompt or "", dynamic.cooccurrence or "", pictures.heatmaps
        )
        print_aside(f"heat maps: {pictures.heatmaps}")
    if opened is not None and wanted:
        of_run, rows = (None, "") if texts.text else held_out_rows(heads, opened)
        documents = None if of_run is None else of_run.documents
        held_out = read_blocks(opened, texts.text or [], texts.blocks, texts.block_tokens, documents)
        console = Console()
        masks = [] if pictures.heatmaps is not None else ["cooccurrence"]
        asked = bool(given_options(context, [*OF_SWEEP, *masks])) or (pictures.picture is not None and not panels)
        thresholds = sweep if can_sweep(opened, asked=asked) else []
        if rows:
            print_aside(rows)
        found = evaluate(
            opened,
            held_out,
            metrics=wanted,
            thresholds=thresholds,
            settings=settings,
            table_folder=dynamic.cooccurrence,
            console=console,
        )
        console.print(*found.tables())
        if json_file is not None:
            write_content(json_file, found.as_dict())
            print_aside(f"figures: {json_file}")
        panels[:0] = found.panels()
    if pictures.picture is not None:
        draw_panels(panels, pictures.picture)
        print_aside(f"picture: {pictures.picture}")


def check_options(
    context: typer.Context,
    heads: Path | None,
    wanted: Sequence[str],
    pictures: PictureOptions,
    dynamic: DynamicOptions,
) -> None:
    """Refuse options without the ones they need, before a model is loaded."""
    given, training = pictures.picture is not None, pictures.training is not None
    maps, measured = pictures.heatmaps is not None, heads is not None and bool(wanted)
    swept = heads is not None and "perplexity" in wanted
    if heads is None and not training:
        raise ValueError("There is nothing to evaluate; give a folder of heads, or --training with --picture.")
    if training and not given:
        raise ValueError("--training is drawn into a picture; give --picture FILE.")
    if maps != (pictures.prompt is not None):
        raise ValueError("--heatmaps FILE and --prompt TEXT need each other; give both, or neither.")
    if maps and (heads is None or dynamic.cooccurrence is None):
        raise ValueError(
            "--heatmaps shows co-occurrence masks of heads; give the folder of heads and --cooccurrence FOLDER, a "
            "table that headway count-ngrams makes."
        )
    if given and not training and "perplexity" not in wanted:
        raise ValueError("--picture has nothing to draw; give --metrics perplexity, or --training FILE.")
    if heads is None and (of_loading := given_options(context, OF_LOADING)):
        raise ValueError(f"{', '.join(of_loading)} is about heads, and none are loaded; give their folder too.")
    refuse_unused(given_options(context, OF_MEASURING), "is about measuring", used=measured)
    refuse_unused(given_options(context, OF_SWEEP), "is about perplexity", used=swept)
    masks = given_options(context, ["cooccurrence"])
    refuse_unused(masks, "is about perplexity or heat maps", used=swept or maps)


def refuse_unused(given: Sequence[str], what_for: str, *, used: bool) -> None:
    """Refuse options that would be ignored silently."""
    if given and not used:
        raise ValueError(f"{', '.join(given)} {what_for}, which was not asked for; leave it out or add --metrics.")


def can_sweep(opened: Opened, *, asked: bool) -> bool:
    """Can PPL_d be measured on these heads? It is an error that it cannot, if it was asked for."""
    (token_heads,) = opened.token_heads.values()
    try:
        check_independent(token_heads)
    except ValueError as error:
        if asked:
            raise
        print_aside(f"PPL_d is left out: {error}")
        return False
    return True

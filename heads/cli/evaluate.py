"""The command `headway evaluate`: perplexities and accuracies of heads on text that they never saw, and pictures."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.decoding import check_independent
from heads.decoding.dynamo.joint import JointConfig
from heads.evaluation.evaluate import METRICS, evaluate
from heads.evaluation.lossy.dynamic_perplexity import DecisionSettings
from heads.evaluation.lossy.joint_picture import draw_joint_maps
from heads.evaluation.perplexity_report import Panel, draw_panels, draw_validation_loss
from heads.evaluation.pictures import new_figure
from heads.evaluation.predictions import read_blocks
from heads.evaluation.tables import write_content

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
    if picture is not None or heatmaps is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    panels: list[Panel] = [] if training is None else [partial(draw_validation_loss, metrics=training)]
    if heads is not None:
        opened = open_heads([heads], backbone, dtype)
        if heatmaps is not None:
            (token_heads,) = opened.token_heads.values()
            draw_joint_maps(token_heads, opened.tokenizer, prompt or "", cooccurrence or "", heatmaps)
            say(f"heat maps: {heatmaps}")
        if wanted:
            settings = DecisionSettings(
                config=JointConfig(top_k=top_k), temperature=temperature, penalty=repetition_penalty
            )
            pieces = read_blocks(opened, text or [], blocks, block_tokens)
            asked = bool(thresholds) or (picture is not None and not panels)
            console = Console()
            found = evaluate(
                opened,
                pieces,
                metrics=wanted,
                thresholds=sweep if can_sweep(opened, asked=asked) else [],
                settings=settings,
                table_folder=cooccurrence,
                console=console,
            )
            for table in found.tables():
                console.print(table)
            if json_file is not None:
                write_content(json_file, found.as_dict())
                say(f"figures: {json_file}")
            panels[:0] = found.panels()
    if picture is not None:
        draw_panels(panels, picture)
        say(f"picture: {picture}")


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
        check_independent(token_heads)
    except ValueError as error:
        if asked:
            raise
        say(f"PPL_d is left out: {error}")
        return False
    return True


def say(text: str) -> None:
    """What is said about the figures goes to stderr."""
    typer.echo(text, err=True)

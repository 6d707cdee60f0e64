"""The commands that measure heads: `headway benchmark` (speed), `evaluate` (quality), `tune-tree` (the best tree)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from heads.checkpoint.opening import Opened, open_draft_model
from heads.checkpoint.save_load import write_whole
from heads.cli.options import (
    DynamicOptions,
    Heads,
    LoadingOptions,
    PictureOptions,
    PromptOptions,
    TreeOptions,
    print_aside,
    with_groups,
)
from heads.decoding.dynamo.decoding import check_independent
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.tuned_file import TUNED_TREE
from heads.evaluation import methods as compared
from heads.evaluation.evaluate import METRICS, evaluate, read_metrics
from heads.evaluation.judges import Float32Judge
from heads.evaluation.lossy.joint_picture import draw_joint_maps
from heads.evaluation.methods import GreedySettings, Method
from heads.evaluation.perplexity_report import Panel, draw_panels, draw_validation_loss
from heads.evaluation.pictures import draw_speed_blocks, new_figure
from heads.evaluation.predictions import read_blocks
from heads.evaluation.tables import describe_rulings, measure, speed_table, write_content, write_json
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.report import draw_tuning, show
from heads.tuning.timing import TIMED_TOKENS
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import build_tuned_tree

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures, settings and machine as JSON.")
]
Penalty = Annotated[
    float, typer.Option(metavar="X", min=0.01, help="Makes tokens that came before less likely; 1: no penalty.")
]


@with_groups
def benchmark_command(
    heads: Annotated[list[Path], typer.Argument(metavar="HEADS...", help="Folders of heads on one backbone.")],
    *,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts to use at most.")] = 8,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Interleaved repeats, of which medians are taken.")
    ] = 3,
    repetition_penalty: Penalty = 1.0,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder or hub name of a small model with the backbone's tokenizer: adds rows of speculative sampling "
            "with it, and of transformers' own on the same pair.",
        ),
    ] = None,
    no_prompt_lookup: Annotated[
        bool, typer.Option("--no-prompt-lookup", help="Leave prompt lookup out, for backbones that cannot do it.")
    ] = False,
    judge: Annotated[
        Literal["float32"] | None,
        typer.Option(
            metavar="float32",
            help="Let a float32 copy of a bfloat16 or float16 backbone decide where texts may differ from plain's.",
        ),
    ] = None,
    json_file: JsonFile = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the speeds into this PNG file.")] = None,
    prompts: PromptOptions,
    drafting: TreeOptions,
    loading: LoadingOptions,
) -> None:
    """Compare plain generate, prompt lookup and heads side by side in one run, on whole greedy generate calls."""
    if picture is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    opened = loading.open(*heads)
    found = prompts.read(opened, num_prompts)
    settings = GreedySettings(new_tokens=prompts.new_tokens, repetition_penalty=repetition_penalty)
    methods = build_methods(opened, settings, drafting, with_prompt_lookup=not no_prompt_lookup)
    if draft_model is not None:
        methods += draft_methods(opened.model, open_draft_model(draft_model, loading.dtype), settings)
    float32 = None if judge is None else Float32Judge(model=opened.model, settings=settings)
    console = Console()
    results = measure(console, opened.model, methods, settings, found, repeats, float32=float32)
    title = f"{opened.source}, {len(found)} prompts, {prompts.new_tokens} new tokens, medians of {repeats} repeats"
    console.print(speed_table(results, title))
    if float32 is not None:
        typer.echo(describe_rulings(results, opened.tokenizer))
    name = "greedy" if repetition_penalty == 1.0 else f"greedy, repetition penalty {repetition_penalty}"
    if json_file is not None:
        write_json(json_file, {name: results}, opened.model.device)
        print_aside(f"rows: {json_file}")
    if picture is not None:
        draw_speed_blocks({name: results}, picture)
        print_aside(f"picture: {picture}")


def build_methods(
    opened: Opened, settings: GreedySettings, drafting: TreeOptions, *, with_prompt_lookup: bool
) -> list[Method]:
    """One method for each row; heads are named after their folder, and a row without lookup says so."""
    methods = [compared.plain(opened.model, settings)]
    if with_prompt_lookup:
        methods.append(compared.prompt_lookup(opened.model, settings))
    shape, lookup, compile = drafting.shape, drafting.lookup, drafting.compile
    for name, heads in opened.token_heads.items():
        looks_up = TreeDecoding(heads, shape, lookup=lookup, compile=False).lookup > 0  # tree.json may switch it off
        row = name if looks_up else f"{name}, heads alone"
        methods.append(compared.tree(opened.model, heads, settings, row, shape, lookup, compile))
    return methods


def draft_methods(model: Any, draft: Any, settings: GreedySettings) -> list[Method]:
    """A draft model that drafts as many tokens as in the paper, as many as pay best here, and transformers' own way."""
    chains = [compared.draft_model(model, draft, settings), compared.draft_model(model, draft, settings, "adaptive")]
    return [*chains, compared.assistant_model(model, draft, settings)]


@with_groups
def evaluate_command(
    heads: Annotated[
        Path | None, typer.Argument(metavar="HEADS", show_default=False, help="Folder that heads were saved to.")
    ] = None,
    *,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help=f"Of {', '.join(METRICS)}, with commas; perplexity, unless --heatmaps is given."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Texts to measure on (.txt, .jsonl, …), may be repeated; by default held out."
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(metavar="N", min=1, help="Blocks of text at most, spread over all of it.")
    ] = 16,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block; each is read on its own.")
    ] = 256,
    json_file: JsonFile = None,
    dynamic: DynamicOptions,
    pictures: PictureOptions,
    loading: LoadingOptions,
) -> None:
    """Multi-token perplexity and accuracy of heads on held-out text; pictures of thresholds, training and joints."""
    wanted = read_metrics(metrics, with_heatmaps=pictures.heatmaps is not None)
    sweep = dynamic.sweep
    check_options(heads, wanted, pictures, dynamic, measuring={"--json": json_file, "--text": text})
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
        held_out, console = read_blocks(opened, text or [], blocks, block_tokens), Console()
        asked = bool(dynamic.thresholds) or (pictures.picture is not None and not panels)
        found = evaluate(
            opened,
            held_out,
            metrics=wanted,
            thresholds=sweep if can_sweep(opened, asked=asked) else [],
            settings=dynamic.settings(),
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
    heads: Path | None,
    wanted: Sequence[str],
    pictures: PictureOptions,
    dynamic: DynamicOptions,
    measuring: dict[str, Any],
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
    refuse_unused([name for name, value in measuring.items() if value], "is about measuring", used=measured)
    refuse_unused(["--thresholds"] if dynamic.thresholds else [], "is about perplexity", used=swept)
    masks = ["--cooccurrence"] if dynamic.cooccurrence else []
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


@with_groups
def tune_tree_command(
    heads: Heads,
    *,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=2, help="Prompts to use at most.")] = 32,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Rows that will be decoded together.")] = 1,
    repetition_penalty: Penalty = 1.0,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0, help="Of the texts that are written; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of sampling, with --temperature.")] = 0,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Interleaved rounds of timing, of which medians are taken.")
    ] = 15,
    compile: Annotated[
        bool, typer.Option("--compile", help="Try compiled passes as well; tree.json says so where they are faster.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of times and predicted speeds against nodes.")
    ] = None,
    prompts: PromptOptions,
    loading: LoadingOptions,
) -> None:
    """Fit the tree to these heads on this machine; TreeDecoding uses what is written to HEADS/tree.json by itself.

    Measures how often each candidate is right along accepted paths and what each stage of a pass takes, and picks the
    static or dynamic tree with the most tokens a second, or plain decoding where none pays. Ctrl-C leaves without
    writing anything.
    """
    if picture is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    config = TuneConfig(
        new_tokens=prompts.new_tokens,
        batch=batch,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        repeats=repeats,
        compile=compile,
    )
    opened = loading.open(heads)
    (token_heads,) = opened.token_heads.values()
    found = prompts.read(opened, num_prompts, least_new_tokens=prompts.new_tokens // 2 + TIMED_TOKENS)
    torch.manual_seed(seed)
    try:
        with stages(Console(stderr=True)) as begin:
            tuning = tune(token_heads, found, config, clock=clock_of(opened.model.device), progress=begin)
    except KeyboardInterrupt:
        print_aside(f"interrupted: nothing was written, {heads / TUNED_TREE} is as it was")
        raise typer.Exit(130) from None
    show(Console(), tuning)
    text = build_tuned_tree(token_heads, tuning, num_prompts=len(found)).as_json()
    write_whole(heads, {TUNED_TREE: text.encode()})
    print_aside(f"written: {heads / TUNED_TREE}")
    if picture is not None:
        draw_tuning(tuning, picture)
        print_aside(f"picture: {picture}")


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int], Callable[[], Any]]]:
    """A bar for each stage on a terminal, nothing elsewhere; yields the function (stage, total) that begins one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield lambda stage, total: partial(bars.advance, bars.add_task(stage, total=total))

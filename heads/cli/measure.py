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
    held_out_rows,
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
from heads.tuning.dtype_costs import advise, measure_dtypes
from heads.tuning.report import draw_tuning, show
from heads.tuning.timing import TIMED_TOKENS
from heads.tuning.tune import tune_batches
from heads.tuning.tuned_tree import build_tuned_tree, join_batches

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures, settings and machine as JSON.")
]
Penalty = Annotated[
    float, typer.Option(metavar="X", min=0.01, help="Makes tokens that came before less likely; 1: no penalty.")
]


@with_groups
def benchmark_command(
    heads: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="HEADS...",
            show_default=False,
            help="Folders of heads on one backbone; not needed with --backbone and --draft-model.",
        ),
    ] = None,
    *,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Most prompts to use.")] = 8,
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
        bool, typer.Option("--no-prompt-lookup", help="Leave out prompt lookup, for backbones that do not support it.")
    ] = False,
    judge: Annotated[
        Literal["float32"] | None,
        typer.Option(
            metavar="float32",
            help="Excuse differences from plain generate's text by a float32 copy of a bfloat16 or float16 backbone.",
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
        new_figure(1, 1)  # fails before anything is measured if matplotlib is missing
    if not heads and drafting.any_given:
        raise ValueError("--tree, --lookup and --compile need a folder of heads; give one, or leave them out.")
    opened = loading.open_any(heads or [], without_heads=draft_model is not None)
    found = prompts.read(opened, num_prompts, heads=heads[0] if heads else None)
    settings = GreedySettings(new_tokens=prompts.max_new_tokens, repetition_penalty=repetition_penalty)
    methods = build_methods(opened, settings, drafting, with_prompt_lookup=not no_prompt_lookup)
    if draft_model is not None:
        methods += draft_methods(opened.model, open_draft_model(draft_model, loading.dtype), settings)
    float32 = None if judge is None else Float32Judge(model=opened.model, settings=settings)
    console = Console()
    results = measure(console, opened.model, methods, settings, found, repeats, float32=float32)
    title = f"{opened.source}, {len(found)} prompts, {prompts.max_new_tokens} new tokens, medians of {repeats} repeats"
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
    """One method for each row. Heads have the name of their folder, with "heads alone" if they have no lookup.

    If any heads have lookup, another row is lookup without heads.
    """
    methods = [compared.plain(opened.model, settings)]
    if with_prompt_lookup:
        methods.append(compared.prompt_lookup(opened.model, settings))
    shape, compile = drafting.shape, drafting.compile
    ours: list[Method] = []
    longest = 0
    for name, heads in opened.token_heads.items():
        lookup = TreeDecoding(heads, shape, lookup=drafting.lookup, compile=False).lookup  # tree.json may switch it off
        row = name if lookup else f"{name}, heads alone"
        ours.append(compared.tree(opened.model, heads, settings, row, shape, drafting.lookup, compile))
        longest = max(longest, lookup)
    if longest:
        methods.append(compared.lookup_alone(opened.model, heads, settings, longest))
    return methods + ours


def draft_methods(model: Any, draft: Any, settings: GreedySettings) -> list[Method]:
    """A draft model with the paper's draft length, with an adaptive one, and transformers' own assisted generation."""
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
            metavar="FILE",
            help="Texts to measure on (.txt, .jsonl, …), may be repeated; by default the run's held-out rows.",
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(metavar="N", min=1, help="Most blocks of text, spread over all of it.")] = 16,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block, which is read without the text before it.")
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
        of_run, rows = (None, "") if text else held_out_rows(heads, opened)
        documents = None if of_run is None else of_run.documents
        held_out, console = read_blocks(opened, text or [], blocks, block_tokens, documents), Console()
        asked = bool(dynamic.thresholds) or (pictures.picture is not None and not panels)
        thresholds = sweep if can_sweep(opened, asked=asked) else []
        if rows:
            print_aside(rows)
        found = evaluate(
            opened,
            held_out,
            metrics=wanted,
            thresholds=thresholds,
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
    batch: Annotated[
        str, typer.Option(metavar="N,N,…", help="Rows that will be decoded together; with commas a tree for each size.")
    ] = "1",
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
    configs = [
        TuneConfig(
            new_tokens=prompts.max_new_tokens,
            batch=size,
            repetition_penalty=repetition_penalty,
            temperature=temperature,
            repeats=repeats,
            compile=compile,
        )
        for size in read_batches(batch)
    ]
    opened = loading.open(heads)
    (token_heads,) = opened.token_heads.values()
    least = prompts.max_new_tokens // 2 + TIMED_TOKENS
    found = prompts.read(opened, num_prompts, least_new_tokens=least, heads=heads)
    torch.manual_seed(seed)
    try:
        with stages(Console(stderr=True)) as begin:
            clock = clock_of(opened.model.device)
            tunings = tune_batches(token_heads, found, configs, clock=clock, progress=begin)
            costs = [measure_dtypes(token_heads.backbone, config.batch, clock) for config in configs]
    except KeyboardInterrupt:
        print_aside(f"interrupted: nothing was written, {heads / TUNED_TREE} is unchanged")
        raise typer.Exit(130) from None
    console = Console()
    for tuning, costs_here in zip(tunings, costs, strict=True):
        if len(tunings) > 1:
            console.rule(f"batch {tuning.config.batch}")
        show(console, tuning)
        console.print(advise(costs_here, token_heads.backbone.dtype, tuning.static), highlight=False, soft_wrap=True)
    made = [build_tuned_tree(token_heads, tuning, num_prompts=len(found)) for tuning in tunings]
    tuned, older = join_batches(made, token_heads)
    write_whole(heads, {TUNED_TREE: tuned.as_json().encode()})
    print_aside(f"written: {heads / TUNED_TREE}" + (f" (kept: batch {', '.join(map(str, older))})" if older else ""))
    for tuning in tunings if picture is not None else ():
        assert picture is not None
        path = picture if len(tunings) == 1 else picture.with_stem(f"{picture.stem}_batch_{tuning.config.batch}")
        draw_tuning(tuning, path)
        print_aside(f"picture: {path}")


def read_batches(text: str) -> list[int]:
    """
    >>> read_batches("1,4,16")
    [1, 4, 16]

    Raises:
        ValueError: no batch sizes, or one of them twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ValueError(f"--batch {text!r} was given; allowed are different integers of at least 1, with commas.")
    return [int(part) for part in parts]


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int], Callable[[], Any]]]:
    """A bar for each stage on a terminal, nothing elsewhere; yields the function (stage, total) that begins one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield lambda stage, total: partial(bars.advance, bars.add_task(stage, total=total))

"""The commands that measure speed: `headway benchmark` (methods side by side), `tune-tree` (the best tree)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from heads.checkpoint.opening import Opened, open_draft_model
from heads.checkpoint.save_load import write_whole
from heads.cli.hub import BY_NAME, is_hub_name
from heads.cli.option_groups import with_groups
from heads.cli.options import JsonOption, LoadingOptions, PenaltyOption, PromptOptions, TreeOptions, print_aside
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.tuned_file import TUNED_TREE
from heads.evaluation import methods as compared
from heads.evaluation.methods import GreedySettings, Method, penalty_used
from heads.evaluation.pictures import draw_speed_blocks, new_figure
from heads.evaluation.same_text import Float32Judge
from heads.evaluation.tables import describe_rulings, measure, speed_table, write_json
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.dtype_costs import advise, form_of, measure_forms
from heads.tuning.report import draw_tuning, show
from heads.tuning.timing import TIMED_TOKENS
from heads.tuning.tune import tune_batches
from heads.tuning.tuned_tree import build_tuned_tree, join_batches


@dataclass(frozen=True, kw_only=True)
class ComparedOptions:
    """What is compared."""

    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder or hub name of a small model with the backbone's tokenizer: adds rows of speculative sampling "
            "with it, and of transformers' own on the same pair.",
        ),
    ] = None
    no_prompt_lookup: Annotated[
        bool, typer.Option("--no-prompt-lookup", help="Leave out prompt lookup, for backbones that do not support it.")
    ] = False
    judge: Annotated[
        Literal["float32"] | None,
        typer.Option(
            metavar="float32",
            help="Excuse differences from plain generate's text by a float32 copy of a bfloat16 or float16 backbone.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SpeedResults:
    """Results."""

    json_file: JsonOption = None
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the speeds into this PNG file.")] = None


@dataclass(frozen=True, kw_only=True)
class TuningPrompts(PromptOptions):
    """Prompts."""

    num_prompts: Annotated[int, typer.Option(metavar="N", min=2, help="Prompts to use at most.")] = 32
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Most tokens to generate for each prompt.")
    ] = 128


@with_groups
def benchmark_command(
    heads: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="HEADS...",
            show_default=False,
            help="Folders or hub names of heads on one backbone; not needed with --backbone and --draft-model.",
        ),
        BY_NAME,
    ] = None,
    *,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Interleaved repeats, of which medians are taken.")
    ] = 3,
    repetition_penalty: PenaltyOption = None,
    compared_with: ComparedOptions,
    results: SpeedResults,
    prompts: PromptOptions,
    drafting: TreeOptions,
    loading: LoadingOptions,
) -> None:
    """Compare plain generate, prompt lookup and heads side by side in one run, on whole greedy generate calls."""
    if results.picture is not None:
        new_figure(1, 1)  # fails before anything is measured if matplotlib is missing
    drafting.refuse_packing(loading)
    if not heads and drafting.any_given:
        raise ValueError("--tree, --lookup and --compile need a folder of heads; give one, or leave them out.")
    opened = loading.open_any(heads or [], without_heads=compared_with.draft_model is not None)
    found = prompts.read(opened, heads=heads[0] if heads else None)
    settings = GreedySettings(new_tokens=prompts.max_new_tokens, repetition_penalty=repetition_penalty)
    methods = build_methods(opened, settings, drafting, with_prompt_lookup=not compared_with.no_prompt_lookup)
    if compared_with.draft_model is not None:
        draft = open_draft_model(compared_with.draft_model, loading.dtype)
        methods += draft_methods(opened.model, draft, settings)
    float32 = None if compared_with.judge is None else Float32Judge(model=opened.model, settings=settings)
    console = Console()
    rows = measure(console, opened.model, methods, settings, found, repeats, float32=float32)
    title = f"{opened.source}, {len(found)} prompts, {prompts.max_new_tokens} new tokens, medians of {repeats} repeats"
    console.print(speed_table(rows, title))
    if float32 is not None:
        typer.echo(describe_rulings(rows, opened.tokenizer))
    penalty = penalty_used(opened.model, repetition_penalty)
    name = "greedy" if penalty == 1.0 else f"greedy, repetition penalty {penalty:g}"
    if results.json_file is not None:
        write_json(results.json_file, {name: rows}, opened.model.device)
        print_aside(f"rows: {results.json_file}")
    if results.picture is not None:
        draw_speed_blocks({name: rows}, results.picture)
        print_aside(f"picture: {results.picture}")


def build_methods(
    opened: Opened, settings: GreedySettings, drafting: TreeOptions, *, with_prompt_lookup: bool
) -> list[Method]:
    """One method for each row: plain generation, all heads alone, lookup without heads, heads with lookup.

    Heads that have no lookup, as was asked or as their tree.json says, have one row alone.
    """
    model, shape, compile = opened.model, drafting.shape, drafting.compile
    alone, without, both = list[Method](), list[Method](), list[Method]()
    for name, heads in opened.token_heads.items():
        alone.append(compared.tree(model, heads, settings, f"{name}, heads alone", shape, 0, compile))
        lookup = TreeDecoding(heads, shape, lookup=drafting.lookup, compile=False).lookup  # tree.json may switch it off
        if lookup:
            both.append(
                compared.tree(model, heads, settings, f"{name}, heads with lookup", shape, drafting.lookup, compile)
            )
            without = [compared.lookup_alone(model, heads, settings, lookup)]
    prompt_lookup = [compared.prompt_lookup(model, settings)] if with_prompt_lookup else []
    return [compared.plain(model, settings), *alone, *prompt_lookup, *without, *both]


def draft_methods(model: Any, draft: Any, settings: GreedySettings) -> list[Method]:
    """A draft model with the paper's draft length, with an adaptive one, and transformers' own assisted generation."""
    chains = [compared.draft_model(model, draft, settings), compared.draft_model(model, draft, settings, "adaptive")]
    return [*chains, compared.assistant_model(model, draft, settings)]


@with_groups
def tune_tree_command(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Folder that heads were saved to.")],
    *,
    batch: Annotated[
        str, typer.Option(metavar="N,N,…", help="Rows that will be decoded together; with commas a tree for each size.")
    ] = "1",
    repetition_penalty: PenaltyOption = None,
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
    prompts: TuningPrompts,
    loading: LoadingOptions,
) -> None:
    """Fit the tree to these heads on this machine; TreeDecoding uses what is written to HEADS/tree.json by itself.

    Measures how often each candidate is right along accepted paths and what each stage of a pass takes, and picks the
    static or dynamic tree with the most tokens a second, or plain decoding where none pays. Ctrl-C leaves without
    writing anything.
    """
    if picture is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    if is_hub_name(heads):
        raise ValueError(
            f"{heads} is no folder here, and the tree is written beside the heads; fetch them with "
            f"`hf download {heads} --local-dir FOLDER` and give that folder."
        )
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
    found = prompts.read(opened, least_new_tokens=least, heads=heads)
    torch.manual_seed(seed)
    try:
        with stages(Console(stderr=True)) as begin:
            clock = clock_of(opened.model.device)
            tunings = tune_batches(token_heads, found, configs, clock=clock, progress=begin)
            costs = [measure_forms(token_heads.backbone, config.batch, clock) for config in configs]
    except KeyboardInterrupt:
        print_aside(f"interrupted: nothing was written, {heads / TUNED_TREE} is unchanged")
        raise typer.Exit(130) from None
    console = Console()
    for tuning, costs_here in zip(tunings, costs, strict=True):
        if len(tunings) > 1:
            console.rule(f"batch {tuning.config.batch}")
        show(console, tuning)
        console.print(advise(costs_here, form_of(token_heads.backbone), tuning.static), highlight=False, soft_wrap=True)
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

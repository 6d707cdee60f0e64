"""The command `headway benchmark`: methods side by side in one run, as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.cli.options import (
    BackboneOption,
    CompileOption,
    DtypeOption,
    LookupOption,
    Penalty,
    TreeOption,
    read_tree_option,
    say_aside,
)
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation import methods as compared
from heads.evaluation.judges import Float32Judge
from heads.evaluation.methods import GreedySettings, Method, plain, prompt_lookup, tree
from heads.evaluation.pictures import draw_speed_blocks, new_figure
from heads.evaluation.prompts import check_length, default_prompts, read_prompts
from heads.evaluation.tables import measure, speed_table, write_json
from heads.evaluation.throughput import MethodResult


def benchmark_command(
    heads: Annotated[list[Path], typer.Argument(metavar="HEADS...", help="Folders of heads on one backbone.")],
    backbone: BackboneOption = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A .txt or .jsonl file of prompts; by default text held out from the backbone.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use at most.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are cut to this many tokens.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt at most.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats, of which medians are taken.")] = 3,
    repetition_penalty: Penalty = 1.0,
    tree: TreeOption = None,
    lookup: LookupOption = None,
    compile: CompileOption = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            help="Folder or hub name of a small model with the backbone's tokenizer: adds rows of speculative sampling "
            "with it, and of transformers' own on the same pair.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows, machine, versions and command here.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the speeds into this PNG file.")] = None,
    no_prompt_lookup: Annotated[
        bool, typer.Option("--no-prompt-lookup", help="Leave prompt lookup out, for backbones that cannot do it.")
    ] = False,
    judge: Annotated[
        Literal["float32"] | None,
        typer.Option(
            help="Let a float32 copy of a bfloat16 or float16 backbone decide where texts may differ from plain's."
        ),
    ] = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Compare plain generate, prompt lookup and heads side by side in one run, on whole greedy generate calls."""
    if picture is not None:
        new_figure(1, 1)  # without matplotlib nothing is measured
    opened = open_heads(list(heads), backbone, dtype)
    found = (
        default_prompts(opened.source, opened.tokenizer, num_prompts, prompt_tokens)
        if prompts is None
        else read_prompts(prompts, opened.tokenizer, num_prompts, prompt_tokens)
    )
    check_length(opened.model, found, new_tokens)
    found = [prompt_1T.to(opened.model.device) for prompt_1T in found]
    settings = GreedySettings(new_tokens=new_tokens, repetition_penalty=repetition_penalty)
    shape = read_tree_option(tree)
    methods = build_methods(opened, settings, shape, lookup, compile, with_prompt_lookup=not no_prompt_lookup)
    if draft_model is not None:
        methods += draft_methods(opened.model, open_draft_model(draft_model, dtype), settings)
    float32 = None if judge is None else Float32Judge(model=opened.model, settings=settings)
    console = Console()
    rows = measure(console, opened.model, methods, settings, found, repeats, float32=float32)
    title = f"{opened.source}, {len(found)} prompts, {new_tokens} new tokens, medians of {repeats} repeats"
    console.print(speed_table(rows, title))
    if float32 is not None:
        say_rulings(rows, opened.tokenizer)
    name = "greedy" if repetition_penalty == 1.0 else f"greedy, repetition penalty {repetition_penalty}"
    if json_file is not None:
        write_json(json_file, {name: rows}, opened.model.device)
        say_aside(f"rows: {json_file}", "auto")
    if picture is not None:
        draw_speed_blocks({name: rows}, picture)
        say_aside(f"picture: {picture}", "auto")


def build_methods(
    opened: Opened,
    settings: GreedySettings,
    shape: str | int | None,
    lookup: int | None,
    compile: bool | None,
    *,
    with_prompt_lookup: bool,
) -> list[Method]:
    """A row each; heads are named as their folder, and a row without lookup says so."""
    methods = [plain(opened.model, settings)]
    if with_prompt_lookup:
        methods.append(prompt_lookup(opened.model, settings))
    for name, heads in opened.token_heads.items():
        # a tree.json may have it switched off
        looks_up = TreeDecoding(heads, shape, lookup=lookup, compile=False).lookup > 0
        row = name if looks_up else f"{name}, heads alone"
        methods.append(tree(opened.model, heads, settings, row, shape, lookup, compile))
    return methods


def draft_methods(model: Any, draft: Any, settings: GreedySettings) -> list[Method]:
    """Drafting as many tokens as the paper does, as many as pay best here, and transformers' own way."""
    chains = [compared.draft_model(model, draft, settings), compared.draft_model(model, draft, settings, "adaptive")]
    return [*chains, compared.assistant_model(model, draft, settings)]


def say_rulings(rows: list[MethodResult], tokenizer: Any) -> None:
    """A line for each place where a text parts from plain generate's; "same text" counts those within rounding."""
    for row in rows:
        for ruling in row.rulings:
            typer.echo(f"{row.name}, {ruling.describe(tokenizer)}")
    rulings = [ruling for row in rows for ruling in row.rulings]
    ours = sum(ruling.preferred == "other" for ruling in rulings)
    typer.echo(
        f"Texts part from plain generate's at {len(rulings)} places, {sum(r.within_rounding for r in rulings)} of them "
        f"within rounding; float32 prefers plain's token {len(rulings) - ours} times."
    )

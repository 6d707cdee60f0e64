"""The command `headway tune-tree`: fit the tree to heads and machine, and leave it as tree.json beside the heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import open_heads
from heads.checkpoint.save_load import write_whole
from heads.decoding.tuned_file import TUNED_TREE
from heads.evaluation.prompts import check_length, default_prompts, read_prompts
from heads.evaluation.throughput import clock_of
from heads.tuning.config import TuneConfig
from heads.tuning.outcome import tuned_tree
from heads.tuning.report import draw_tuning, show
from heads.tuning.timing import TIMED_TOKENS
from heads.tuning.tune import tune


def tune_tree_command(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Folder that heads were saved to.")],
    backbone: Annotated[
        str | None, typer.Option(help="Folder or hub name of the backbone; by default the one in heads.json.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A .txt or .jsonl file of prompts; by default text held out from the backbone.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="Prompts to use at most.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompts are cut to this many tokens.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write behind each prompt at most.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Rows that will be decoded at once.")] = 1,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.01, help="Of tokens that came before, in the texts that are written; 1: none.")
    ] = 1.0,
    temperature: Annotated[float, typer.Option(min=0, help="Of the texts that are written; 0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved rounds of timing, of which medians are taken.")] = 15,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw times and predicted speeds against nodes into this PNG.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Try compiled passes as well; tree.json says so where they are faster.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of sampling, with --temperature.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of backbone and heads; auto: float32 on a CPU.")] = "auto",
) -> None:
    """Fit the tree to these heads on this machine; TreeDecoding uses what is written to HEADS/tree.json by itself.

    Measures how often each candidate is right along accepted paths and what each part of a pass takes, and picks the
    static or dynamic tree with the most tokens a second, or plain decoding where none pays. Ctrl-C leaves without
    writing anything.
    """
    opened = open_heads([heads], backbone, dtype)
    (token_heads,) = opened.token_heads.values()
    found = (
        default_prompts(opened.source, opened.tokenizer, num_prompts, prompt_tokens)
        if prompts is None
        else read_prompts(prompts, opened.tokenizer, num_prompts, prompt_tokens)
    )
    check_length(opened.model, found, max(new_tokens, new_tokens // 2 + TIMED_TOKENS))
    found = [prompt_1T.to(opened.model.device) for prompt_1T in found]
    config = TuneConfig(
        new_tokens=new_tokens,
        batch=batch,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        repeats=repeats,
        compile=compile,
    )
    torch.manual_seed(seed)
    console = Console()
    try:
        with stages(Console(stderr=True)) as begin:
            tuning = tune(token_heads, found, config, clock=clock_of(opened.model.device), progress=begin)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: nothing was written, {heads / TUNED_TREE} is as it was", err=True)
        raise typer.Exit(130) from None
    show(console, tuning)
    text = tuned_tree(token_heads, tuning, num_prompts=len(found)).as_json()
    write_whole(heads, {TUNED_TREE: text.encode()})
    typer.echo(f"written: {heads / TUNED_TREE}", err=True)
    if picture is not None:
        draw_tuning(tuning, picture)
        typer.echo(f"picture: {picture}", err=True)


class stages:  # noqa: N801 - reads as a phrase: `with stages(console) as begin`
    """A bar for each stage on a terminal, nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Callable[[str, int], Callable[[], Any]]:
        self.bars.start()
        return self.begin

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def begin(self, what: str, total: int) -> Callable[[], Any]:
        task = self.bars.add_task(what, total=total)
        return lambda: self.bars.advance(task)

"""Options that several commands of `headway` share, and how their lines on stderr look."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from heads.backbone.loading import Dtype
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP, MAX_LOOKUP

Color = Literal["auto", "always", "never"]

Heads = Annotated[Path, typer.Argument(metavar="HEADS", help="Folder that heads were saved to.")]
BackboneOption = Annotated[
    str | None, typer.Option("--backbone", help="Folder or hub name of the backbone; by default the one in heads.json.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Of backbone and heads; auto: float32 on a CPU, else the checkpoint's.")
]
TreeOption = Annotated[
    str | None,
    typer.Option("--tree", help="JSON file of paths, or a number of nodes; by default tree.json beside the heads."),
]
LookupOption = Annotated[
    int | None,
    typer.Option(
        "--lookup",
        min=0,
        max=MAX_LOOKUP,
        help=f"Tokens copied from earlier text, tried beside the tree; {DEFAULT_LOOKUP} by default, 0 turns it off.",
    ),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Run passes as compiled graphs, after seconds of compiling; by default what tree.json says, else not.",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model", help="Folder or hub name of a small model with the backbone's tokenizer that drafts instead."
    ),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="Of sampling; 0 is greedy.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0, max=1, help="Sample from the likeliest tokens of this total probability."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", min=0, help="Sample from this many likeliest tokens; 0: from all.")
]
Penalty = Annotated[float, typer.Option("--repetition-penalty", min=0.01, help="Of tokens that came before; 1: none.")]
Plain = Annotated[bool, typer.Option("--plain", help="Use the backbone's plain generate, to compare.")]
Highlight = Annotated[bool, typer.Option("--highlight", help="Colour the tokens that were drafted and accepted.")]
ColorOption = Annotated[
    Color, typer.Option("--color", help="Colours; auto: on a terminal, or where FORCE_COLOR is set.")
]
Seed = Annotated[int, typer.Option(help="Of sampling.")]


def read_tree_option(tree: str | None) -> str | int | None:
    """A file's name, or a number of nodes."""
    return int(tree) if tree is not None and tree.isdecimal() else tree


def use_color(stream: Any, color: Color) -> bool:
    if color != "auto":
        return color == "always"
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())


def say_aside(text: str, color: Color) -> None:
    """A dim line on stderr."""
    dim = use_color(sys.stderr, color)
    typer.echo(typer.style(text, dim=True) if dim else text, err=True, color=dim)

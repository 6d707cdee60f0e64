"""The groups of options that commands of `headway` share (heads/cli/option_groups.py), and how remarks are printed."""
# T prompt position

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from torch import Tensor

from heads.backbone.loading import Dtype
from heads.checkpoint.held_out import HeldOut, find_held_out
from heads.checkpoint.opening import Opened, open_backbone, open_heads, why_not_packed
from heads.cli.hub import BY_NAME
from heads.decoding.generate import check_temperature
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP, MAX_LOOKUP
from heads.evaluation.prompts import check_length, default_prompts, read_prompts

Color = Literal["auto", "always", "never"]
Heads = Annotated[Path, typer.Argument(metavar="HEADS", help="Folder or hub name of heads."), BY_NAME]
HeadsIfAny = Annotated[
    Path | None,
    typer.Argument(
        metavar="HEADS",
        show_default=False,
        help="Folder or hub name of heads; not needed with --backbone and --draft-model.",
    ),
    BY_NAME,
]
BackboneOption = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Folder or hub name of the backbone; by default the one in heads.json."),
]

DtypeOption = Annotated[
    Dtype,
    typer.Option(
        metavar="DTYPE",
        help=f"Dtype of backbone and heads: {', '.join(get_args(Dtype))}; auto is float32 on a CPU, else the "
        "checkpoint's.",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures, settings and machine as JSON.")
]

PenaltyOption = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=0.01,
        show_default=False,
        help="Makes tokens that came before less likely; 1: no penalty; by default the backbone's own.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Backbone.

    Raises:
        ValueError: weights of this dtype cannot be packed on this machine.
    """

    backbone: BackboneOption = None
    dtype: DtypeOption = "auto"
    pack: Annotated[
        bool,
        typer.Option(
            "--pack",
            help="Pack the weights of backbone and heads, not of draft models or --mx, for a CPU: faster passes over "
            "trees, twice the memory (16-bit weights on a CPU without instructions for them: the same memory).",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.pack and (reason := why_not_packed(self.dtype)):
            raise ValueError(f"--pack was given for {reason}.")

    def open(self, *folders: Path) -> Opened:
        return open_heads(list(folders), self.backbone, self.dtype, pack=self.pack)

    def open_any(self, folders: Sequence[Path], *, without_heads: bool, instead: str = "--draft-model MODEL") -> Opened:
        """As `open`; without folders only the backbone, if it is named and nothing needs heads.

        Args:
            instead: the command's options that need no heads, for the error.

        Raises:
            ValueError: no folders, and no backbone or no way to decode without heads.
        """
        if folders:
            return self.open(*folders)
        if self.backbone is None or not without_heads:
            raise ValueError(
                f"No folder of heads was given; give one, or --backbone MODEL and {instead} to decode without heads."
            )
        return open_backbone(self.backbone, self.dtype, pack=self.pack)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Drafting."""

    tree: Annotated[
        str | None,
        typer.Option(
            metavar="TREE", help="JSON file of paths, or a number of nodes; by default tree.json beside the heads."
        ),
    ] = None
    lookup: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_LOOKUP,
            help="Tokens copied from earlier text and verified beside the tree; 0 turns this off; by default as in "
            f"tree.json, else {DEFAULT_LOOKUP}.",
        ),
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Run passes as compiled graphs, after seconds of compiling; by default as in tree.json, else not.",
        ),
    ] = None

    @property
    def shape(self) -> str | int | None:
        """A file's name, or a number of nodes."""
        return int(self.tree) if self.tree is not None and self.tree.isdecimal() else self.tree

    @property
    def any_given(self) -> bool:
        return any(option is not None for option in (self.tree, self.lookup, self.compile))

    def refuse_packing(self, loading: LoadingOptions) -> None:
        """
        Raises:
            ValueError: compiled passes of packed weights, which would be the plain ones.
        """
        if loading.pack and self.compile:
            raise ValueError("--pack was given with --compile, and compiled passes use plain weights; leave one out.")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling.

    Raises:
        ValueError: a temperature too small to divide by, or limits on sampling for greedy text.
    """

    temperature: Annotated[float, typer.Option(metavar="X", min=0, help="0 is greedy.")] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", min=0, max=1, help="Sample from the likeliest tokens with this total probability."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Sample from this many likeliest tokens; 0: from all of them."),
    ] = None
    repetition_penalty: PenaltyOption = None
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed samples the same text.")] = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.greedy and not (self.top_p is None and self.top_k is None):
            raise ValueError("--top-p and --top-k limit sampling; give --temperature above 0 with them.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate`; those that are None are left to the backbone's own settings."""
        found: dict[str, Any] = {"do_sample": not self.greedy}
        if not self.greedy:
            found |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        found["repetition_penalty"] = self.repetition_penalty
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ColorOptions:
    """Colours."""

    highlight: Annotated[bool, typer.Option("--highlight", help="Colour tokens that were drafted and accepted.")] = (
        False
    )
    color: Annotated[
        Color,
        typer.Option(metavar="WHEN", help="auto, always or never; auto: on a terminal, or where FORCE_COLOR is set."),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Text."""

    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Texts to measure on (.txt, .jsonl, …), may be repeated; by default held-out rows of the run, or of "
            "the backbone.",
        ),
    ] = None
    blocks: Annotated[int, typer.Option(metavar="N", min=1, help="Most blocks of text, spread over all of it.")] = 16
    block_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block, which is read without the text before it.")
    ] = 256


@dataclass(frozen=True, kw_only=True)
class AskingOptions:
    """Prompts."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .txt or .jsonl file; by default the run's held-out rows, else text held out from the backbone.",
        ),
    ] = None
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Most prompts to use.")] = 20
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens to generate for each prompt.")
    ] = 128


@dataclass(frozen=True, kw_only=True)
class PromptOptions(AskingOptions):
    """Prompts."""

    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts are cut to this many tokens.")] = 64

    def read(self, opened: Opened, least_new_tokens: int = 0, heads: Path | None = None) -> list[Tensor]:
        """Prompts (1, T) on the backbone's device, with room for the new tokens.

        Args:
            heads: folder of heads, whose run's held-out rows are used if no file is given; a printed line names them.
        """
        rows = ""
        if self.prompts is not None:
            found = read_prompts(self.prompts, opened.tokenizer, self.num_prompts, self.prompt_tokens)
        else:
            held_out, rows = held_out_rows(heads, opened)
            if held_out is not None:
                found = held_out.prompts(self.num_prompts, self.prompt_tokens)
            else:
                found = default_prompts(opened.source, opened.tokenizer, self.num_prompts, self.prompt_tokens)
        check_length(opened.model, found, max(self.max_new_tokens, least_new_tokens))
        if rows:
            print_aside(rows)
        return [prompt_1T.to(opened.model.device) for prompt_1T in found]


def held_out_rows(heads: Path | None, opened: Opened) -> tuple[HeldOut | None, str]:
    """What the heads' run held out, if it can be read, and a line that names the rows that are used."""
    held_out, why = (None, "no heads are measured") if heads is None else find_held_out(heads, opened.tokenizer)
    rows = f"text held out from the backbone, for {why}" if held_out is None else held_out.described
    return held_out, f"rows: {rows}"


def use_color(stream: Any, color: Color) -> bool:
    if color != "auto":
        return color == "always"
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())


def print_aside(text: str, color: Color = "auto") -> None:
    """Print a dim line on stderr, so that a pipe gets only the results."""
    dim = use_color(sys.stderr, color)
    typer.echo(typer.style(text, dim=True) if dim else text, err=True, color=dim)

"""The command `headway generate | chat | benchmark | info`: parse, call, print.

What a user can cause ends in one sentence on stderr and exit code 1; HEADWAY_TRACEBACK=1 shows where it came from.
Text goes to stdout; what is said about it goes to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
from rich.console import Console
from typer.core import TyperGroup

from heads.conversation import Conversation, converse
from heads.counting_command import count_ngrams_command
from heads.decoding.draft_length import DEFAULT_K
from heads.decoding.draft_model import DraftModelDecoding
from heads.decoding.lookup import DEFAULT_LOOKUP, MAX_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluate_command import evaluate_command
from heads.evaluation import methods as compared
from heads.evaluation.float32_judge import Float32Judge
from heads.evaluation.methods import Method, Request, plain, prompt_lookup, tree
from heads.evaluation.prompts import check_length, default_prompts, read_prompts
from heads.evaluation.report import draw_speed_blocks
from heads.evaluation.tables import measure, speed_table, write_json
from heads.evaluation.throughput import Row
from heads.info import accuracy_table, describe, facts_table
from heads.loading import Dtype
from heads.merge_command import merge_command
from heads.opening import Opened, open_draft_model, open_heads
from heads.speaking import Decoding, Sampling, Speaker
from heads.tune_command import tune_tree_command

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


class OneSentence(TyperGroup):
    """Commands whose errors are one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `headway … | head`: the reader has enough
            raise
        except (ValueError, OSError) as error:
            if os.environ.get("HEADWAY_TRACEBACK") == "1":
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=OneSentence, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def prepare() -> None:
    """Multi-token prediction heads: generate faster with them, exactly as before."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@app.command()
def generate(
    heads: Heads,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from; by default what comes in by a pipe.")] = None,
    backbone: BackboneOption = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = 1.0,
    tree: TreeOption = None,
    lookup: LookupOption = None,
    draft_model: DraftModelOption = None,
    plain: Plain = False,
    highlight: Highlight = False,
    color: ColorOption = "auto",
    seed: Seed = 0,
    dtype: DtypeOption = "auto",
) -> None:
    """Stream the text that follows a prompt; the last line, on stderr, says how fast."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty)
    text = read_prompt(prompt)
    opened = open_heads([heads], backbone, dtype)
    decoding = build_decoding(opened, tree, lookup, draft_model, plain, highlight, dtype, greedy=temperature == 0)
    speaker = build_speaker(opened, decoding, sampling, max_new_tokens, highlight, color)
    torch.manual_seed(seed)
    stream = speaker.speak(speaker.encode(text))
    typer.echo()
    say_aside(stream.summary(), color)


@app.command()
def chat(
    heads: Heads,
    backbone: BackboneOption = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = 1.0,
    tree: TreeOption = None,
    lookup: LookupOption = None,
    draft_model: DraftModelOption = None,
    plain: Plain = False,
    highlight: Highlight = False,
    color: ColorOption = "auto",
    seed: Seed = 0,
    dtype: DtypeOption = "auto",
) -> None:
    """Talk with a chat model. /reset begins anew, /exit or end of input leaves, Ctrl-C stops an answer."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty)
    opened = open_heads([heads], backbone, dtype)
    greedy = temperature == 0
    decoding = build_decoding(
        opened, tree, lookup, draft_model, plain, highlight, dtype, greedy=greedy, keep_caches=True
    )
    speaker = build_speaker(opened, decoding, sampling, max_new_tokens, highlight, color)
    torch.manual_seed(seed)
    converse(Conversation(speaker), say=lambda text: say_aside(text, color))


@app.command()
def benchmark(
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
            help="Let a float32 copy of a bfloat16 or float16 backbone rule on texts that differ from plain's."
        ),
    ] = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Compare plain generate, prompt lookup and heads side by side in one run, on whole greedy generate calls."""
    opened = open_heads(list(heads), backbone, dtype)
    found = (
        default_prompts(opened.source, opened.tokenizer, num_prompts, prompt_tokens)
        if prompts is None
        else read_prompts(prompts, opened.tokenizer, num_prompts, prompt_tokens)
    )
    check_length(opened.model, found, new_tokens)
    found = [prompt_1T.to(opened.model.device) for prompt_1T in found]
    request = Request(new_tokens=new_tokens, repetition_penalty=repetition_penalty)
    methods = build_methods(opened, request, read_tree_option(tree), lookup, with_prompt_lookup=not no_prompt_lookup)
    if draft_model is not None:
        methods += draft_methods(opened.model, open_draft_model(draft_model, dtype), request)
    float32 = None if judge is None else Float32Judge(model=opened.model, request=request)
    console = Console()
    rows = measure(console, opened.model, methods, request, found, repeats, float32=float32)
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


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that heads were saved to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What a folder of heads holds, what the heads can do, and how they were made."""
    description = describe(folder)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
        return
    console = Console()
    console.print(facts_table(description))
    if description["measured_accuracy"]:
        console.print(accuracy_table(description["measured_accuracy"]))


app.command("count-ngrams")(count_ngrams_command)
app.command("evaluate")(evaluate_command)
app.command("merge")(merge_command)
app.command("tune-tree")(tune_tree_command)


def read_prompt(prompt: str | None) -> str:
    """The prompt, or what a pipe brings, without its last line break."""
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("No prompt was given; give --prompt TEXT, or send the text through a pipe.")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("The prompt is empty; give at least one word.")
    return prompt


def read_tree_option(tree: str | None) -> str | int | None:
    """A file's name, or a number of nodes."""
    return int(tree) if tree is not None and tree.isdecimal() else tree


def build_methods(
    opened: Opened, request: Request, shape: str | int | None, lookup: int | None, *, with_prompt_lookup: bool
) -> list[Method]:
    """A row each; heads are named as their folder, and a row without lookup says so."""
    methods = [plain(opened.model, request)]
    if with_prompt_lookup:
        methods.append(prompt_lookup(opened.model, request))
    for name, heads in opened.token_heads.items():
        looks_up = TreeDecoding(heads, shape, lookup=lookup).lookup > 0  # a tree.json may have it switched off
        methods.append(tree(opened.model, heads, request, name if looks_up else f"{name}, heads alone", shape, lookup))
    return methods


def draft_methods(model: Any, draft: Any, request: Request) -> list[Method]:
    """Drafting as many tokens as the paper does, as many as pay best here, and transformers' own way."""
    chains = [compared.draft_model(model, draft, request), compared.draft_model(model, draft, request, "adaptive")]
    return [*chains, compared.assistant_model(model, draft, request)]


def build_decoding(
    opened: Opened,
    tree: str | None,
    lookup: int | None,
    draft_model: str | None,
    plain: bool,
    highlight: bool,
    dtype: Dtype,
    *,
    greedy: bool,
    keep_caches: bool = False,
) -> Decoding | None:
    """How to decode; None is plain generation.

    Raises:
        ValueError: options that have no meaning together.
    """
    drafts = highlight or draft_model is not None or tree is not None or lookup is not None
    if plain and drafts:
        raise ValueError(
            "--plain drafts nothing, so --highlight, --tree, --lookup and --draft-model have no meaning with it; "
            "leave out --plain."
        )
    if plain:
        return None
    if draft_model is None:
        (token_heads,) = opened.token_heads.values()
        return TreeDecoding(token_heads, read_tree_option(tree), lookup=lookup, keep_caches=keep_caches)
    if tree is not None or lookup is not None:
        raise ValueError("--draft-model drafts in place of the heads; leave out --tree and --lookup with it.")
    # Greedy text does not depend on the length; sampled text does, and --seed is to repeat it.
    return DraftModelDecoding(open_draft_model(draft_model, dtype), "adaptive" if greedy else DEFAULT_K)


def build_speaker(
    opened: Opened, decoding: Decoding | None, sampling: Sampling, new_tokens: int, highlight: bool, color: Color
) -> Speaker:
    return Speaker(
        model=opened.model,
        tokenizer=opened.tokenizer,
        decoding=decoding,
        sampling=sampling,
        new_tokens=new_tokens,
        highlight=highlight and use_color(sys.stdout, color),
    )


def say_rulings(rows: list[Row], tokenizer: Any) -> None:
    """A line for each text that parts from plain generate's."""
    for row in rows:
        for ruling in row.rulings:
            typer.echo(f"{row.name}, {ruling.describe(tokenizer)}")
    rulings = [ruling for row in rows for ruling in row.rulings]
    ours = sum(ruling.preferred == "other" for ruling in rulings)
    typer.echo(
        f"{len(rulings)} texts part from plain generate's; float32 prefers plain's token {len(rulings) - ours} times."
    )


def use_color(stream: Any, color: Color) -> bool:
    if color != "auto":
        return color == "always"
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())


def say_aside(text: str, color: Color) -> None:
    """A dim line on stderr."""
    dim = use_color(sys.stderr, color)
    typer.echo(typer.style(text, dim=True) if dim else text, err=True, color=dim)


def main() -> None:
    app()

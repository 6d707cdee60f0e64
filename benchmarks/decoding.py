"""Decoding speed on the demo backbone: `python -m benchmarks.decoding`. Prints side-by-side tables from one run.

Plain `generate`, `generate` with prompt lookup, and tree decoding with each folder of heads, as it is by default (a
looked-up chain beside the tree) and with the heads alone, on held-out prompts: greedy, then with a repetition penalty,
since a small model's greedy text loops and loops flatter every drafting method, copying most of all.
Then where each millisecond goes, and whether the targets were reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import transformers
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.parts import Parts, Watched, measure_parts, watch_heads, watch_plain
from heads.decoding.lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import Method, Request, plain, prompt_lookup, tree
from heads.evaluation.prompts import default_prompts
from heads.evaluation.report import GREY, PALETTE, draw_speeds, save_figure, tidy
from heads.evaluation.tables import describe_machine, measure, progress_bar, speed_table, versions, write_json
from heads.evaluation.throughput import Row
from heads.interface import TokenHeads
from heads.opening import Opened, open_heads
from train.run import explain_errors

Of = TypeVar("Of")
TARGET_RATIO = 1.5
REPETITION_PENALTY = 1.1
KINDS = {"": DEFAULT_LOOKUP, ", heads alone": 0}  # what a row's name ends with -> tokens looked up


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console()
    opened = open_heads(options.heads)
    prompts = default_prompts(opened.source, opened.tokenizer, options.prompts, options.prompt_tokens)
    prompts = [prompt_1T.to(opened.model.device) for prompt_1T in prompts]
    say_what_runs(console, opened, options)
    blocks: dict[str, list[Row]] = {}
    parts: dict[str, list[Parts]] = {}
    for penalty in (1.0, REPETITION_PENALTY):
        request = Request(new_tokens=options.new_tokens, repetition_penalty=penalty)
        name = "greedy" if penalty == 1.0 else f"greedy, repetition penalty {penalty}"
        blocks[name] = measure_speed(console, opened, request, prompts, options.repeats, name)
        parts[name] = measure_where(console, opened, request, prompts, options.repeats, name)
    for name in blocks:
        say_targets(console, name, blocks[name], parts[name])
    if options.json:
        by_name = {name: [dataclasses.asdict(p) for p in found] for name, found in parts.items()}
        write_json(options.json, blocks, opened.model.device, milliseconds_per_token=by_name, options=vars(options))
        console.print(f"rows: {options.json}")
    if options.picture:
        draw(blocks, parts, options.picture)
        console.print(f"picture: {options.picture}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--heads",
        nargs="+",
        default=["checkpoints/demo/medusa", "checkpoints/demo/grounded"],
        help="folders of heads on one backbone; the last one is held against the targets",
    )
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts (default: 20)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each prompt (default: 128)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats, of which medians are taken (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write rows, machine, versions and command here")
    parser.add_argument("--picture", metavar="FILE", help="write bars of speeds and milliseconds here, as PNG")
    return parser


def say_what_runs(console: Console, opened: Opened, options: argparse.Namespace) -> None:
    machine, found = describe_machine(opened.model.device), versions()
    console.print(
        f"{opened.source} with {', '.join(opened.token_heads)}; {options.prompts} held-out prompts of "
        f"{options.prompt_tokens} tokens, {options.new_tokens} new tokens, medians of {options.repeats} repeats\n"
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, device {machine['device']}, "
        f"{str(opened.model.dtype).removeprefix('torch.')}, torch {found['torch']}, "
        f"transformers {found['transformers']}",
        highlight=False,
        soft_wrap=True,
    )


def tree_methods(opened: Opened, request: Request) -> list[tuple[TokenHeads, Method]]:
    """Each folder of heads with the default decoder, then each with the heads alone."""
    return [
        (heads, tree(opened.model, heads, request, f"{name}{kind}", lookup=lookup))
        for kind, lookup in KINDS.items()
        for name, heads in opened.token_heads.items()
    ]


def measure_speed(
    console: Console, opened: Opened, request: Request, prompts: Sequence[Tensor], repeats: int, name: str
) -> list[Row]:
    """Compare all methods and print their table."""
    model = opened.model
    ours = [method for _, method in tree_methods(opened, request)]
    methods = [plain(model, request), prompt_lookup(model, request), *ours]
    rows = measure(console, model, methods, request, prompts, repeats, f"speed, {name}")
    console.print(speed_table(rows, f"\n{name}"))
    return rows


def measure_where(
    console: Console, opened: Opened, request: Request, prompts: Sequence[Tensor], repeats: int, name: str
) -> list[Parts]:
    """Measure the parts of plain generate and of each of our methods, and print their table."""
    watched: list[tuple[Method, Watched]] = [
        (plain(opened.model, request), functools.partial(watch_plain, opened.model))
    ]
    for token_heads, method in tree_methods(opened, request):
        watched.append((method, functools.partial(watch_heads, token_heads)))
    runs = len(watched) * len(prompts) * repeats
    with progress_bar(console, f"milliseconds, {name}", runs) as advance:
        found = measure_parts(watched, prompts, repeats, opened.model.device, advance)
    console.print(parts_table(found, f"\n{name}: milliseconds for each emitted token"))
    return found


def parts_table(parts: Sequence[Parts], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    for column in (
        "backbone forward\n(with unembedding)",
        "head forwards\n(with projection)",
        "everything\nelse",
        "total\n",
    ):
        table.add_column(column, justify="right")
    for p in parts:
        table.add_row(p.name, *(f"{value:.2f}" for value in (p.backbone, p.heads, p.rest, p.total)))
    return table


def say_targets(console: Console, name: str, rows: Sequence[Row], parts: Sequence[Parts]) -> None:
    """The last folder of heads, by default and alone, against the targets; a line each, from what was measured."""
    console.print(f"\n{name}:", highlight=False)
    _, looked_up, *ours = rows
    for *others, best in in_kinds(ours):
        tell(console, f"{best.name} ≥ {TARGET_RATIO} × plain", f"{best.ratio:.2f}", best.ratio >= TARGET_RATIO)
        for other in (looked_up, *others):
            text = f"{best.tokens_per_second:.1f} against {other.tokens_per_second:.1f} tokens/s"
            ahead = best.tokens_per_second > other.tokens_per_second
            tell(console, f"{best.name} ahead of {other.name}", text, ahead)
    for *_, p in in_kinds(parts[1:]):
        text = f"{p.rest:.2f} against {parts[0].rest:.2f} ms"
        tell(console, f"{p.name}: time outside forwards ≤ plain's", text, p.rest <= parts[0].rest)
    for row in rows[1:]:
        tell(console, f"{row.name}: same text as plain", row.same_text, row.same_text.startswith("yes"))


def in_kinds(ours: Sequence[Of]) -> list[Sequence[Of]]:
    """Split what was measured of `tree_methods` by kind, so that like is held against like.

    >>> in_kinds(["medusa", "grounded", "medusa, heads alone", "grounded, heads alone"])
    [['medusa', 'grounded'], ['medusa, heads alone', 'grounded, heads alone']]
    """
    count = len(ours) // len(KINDS)
    return [ours[start : start + count] for start in range(0, len(ours), count)]


def tell(console: Console, target: str, found: str, reached: bool) -> None:
    console.print(
        f"  target {target}: {found}, {'reached' if reached else 'not reached'}", highlight=False, soft_wrap=True
    )


def draw(blocks: dict[str, list[Row]], parts: dict[str, list[Parts]], path: str) -> None:
    """Speeds above, milliseconds below, a column for each block."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    upper, lower = halves
    for axes, (name, rows) in zip(upper.subplots(1, len(blocks)), blocks.items(), strict=True):
        draw_speeds(axes, rows, f"tokens per second, {name}")
    for axes, (name, found) in zip(lower.subplots(1, len(parts)), parts.items(), strict=True):
        draw_parts(axes, found, f"milliseconds for each token, {name}")
    save_figure(figure, path)


def draw_parts(axes: Any, parts: Sequence[Parts], title: str) -> None:
    names = [p.name for p in parts]
    shares = {"backbone": PALETTE[0], "heads": PALETTE[1], "rest": GREY}
    labels = {"backbone": "backbone forward", "heads": "head forwards", "rest": "everything else"}
    left = [0.0] * len(parts)
    for part, color in shares.items():
        widths = [getattr(p, part) for p in parts]
        axes.barh(names, widths, left=left, color=color, height=0.6, label=labels[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    tidy(axes, title, "ms")
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()  # ours are enough
    explain_errors(main)

"""Decoding speed on the demo backbone: `python -m benchmarks.speed.decoding`. Prints side-by-side tables from one run.

Compared on held-out prompts are plain `generate` (eager, and with a compiled static cache), prompt lookup, a draft
model (transformers' assisted generation and our own), and tree decoding with each folder of heads, by default (with
prompt lookup) and with the heads alone, eager and compiled. Prompts are decoded greedily, then with a repetition
penalty, since a small model's greedy text loops, which favours every drafting method and copying most of all. DynaMo's
heads have a backbone of their own, so their table, with tree decoding and lossy dynamic decoding, has its own plain
row. Then follow the parts of each millisecond, and the targets. First of all, each folder's tree is fitted to this
machine as `headway tune-tree` does it, and graphs are compiled; neither is timed, and the chosen trees and the seconds
of compiling are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import Tensor

from benchmarks.shared import held_out, parser_of, run_benchmark, say, wide_console
from benchmarks.speed.decoding_report import draw, parts_table, phase_table, say_targets
from benchmarks.speed.parts import Parts, Watched, measure_parts, watch_heads, watch_plain
from heads.backbone.compiled import compiled, what_stops_compiling
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.decoding.proposers.compiled import compiled_drafting
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.evaluation.methods import (
    GreedySettings,
    Method,
    assistant_model,
    draft_model,
    dynamic,
    plain,
    plain_compiled,
    prompt_lookup,
    tree,
)
from heads.evaluation.tables import describe_machine, measure, progress_bar, speed_table, versions, write_json
from heads.evaluation.throughput import MethodResult, clock_of
from heads.interface.token_heads import TokenHeads
from heads.tuning.config import TuneConfig
from heads.tuning.report import verdict
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import build_tuned_tree

REPETITION_PENALTY = 1.1
FITTED_ON = 16  # prompts at least: fewer tell more of themselves than of the trees
KINDS = {"": None, ", heads alone": 0}  # what a row's name ends with -> tokens looked up; None: as tuning says
COMPILED = ", compiled"
Trees = dict[str, Tree | DynamicTree]


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads(options.heads)
    to_fit = max(FITTED_ON, options.prompts)
    found = held_out(opened, 2 * to_fit, options.prompt_tokens)
    say_what_runs(console, opened, options)
    fitted = TuneConfig(
        new_tokens=options.new_tokens, repetition_penalty=REPETITION_PENALTY, checked_prompts=FITTED_ON // 2
    )
    places = [(options.offset + i * to_fit // options.prompts) % to_fit for i in range(options.prompts)]
    measured, own = [found[0::2][place] for place in places], open_own(options)
    alone, own_alone = (fit_trees(console, one, found[1::2], fitted) if one else {} for one in (opened, own))
    compare(console, opened, own, measured, options, alone, own_alone)


def fit_trees(
    console: Console, opened: Opened, prompts: Sequence[Tensor], config: TuneConfig
) -> dict[str, Tree | DynamicTree]:
    """Fit a tree to each of the heads, which `TreeDecoding` then uses, and print the choice.

    It replaces a tree.json beside shipped heads, which was fitted on another machine.

    Returns:
        By name of the heads, the fastest tree without prompt lookup; no entry where no draft is accepted.
    """
    alone: dict[str, Tree | DynamicTree] = {}
    for name, token_heads in opened.token_heads.items():
        tuning = tune(token_heads, prompts, config, clock=clock_of(opened.model.device))
        say(console, f"{name}: {verdict(tuning)}")
        token_heads.tuned_tree = build_tuned_tree(token_heads, tuning, num_prompts=len(prompts))
        if tuning.finalists:
            alone[name] = max(tuning.finalists.values(), key=lambda choice: choice.tokens_per_second).tree
    return alone


def open_own(options: argparse.Namespace) -> Opened | None:
    """The heads for dynamic decoding, with the backbone that was trained with them; None if they are left out."""
    return open_heads([options.dynamic]) if options.dynamic else None


def compare(
    console: Console,
    opened: Opened,
    own: Opened | None,
    prompts: Sequence[Tensor],
    options: argparse.Namespace,
    alone: Trees,
    own_alone: Trees,
) -> None:
    """Measure all blocks; print tables and targets, and write JSON and picture."""
    can_compile = may_compile(console, opened, options)
    draft = open_draft_model(options.draft_model) if options.draft_model else None
    blocks: dict[str, list[MethodResult]] = {}
    parts: dict[str, list[Parts]] = {}
    for penalty in (1.0, REPETITION_PENALTY):
        request = GreedySettings(new_tokens=options.new_tokens, repetition_penalty=penalty)
        name = "greedy" if penalty == 1.0 else f"greedy, repetition penalty {penalty}"
        blocks[name] = measure_speed(
            console, opened, request, prompts, options.repeats, name, alone, can_compile, draft
        )
        parts[name] = measure_where(console, opened, request, prompts, options.repeats, name, alone)
        if own is not None:
            blocks[f"{name}, dynamo's own backbone"] = measure_dynamic(
                console, own, options, request, prompts, name, own_alone
            )
    for name, found in parts.items():
        say(console, f"\n{name}:")
        say_targets(console, blocks[name], found, counts=name != "greedy")
    if options.json:
        by_name = {name: [dataclasses.asdict(p) for p in found] for name, found in parts.items()}
        write_json(options.json, blocks, opened.model.device, milliseconds_per_token=by_name, options=vars(options))
        console.print(f"rows: {options.json}")
    if options.picture:
        draw(blocks, parts, options.picture)
        console.print(f"picture: {options.picture}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.decoding", __doc__)
    parser.add_argument(
        "--heads",
        nargs="+",
        default=["checkpoints/demo/medusa", "checkpoints/demo/grounded", "checkpoints/demo/gru"],
        help="folders of heads on one backbone",
    )
    parser.add_argument(
        "--draft-model",
        default="checkpoints/demo/draft",
        help="a draft model for our own and transformers' assisted generation; '' leaves it out",
    )
    parser.add_argument(
        "--dynamic",
        default="checkpoints/demo/dynamo",
        help="folder of heads for dynamic decoding, with a backbone of their own; '' leaves it out",
    )
    parser.add_argument("--threshold", type=float, default=0.25, help="of dynamic decoding")
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows that compile")
    parser.add_argument(
        "--prompts", type=int, default=20, help="held-out prompts; trees are fitted to as many others, two at least"
    )
    parser.add_argument(
        "--offset",
        type=int,
        default=0,
        help="measure other prompts of the same half, shifted by so many: how much there is to copy, and "
        "so the speed, depends on the texts",
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--repeats", type=int, default=3, help="repeats, of which medians are taken")
    parser.add_argument("--json", metavar="FILE", help="write rows, machine, versions and command here")
    parser.add_argument("--picture", metavar="FILE", help="write bars of speeds and milliseconds here, as PNG")
    return parser


def say_what_runs(console: Console, opened: Opened, options: argparse.Namespace) -> None:
    machine, found = describe_machine(opened.model.device), versions()
    say(
        console,
        f"{opened.source} with {', '.join(opened.token_heads)}; {options.prompts} held-out prompts of "
        f"{options.prompt_tokens} tokens, {options.new_tokens} new tokens, medians of {options.repeats} repeats\n"
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, device {machine['device']}, "
        f"{str(opened.model.dtype).removeprefix('torch.')}, torch {found['torch']}, "
        f"transformers {found['transformers']}",
    )


def may_compile(console: Console, opened: Opened, options: argparse.Namespace) -> bool:
    """Whether rows that compile are measured; the reason is printed where they are not."""
    obstacle = "--no-compile was given" if options.no_compile else ""
    wrapped = next(iter(opened.token_heads.values())).backbone
    obstacle = obstacle or what_stops_compiling(wrapped)
    if obstacle:
        say(console, f"compiled rows are left out: {obstacle}")
    return not obstacle


def tree_methods(
    opened: Opened, request: GreedySettings, alone: Trees, *, compile: bool = False
) -> list[tuple[TokenHeads, Method]]:
    """Each folder of heads with the default decoder, then each with the heads alone."""
    end = COMPILED if compile else ""
    found = []
    for kind, lookup in KINDS.items():
        for name, heads in opened.token_heads.items():
            shape = alone.get(name) if lookup == 0 else None
            method = tree(opened.model, heads, request, f"{name}{kind}{end}", shape, lookup, compile)
            found.append((heads, method))
    return found


def measure_speed(
    console: Console,
    opened: Opened,
    request: GreedySettings,
    prompts: Sequence[Tensor],
    repeats: int,
    name: str,
    alone: Trees,
    can_compile: bool,
    draft: Any = None,
) -> list[MethodResult]:
    """Compare all methods and print their tables."""
    model = opened.model
    methods = [plain(model, request), prompt_lookup(model, request)]
    if draft is not None:
        methods += [assistant_model(model, draft, request), draft_model(model, draft, request)]
    methods += [method for _, method in tree_methods(opened, request, alone)]
    if can_compile:
        graphs = [plain_compiled(model, request), *(m for _, m in tree_methods(opened, request, alone, compile=True))]
        compile_first(console, opened, graphs, prompts, name)
        methods += graphs
    rows = measure(console, model, methods, request, prompts, repeats, f"speed, {name}")
    console.print(speed_table(rows, f"\n{name}"))
    console.print(phase_table(rows, f"{name}: shares of the time, and milliseconds of a pass"))
    return rows


def compile_first(
    console: Console, opened: Opened, methods: Sequence[Method], prompts: Sequence[Tensor], name: str
) -> None:
    """Compile every graph of the run outside all timings, and print the seconds."""
    before = compile_seconds(opened)
    start = time.perf_counter()
    for method in methods:
        for prompt_1T in prompts:
            method.run(prompt_1T)
    graphs, seconds = (now - then for now, then in zip(compile_seconds(opened), before, strict=True))
    say(
        console,
        f"\n{name}: warm-up with compiling, not in the tables: {time.perf_counter() - start:.0f} s, of which our "
        f"{graphs:.0f} new graphs took {seconds:.0f} s",
    )


def compile_seconds(opened: Opened) -> tuple[int, float]:
    """The number of graphs compiled so far, for passes and for drafting, and the seconds of compiling."""
    all_heads = list(opened.token_heads.values())
    made = [compiled(all_heads[0].backbone).compile_seconds, *(compiled_drafting(h).compile_seconds for h in all_heads)]
    return sum(map(len, made)), sum(sum(seconds.values()) for seconds in made)


def measure_dynamic(
    console: Console,
    opened: Opened,
    options: argparse.Namespace,
    request: GreedySettings,
    prompts: Sequence[Tensor],
    name: str,
    alone: Trees,
) -> list[MethodResult]:
    """Dynamic decoding, and tuned trees of the same heads, against plain generation of their own backbone."""
    ((folder, token_heads),) = opened.token_heads.items()
    own = dataclasses.replace(plain(opened.model, request), name=f"plain, {folder}'s own backbone")
    label = f"{folder}, dynamic, threshold {options.threshold}"
    methods = [own, dynamic(opened.model, token_heads, request, label, options.threshold)]
    methods += [method for _, method in tree_methods(opened, request, alone)]
    rows = measure(console, opened.model, methods, request, prompts, options.repeats, f"dynamic, {name}")
    console.print(speed_table(rows, f"\n{name}: {folder} beside plain generation of its own backbone"))
    return rows


def measure_where(
    console: Console,
    opened: Opened,
    request: GreedySettings,
    prompts: Sequence[Tensor],
    repeats: int,
    name: str,
    alone: Trees,
) -> list[Parts]:
    """Measure the parts of plain generate and of each of our methods, and print their table."""
    watched: list[tuple[Method, Watched]] = [
        (plain(opened.model, request), functools.partial(watch_plain, opened.model))
    ]
    for token_heads, method in tree_methods(opened, request, alone):
        watched.append((method, functools.partial(watch_heads, token_heads)))
    runs = len(watched) * len(prompts) * repeats
    with progress_bar(console, f"milliseconds, {name}", runs) as advance:
        found = measure_parts(watched, prompts, repeats, opened.model.device, advance)
    console.print(parts_table(found, f"\n{name}: milliseconds for each emitted token"))
    return found


if __name__ == "__main__":
    run_benchmark(main)

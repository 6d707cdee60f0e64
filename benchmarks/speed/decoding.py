"""Decoding speed on the demo backbone: `python -m benchmarks.speed.decoding`. Prints side-by-side tables from one run.

Compared on held-out prompts are plain `generate`, tree decoding with each folder of heads alone, prompt lookup (ours
without heads, and transformers'), heads with lookup, and a draft model (our own and transformers' assisted generation);
then plain `generate` and our trees compiled. Prompts are decoded greedily, with a repetition penalty, and by sampling
at temperature 1: a small model's greedy text loops, which favours every way to draft and copying most of all, and
sampled text does not. Another model scores all texts, since typical acceptance and dynamic decoding are lossy. DynaMo's
heads have a backbone of their own, so their tables have a plain row of their own. Then follow the parts of each
millisecond, the headlines and the targets. First of all each folder's tree is fitted to this machine as `headway
tune-tree` does it, and graphs are compiled; neither is timed. `--quick` is a share of all this for a short time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from benchmarks.shared import (
    ON_BASE,
    add_file_flags,
    held_out,
    parse_with_defaults_of,
    parser_of,
    run_benchmark,
    say,
    shipped,
    wide_console,
)
from benchmarks.speed.decoding_report import (
    ALONE,
    COMPILED,
    WITH_LOOKUP,
    draw,
    headlines,
    parts_table,
    phase_table,
    say_targets,
    scaled,
)
from benchmarks.speed.parts import Parts, Watched, measure_parts, watch_heads, watch_plain
from heads.backbone.compiling.compiled_backbone import compiled
from heads.backbone.compiling.graph import what_stops_compiling
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.decoding.defaults import default_nodes
from heads.decoding.proposers.heads import compiled_drafting
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.evaluation.methods import (
    GreedySettings,
    Method,
    SampledSettings,
    Settings,
    assistant_model,
    draft_model,
    dynamic,
    lookup_alone,
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
PENALISED = f"greedy, repetition penalty {REPETITION_PENALTY}"
LOOPS = "greedy"  # the setting whose text loops, so that no target is asked of it
QUICK: dict[str, Any] = {
    "new_tokens": 32,
    "no_compile": True,
    "no_fit": True,
    "draft_model": "",
    "dynamic": "",
    "parts_prompts": 2,
}
Trees = dict[str, Tree | DynamicTree]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is decoded with what: the heads on one backbone, their best trees without lookup, and the prompts."""

    opened: Opened
    alone: Trees
    prompts: Sequence[Tensor]
    repeats: int
    other_model: Any


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    console = wide_console()
    opened = open_heads(options.heads)
    own = open_heads([options.dynamic]) if options.dynamic else None
    to_fit = max(FITTED_ON, options.prompts)
    found = held_out(opened, 2 * to_fit, options.prompt_tokens)
    say_what_runs(console, opened, options)
    places = [(options.offset + i * to_fit // options.prompts) % to_fit for i in range(options.prompts)]
    other_model = open_draft_model(options.other_model) if options.other_model else None

    def measured(one: Opened) -> Measured:
        alone = {} if options.no_fit else fit_trees(console, one, found[1::2], options.new_tokens)
        prompts = [found[0::2][place] for place in places]
        return Measured(opened=one, alone=alone, prompts=prompts, repeats=options.repeats, other_model=other_model)

    compare(console, measured(opened), None if own is None else measured(own), options)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_with_defaults_of("quick", QUICK, build_parser(), arguments)


def settings_of(options: argparse.Namespace) -> dict[str, Settings]:
    """By the name of a table: how its methods choose tokens."""
    new_tokens = options.new_tokens
    return {
        LOOPS: GreedySettings(new_tokens=new_tokens),
        PENALISED: GreedySettings(new_tokens=new_tokens, repetition_penalty=REPETITION_PENALTY),
        "sampled, temperature 1": SampledSettings(new_tokens=new_tokens),
    }


def fit_trees(console: Console, opened: Opened, prompts: Sequence[Tensor], new_tokens: int) -> Trees:
    """Fit a tree to each of the heads, which `TreeDecoding` then uses, and print the choice.

    It replaces a tree.json beside shipped heads, which was fitted on another machine.

    Returns:
        By name of the heads, the fastest tree without prompt lookup; no entry where no draft is accepted.
    """
    config = TuneConfig(new_tokens=new_tokens, repetition_penalty=REPETITION_PENALTY, checked_prompts=FITTED_ON // 2)
    alone: Trees = {}
    for name, token_heads in opened.token_heads.items():
        tuning = tune(token_heads, prompts, config, clock=clock_of(opened.model.device))
        say(console, f"{name}: {verdict(tuning)}")
        token_heads.tuned_tree = build_tuned_tree(token_heads, tuning, num_prompts=len(prompts))
        if tuning.finalists:
            alone[name] = max(tuning.finalists.values(), key=lambda choice: choice.tokens_per_second).tree
    return alone


def compare(console: Console, ours: Measured, own: Measured | None, options: argparse.Namespace) -> None:
    """Measure all settings; print tables, headlines and targets, and write JSON and picture."""
    can_compile = may_compile(console, ours.opened, options)
    draft = open_draft_model(options.draft_model) if options.draft_model else None
    blocks: dict[str, list[MethodResult]] = {}
    parts: dict[str, list[Parts]] = {}
    for name, settings in settings_of(options).items():
        blocks[name] = measure_speed(console, ours, settings, name, can_compile, draft)
        if options.parts_prompts:
            parts[name] = measure_where(console, ours, settings, name, options.parts_prompts, blocks[name])
        if own is not None:
            blocks[f"{name}, dynamo's own backbone"] = measure_dynamic(console, own, settings, name, options.threshold)
    say(console, "\nheadlines, computed from the tables above")
    for name in settings_of(options):
        for line in headlines(name, blocks[name]):
            say(console, f"  {line}")
    for name in settings_of(options):
        say(console, f"\n{name}:")
        say_targets(console, blocks[name], parts.get(name, []), counts=name != LOOPS, alone=name == PENALISED)
    save(console, ours.opened, options, blocks, parts)


def save(
    console: Console,
    opened: Opened,
    options: argparse.Namespace,
    blocks: Mapping[str, list[MethodResult]],
    parts: Mapping[str, list[Parts]],
) -> None:
    """Write JSON and picture where they were asked for."""
    if options.json:
        by_name = {name: [dataclasses.asdict(p) for p in found] for name, found in parts.items()}
        write_json(options.json, blocks, opened.model.device, milliseconds_per_token=by_name, options=vars(options))
        console.print(f"rows: {options.json}")
    if options.picture:
        draw({name: blocks[name] for name in settings_of(options)}, parts, options.picture)
        console.print(f"picture: {options.picture}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.decoding", __doc__)
    parser.add_argument(
        "--heads",
        nargs="+",
        default=shipped(*ON_BASE),
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
    parser.add_argument(
        "--other-model",
        default="checkpoints/demo/draft",
        help="a model with the backbone's tokenizer that scores all texts; '' leaves it out",
    )
    changed = ", ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in QUICK.items())
    parser.add_argument("--quick", action="store_true", help=f"a share of all this: {changed}")
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows that compile")
    parser.add_argument("--no-fit", action="store_true", help="decode with the heads' default trees")
    parser.add_argument(
        "--parts-prompts", type=int, default=4, help="prompts for the parts of a millisecond; 0 leaves them out"
    )
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
    add_file_flags(parser, picture="bars of speeds and milliseconds")
    return parser


def say_what_runs(console: Console, opened: Opened, options: argparse.Namespace) -> None:
    machine, found = describe_machine(opened.model.device), versions()
    say(
        console,
        f"{opened.source} with {', '.join(opened.token_heads)}; {options.prompts} held-out prompts of "
        f"{options.prompt_tokens} tokens, {options.new_tokens} new tokens, medians of {options.repeats} interleaved "
        f"repeats; {'default trees' if options.no_fit else 'trees fitted below'}"
        f"{f'; texts scored by {options.other_model}' if options.other_model else ''}\n"
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
    ours: Measured, settings: Settings, kind: str, *, compile: bool = False
) -> list[tuple[TokenHeads, Method]]:
    """Each folder of heads, alone or with lookup, with its fitted or its default tree.

    Where tuning found that lookup alone is faster, its tree without lookup stands beside the chain, or else the default
    tree: a row of heads with lookup uses its heads, and lookup without heads has a row of its own.
    """
    found = []
    for name, heads in ours.opened.token_heads.items():
        unused = heads.tuned_tree is not None and heads.tuned_tree.kind == "plain"
        shape: Any = ours.alone.get(name) if kind == ALONE or unused else None
        if unused and shape is None:
            shape = default_nodes(heads.backbone.device)
        lookup = 0 if kind == ALONE else DEFAULT_LOOKUP
        label = f"{name}{kind}{COMPILED if compile else ''}"
        found.append((heads, tree(ours.opened.model, heads, settings, label, shape, lookup, compile)))
    return found


def build_methods(ours: Measured, settings: Settings, draft: Any) -> list[Method]:
    """All methods of a table that do not compile: heads alone first, then what copies, then the draft model."""
    model, (first, *_) = ours.opened.model, ours.opened.token_heads.values()
    methods = [plain(model, settings), *(method for _, method in tree_methods(ours, settings, ALONE))]
    if isinstance(settings, SampledSettings):
        for name, heads in ours.opened.token_heads.items():
            label = f"{name}{ALONE}, typical acceptance"
            methods.append(tree(model, heads, settings, label, ours.alone.get(name), 0, rule="typical"))
    methods += [lookup_alone(model, first, settings), prompt_lookup(model, settings)]
    methods += [method for _, method in tree_methods(ours, settings, WITH_LOOKUP)]
    if draft is not None:
        methods += [draft_model(model, draft, settings), assistant_model(model, draft, settings)]
    return methods


def measure_speed(
    console: Console, ours: Measured, settings: Settings, name: str, can_compile: bool, draft: Any
) -> list[MethodResult]:
    """Compare all methods and print their tables."""
    model = ours.opened.model
    methods = build_methods(ours, settings, draft)
    if can_compile:
        kinds = [tree_methods(ours, settings, kind, compile=True) for kind in (ALONE, WITH_LOOKUP)]
        graphs = [plain_compiled(model, settings), *(method for kind in kinds for _, method in kind)]
        compile_first(console, ours.opened, graphs, ours.prompts, name)
        methods += graphs
    rows = measure(
        console, model, methods, settings, ours.prompts, ours.repeats, f"speed, {name}", other_model=ours.other_model
    )
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
    console: Console, own: Measured, settings: Settings, name: str, threshold: float
) -> list[MethodResult]:
    """Dynamic decoding, and trees of the same heads, against plain generation of their own backbone."""
    model, ((folder, token_heads),) = own.opened.model, own.opened.token_heads.items()
    methods = [
        dataclasses.replace(plain(model, settings), name=f"plain, {folder}'s own backbone"),
        dynamic(model, token_heads, settings, f"{folder}, dynamic, threshold {threshold}", threshold),
        *(method for _, method in tree_methods(own, settings, ALONE)),
        lookup_alone(model, token_heads, settings),
        *(method for _, method in tree_methods(own, settings, WITH_LOOKUP)),
    ]
    what = f"dynamic, {name}"
    rows = measure(console, model, methods, settings, own.prompts, own.repeats, what, other_model=own.other_model)
    console.print(speed_table(rows, f"\n{name}: {folder} beside plain generation of its own backbone"))
    return rows


def measure_where(
    console: Console,
    ours: Measured,
    settings: Settings,
    name: str,
    num_prompts: int,
    rows: Sequence[MethodResult],
) -> list[Parts]:
    """Measure the parts of plain generate and of each of our methods, and print their table."""
    model, prompts = ours.opened.model, ours.prompts[:num_prompts]
    watched: list[tuple[Method, Watched]] = [(plain(model, settings), functools.partial(watch_plain, model))]
    for kind in (ALONE, WITH_LOOKUP):
        for token_heads, method in tree_methods(ours, settings, kind):
            watched.append((method, functools.partial(watch_heads, token_heads)))
    runs = len(watched) * len(prompts) * ours.repeats
    with progress_bar(console, f"milliseconds, {name}", runs) as advance:
        found = measure_parts(watched, prompts, ours.repeats, model.device, advance)
    found = scaled(found, rows)
    title = f"\n{name}: milliseconds for each emitted token, as in the table above; shares from {len(prompts)} prompts"
    console.print(parts_table(found, title))
    return found


if __name__ == "__main__":
    run_benchmark(main)

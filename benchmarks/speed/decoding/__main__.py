"""Decoding speed on the demo backbone: `python -m benchmarks.speed.decoding`. Prints side-by-side tables from one run.

Compared on held-out prompts are plain `generate`, tree decoding with each folder of heads alone, prompt lookup (ours
without heads, and transformers'), heads with lookup, and a draft model (our own and transformers' assisted generation);
then, with a repetition penalty, plain `generate`, our trees and our lookup without heads compiled. Prompts are decoded
greedily, with a repetition penalty, and by sampling at temperature 1: a small model's greedy text loops, which favours
every way to draft and copying most of all, and sampled text does not. Another model scores all texts, since typical
acceptance and dynamic decoding are lossy. DynaMo's heads have their own backbone, so their tables have a plain row of
their own. Then follow the parts of each millisecond, the headlines and the targets. Before that, each folder's tree is
fitted to this machine as `headway tune-tree` does it, and graphs are compiled; neither is timed. Trees and finished
settings are stored in --out, so a run can be divided (`--settings penalty`) and an interrupted one goes on; the page
says where and when each setting was measured (stored.py). `--quick` is a shorter run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

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
from benchmarks.speed.decoding.measuring import Measured, measure_setting
from benchmarks.speed.decoding.report import (
    draw,
    headlines,
    parts_table,
    phase_table,
    say_targets,
)
from benchmarks.speed.decoding.stored import Part, Store, read_row, say_commits
from benchmarks.speed.decoding.time_by_part import Parts
from benchmarks.speed.decoding.trees import FITTED_ON, REPETITION_PENALTY, fitted_trees, read_trees
from heads.backbone.compiling.graph import what_stops_compiling
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.evaluation.methods import (
    GreedySettings,
    SampledSettings,
    Settings,
)
from heads.evaluation.tables import describe_machine, speed_table, versions, write_json
from heads.evaluation.throughput import MethodResult

PENALISED = f"greedy, repetition penalty {REPETITION_PENALTY}"
LOOPS = "greedy"  # the setting whose text loops, so that no target is asked of it
SAMPLED = "sampled, temperature 1"
SETTINGS = {"greedy": LOOPS, "penalty": PENALISED, "sampled": SAMPLED}
"""The names of tables by the names that --settings takes."""
NOT_MEASURED_BY = ("settings", "out", "json", "picture", "quick")  # options on which no figure depends
QUICK: dict[str, Any] = {
    "new_tokens": 32,
    "no_compile": True,
    "no_fit": True,
    "draft_model": "",
    "dynamic": "",
    "parts_prompts": 2,
}


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

    asked = {name: value for name, value in vars(options).items() if name not in NOT_MEASURED_BY}
    store = Store(
        folder=Path(options.out), options=asked, device=opened.model.device, say=lambda text: say(console, text)
    )
    to_measure = {"ours": opened} | ({} if own is None else {"own": own})
    fitted = None if options.no_fit else fitted_trees(store, to_measure, found[1::2], options.new_tokens)

    def measured(kind: str, one: Opened) -> Measured:
        trees = {} if fitted is None else read_trees(console, one, fitted.found[kind])
        prompts = [found[0::2][place] for place in places]
        return Measured(opened=one, fitted=trees, prompts=prompts, repeats=options.repeats, other_model=other_model)

    both = {kind: measured(kind, one) for kind, one in to_measure.items()}
    compare(console, both["ours"], both.get("own"), options, store, fitted)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_with_defaults_of("quick", QUICK, build_parser(), arguments)


def settings_of(options: argparse.Namespace) -> dict[str, Settings]:
    """How the methods of each table choose tokens, by the table's name."""
    new_tokens = options.new_tokens
    return {
        LOOPS: GreedySettings(new_tokens=new_tokens),
        PENALISED: GreedySettings(new_tokens=new_tokens, repetition_penalty=REPETITION_PENALTY),
        SAMPLED: SampledSettings(new_tokens=new_tokens),
    }


def compare(
    console: Console,
    ours: Measured,
    own: Measured | None,
    options: argparse.Namespace,
    store: Store,
    fitted: Part | None,
) -> None:
    """Measure settings that are not stored; print tables, headlines and targets, and write JSON and picture."""
    can_compile = may_compile(console, ours.opened, options)
    draft = open_draft_model(options.draft_model) if options.draft_model else None
    trees = None if fitted is None else fitted.found
    parts: dict[str, Part] = {}
    for key, name in SETTINGS.items():
        part = store.read(name, trees=trees)
        if part is None and key in options.settings:
            compile = can_compile and name == PENALISED
            settings = settings_of(options)[name]
            measured = functools.partial(measure_setting, console, ours, own, settings, name, compile, draft, options)
            part = store.measure(name, measured, trees=trees)
        if part is None:
            say(console, f"\n{name} is left out: it is not stored; --settings {key} measures it")
            continue
        parts[name] = part
        show_setting(console, part)
    blocks = {name: [read_row(row) for row in part.found["rows"]] for name, part in parts.items()}
    milliseconds = {name: [Parts(**one) for one in part.found["parts"]] for name, part in parts.items()}
    say(console, "\nheadlines, computed from the tables above")
    for name, rows in blocks.items():
        for line in headlines(name, rows):
            say(console, f"  {line}")
    for name, rows in blocks.items():
        say(console, f"\n{name}:")
        say_targets(console, rows, milliseconds[name], counts=name != LOOPS, alone=name == PENALISED)
    say(console, "\n" + "\n".join(say_commits([*([] if fitted is None else [fitted]), *parts.values()])))
    more = {other_name(name): [read_row(row) for row in part.found["dynamic"]] for name, part in parts.items()}
    save(console, ours.opened, options, blocks, {name: rows for name, rows in more.items() if rows}, milliseconds)


def show_setting(console: Console, part: Part) -> None:
    """The tables of a setting, from its stored figures."""
    name, found = part.what, part.found
    rows = [read_row(row) for row in found["rows"]]
    if found["warm_up"]:
        say(console, f"\n{name}: {found['warm_up']}")
    console.print(speed_table(rows, f"\n{name}"))
    console.print(phase_table(rows, f"{name}: shares of the time, and milliseconds of a pass"))
    if found["parts"]:
        shares = (
            f"milliseconds for each emitted token, as in the table above; shares from {found['parts_prompts']} prompts"
        )
        console.print(parts_table([Parts(**one) for one in found["parts"]], f"\n{name}: {shares}"))
    if found["dynamic"]:
        table = speed_table([read_row(row) for row in found["dynamic"]], f"\n{other_name(name)}")
        console.print(table)


def other_name(name: str) -> str:
    """The name of a setting's table of dynamic decoding."""
    return f"{name}: dynamo beside plain generation of its own backbone"


def save(
    console: Console,
    opened: Opened,
    options: argparse.Namespace,
    blocks: Mapping[str, list[MethodResult]],
    more: Mapping[str, list[MethodResult]],
    parts: Mapping[str, list[Parts]],
) -> None:
    """Write JSON and picture where they were asked for."""
    if options.json:
        by_name = {name: [dataclasses.asdict(p) for p in found] for name, found in parts.items()}
        every = {**blocks, **more}
        write_json(options.json, every, opened.model.device, milliseconds_per_token=by_name, options=vars(options))
        console.print(f"rows: {options.json}")
    if options.picture and blocks:
        draw(blocks, {name: found for name, found in parts.items() if found}, options.picture)
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
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        default=list(SETTINGS),
        help="measure no others; stored ones are printed too",
    )
    parser.add_argument("--out", default="checkpoints/runs/decoding", help="folder of trees and finished settings")
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
    parser.add_argument("--new-tokens", type=int, default=96, help="new tokens for each prompt")
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
    """Whether compiled rows are measured; if not, the reason is printed."""
    obstacle = "--no-compile was given" if options.no_compile else ""
    wrapped = next(iter(opened.token_heads.values())).backbone
    obstacle = obstacle or what_stops_compiling(wrapped)
    if obstacle:
        say(console, f"compiled rows are left out: {obstacle}")
    return not obstacle


if __name__ == "__main__":
    run_benchmark(main)

"""`make demo`: train grounded heads on the demo backbone, decode held-out prompts with heads, compare, print one table.

Nothing is downloaded. Training runs the command that a user types. Decoding is measured in this process, with all
methods interleaved: greedily, with a repetition penalty, and by sampling at temperature 1. The table shows heads alone,
lookup without heads, and heads with lookup, since a small model's greedy text repeats itself and a copy of earlier text
is often the best draft; sampled text does not loop. `--readme` measures more prompts and repeats.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from benchmarks.shared import (
    add_decoding_flags,
    describe_cpu,
    describe_state,
    held_out,
    parse_with_defaults_of,
    parser_of,
    ratio_cell,
    run_benchmark,
    say,
    write_block,
)
from heads.backbone.compiling.graph import what_stops_compiling
from heads.checkpoint.opening import Opened, open_heads
from heads.checkpoint.schema import read_description
from heads.decoding.superposed.decoding import SuperposedDecoding
from heads.evaluation.methods import (
    GreedySettings,
    Method,
    SampledSettings,
    Settings,
    lookup_alone,
    plain,
    plain_compiled,
    prompt_lookup,
    tree,
)
from heads.evaluation.pictures import draw_report
from heads.evaluation.tables import measure, speed_table, write_json
from heads.evaluation.throughput import MethodResult
from train.config import read_config

README, PICTURE = Path("README.md"), Path("docs/pictures/demo_report.png")
MARKERS = ("<!-- demo: written by `python -m benchmarks.demo --readme`, never by hand -->", "<!-- /demo -->")
SHIPPED = {"medusa": "checkpoints/demo/medusa", "grounded": "checkpoints/demo/grounded"}
TRAINED = "grounded, just trained"
DRAFTS, DRAFT_TOKENS = 3, 10
FOR_README = {"prompts": 20, "new_tokens": 32, "repeats": 3}


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    console = Console()
    began = time.perf_counter()
    run = Path(read_config(["--config", options.config]).output_dir)
    for folder in SHIPPED.values():
        read_description(folder)  # a missing folder ends in a sentence before minutes are spent
    trains = not (options.no_training or holds_heads(run, console))
    if trains:
        train(options.config, run, console)
    trained = time.perf_counter()
    opened = open_heads([run / "last", *SHIPPED.values()])
    blocks = compare(console, opened, run, options)
    drafts = time_drafts(opened, held_out(opened, options.prompts), options.repeats)
    training = f"training {trained - began:.0f} s" if trains else "heads of an earlier run"
    seconds = f"{training}, decoding {time.perf_counter() - trained:.0f} s"
    draw_report(run / "metrics.jsonl", blocks, run / "report.png")
    measured = (
        f"{options.prompts} held-out prompts, {options.new_tokens} new tokens, medians of {options.repeats} "
        f"interleaved repeats, in brackets the ratio's 95 % interval over prompts"
    )
    if options.readme:
        shutil.copyfile(run / "report.png", PICTURE)
        write_block(
            README, MARKERS, f"{markdown(blocks)}\n{measured}; {describe_cpu()}; {seconds}; {describe_state()}.\n"
        )
    say(console, f"{drafts}\n{measured}; {seconds}\nheads: {run / 'last'}\npicture: {run / 'report.png'}")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_with_defaults_of("readme", FOR_README, build_parser(), arguments)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.demo", __doc__)
    parser.add_argument("--config", default="configs/demo/grounded.yaml", help="run to train")
    parser.add_argument("--no-training", action="store_true", help="measure the heads of the last run again")
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows that compile")
    changed = f"{FOR_README['prompts']} prompts, {FOR_README['new_tokens']} tokens, {FOR_README['repeats']} repeats"
    parser.add_argument(
        "--readme",
        action="store_true",
        help=f"write the table into README.md and the picture into docs/: {changed}",
    )
    add_decoding_flags(parser, prompts=4, new_tokens=128, repeats=2)
    return parser


def holds_heads(run: Path, console: Console) -> bool:
    """Whether an earlier call trained to its end; its heads are not trained again, which is said."""
    found = (run / "last").is_dir()
    if found:
        say(console, f"{run} holds the heads of an earlier call, which are measured; remove it to train them anew.")
    return found


def train(config: str, run: Path, console: Console) -> None:
    """Run the training command with this environment's accelerate; its output goes to the terminal.

    A run that was interrupted goes on.

    Raises:
        ValueError: accelerate is not installed, or the training failed.
    """
    accelerate = Path(sys.executable).parent / "accelerate"
    if not accelerate.exists():
        raise ValueError(f"There is no accelerate beside {sys.executable}; install the project's packages: make setup.")
    command = ["launch", "--config_file", "launch/single.yaml", "train.py", "--config", config]
    command += ["--resume", "true"] * run.is_dir()
    console.print(f"$ accelerate {' '.join(command)}", highlight=False, style="bold")
    done = subprocess.run([accelerate, *command], check=False)
    if done.returncode != 0:
        raise ValueError(f"Training ended with exit code {done.returncode}; its error is printed above.")


def compare(console: Console, opened: Opened, run: Path, options: argparse.Namespace) -> dict[str, list[MethodResult]]:
    """Measure every method in every block, print the tables and write them beside the run's heads."""
    prompts = held_out(opened, options.prompts)
    backbone = next(iter(opened.token_heads.values())).backbone
    obstacle = "--no-compile was given" if options.no_compile else what_stops_compiling(backbone)
    if obstacle:
        say(console, f"compiled rows are left out: {obstacle}")
    blocks = {}
    for name, settings in settings_of(options.new_tokens).items():
        methods = methods_of(opened, settings, compiles=not obstacle)
        if not obstacle:
            for method in methods:  # so that no measurement includes compiling
                for prompt_1T in prompts:
                    method.run(prompt_1T)
        blocks[name] = measure(console, opened.model, methods, settings, prompts, options.repeats, f"decoding, {name}")
        console.print(speed_table(blocks[name], f"\n{name}"))
    compared = [row for rows in blocks.values() for row in rows if row.same_text != "same distribution"]
    same = all(row.same_text.startswith("yes") for row in compared)
    say(console, f"same text: {'yes' if same else 'no'}")
    write_json(run / "decoding.json", blocks, opened.model.device)
    return blocks


def settings_of(new_tokens: int) -> dict[str, Settings]:
    """How the methods of each block of rows choose tokens, by the block's name."""
    return {
        "greedy": GreedySettings(new_tokens=new_tokens),
        "repetition penalty 1.1": GreedySettings(new_tokens=new_tokens, repetition_penalty=1.1),
        "sampled, temperature 1": SampledSettings(new_tokens=new_tokens),
    }


def methods_of(opened: Opened, request: Settings, *, compiles: bool) -> list[Method]:
    """Plain and heads alone, each followed by its compiled form; then lookup without heads, and heads with lookup.

    Compiled heads with lookup stand beside compiled lookup without heads, or compiling would pass for heads.
    """
    model = opened.model
    all_heads = dict(zip([TRAINED, *SHIPPED], opened.token_heads.values(), strict=True))
    best = all_heads["grounded"]
    methods = [plain(model, request)]
    if compiles:
        methods.append(plain_compiled(model, request))
    for name, token_heads in all_heads.items():
        methods.append(tree(model, token_heads, request, f"{name}, heads alone", lookup=0))
        if compiles and name in SHIPPED:
            label = f"{name}, heads alone, compiled"
            methods.append(tree(model, token_heads, request, label, lookup=0, compile=True))
    methods += [lookup_alone(model, best, request), prompt_lookup(model, request)]
    methods += [tree(model, all_heads[name], request, f"{name}, heads with lookup") for name in SHIPPED]
    if compiles:
        methods.append(lookup_alone(model, best, request, compile=True))
        methods.append(tree(model, best, request, "grounded, heads with lookup, compiled", compile=True))
    return methods


def time_drafts(opened: Opened, prompts: Sequence[Tensor], repeats: int) -> str:
    """A sentence on the seconds of three drafts divided by those of one plain text, for three ways to write them."""
    model, length = opened.model, {"max_new_tokens": DRAFT_TOKENS, "pad_token_id": 0}
    superposed = SuperposedDecoding(k=DRAFTS, temperature=1.0)
    sampled = {"do_sample": True, "top_p": 0.9, "top_k": 0, **length}
    ways: dict[str, Callable[[Tensor], Any]] = {
        "plain": partial(model.generate, do_sample=False, **length),
        "superposed": partial(model.generate, do_sample=False, custom_generate=superposed, **length),
        "sampled in one batch": partial(model.generate, num_return_sequences=DRAFTS, **sampled),
        "one after another": lambda prompt_1T: [model.generate(prompt_1T, **sampled) for _ in range(DRAFTS)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(-1, repeats * len(prompts)):  # the first round warms up
        for name, run in ways.items():
            start = time.perf_counter()
            run(prompts[i % len(prompts)])
            seconds[name] += [time.perf_counter() - start] if i >= 0 else []
    costs = {
        name: statistics.median(s / plain for s, plain in zip(found, seconds["plain"], strict=True))
        for name, found in seconds.items()
    }
    return (
        f"{DRAFTS} drafts of {DRAFT_TOKENS} tokens cost {costs['superposed']:.2f} plain texts superposed, "
        f"{costs['sampled in one batch']:.2f} sampled in a batch, {costs['one after another']:.2f} one after another."
    )


def markdown(blocks: Mapping[str, Sequence[MethodResult]]) -> str:
    """One line for each method, with the blocks side by side."""
    head = "".join(f" {name}: tokens per pass | × plain |" for name in blocks)
    lines = [f"| |{head} same text |", "|---" * (2 * len(blocks) + 2) + "|"]
    for rows in zip(*blocks.values(), strict=True):
        figures = "|".join(f"{r.tokens_per_pass:.2f}|{ratio_cell(r, r.name)}" for r in rows)
        verdicts = dict.fromkeys(row.same_text for row in rows)
        lines.append(f"|{rows[0].name}|{figures}|{'; '.join(verdicts)}|")
    shares = "".join(f"{rows[0].repeated_4grams:.0%}| |" for rows in blocks.values())
    lines.append(f"|*share of repeated 4-grams*|{shares} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_benchmark(main)

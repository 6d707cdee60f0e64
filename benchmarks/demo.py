"""`make demo`: train grounded heads on the demo backbone, decode held-out prompts with them, compare, draw the report.

Nothing is downloaded. Training is the very command that a user types; decoding is measured in this process, all methods
side by side. Everything lands in the run's folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console

from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.checkpoint.schema import read_description
from heads.cli.folders import count_ngrams_command
from heads.evaluation.methods import GreedySettings, draft_model, dynamic, plain, prompt_lookup, tree
from heads.evaluation.pictures import draw_report
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine, measure, speed_table, write_json
from heads.evaluation.throughput import MethodResult
from heads.ngrams.table import NgramTable
from train.config import read_config
from train.run import explain_errors

README, README_PICTURE = Path("README.md"), Path("docs/demo_report.png")
MARKERS = ("<!-- demo: written by `python -m benchmarks.demo --readme`, never by hand -->", "<!-- /demo -->")
DYNAMO, NGRAMS = "checkpoints/demo/dynamo", Path("checkpoints/runs/demo-ngrams")
DRAFT = "checkpoints/demo/draft"
THRESHOLDS = (0.25, 0.5, 0.75)
TOP_K = 16  # candidates of each place: a decision over the paper's 50³ n-grams takes longer than this backbone's pass
SHIPPED = {"medusa, shipped": "checkpoints/demo/medusa", "grounded, shipped": "checkpoints/demo/grounded"}


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console()
    start = time.perf_counter()
    run = Path(read_config(["--config", options.config]).output_dir)
    for folder in (*SHIPPED.values(), DYNAMO):
        read_description(folder)  # what is missing is told before minutes are spent
    if not options.no_training:
        train(options.config, console)
    trained = time.perf_counter()
    rows, dynamo_rows = report(console, run, options)
    seconds = (f"training {trained - start:.0f} s, " if not options.no_training else "") + (
        f"decoding {time.perf_counter() - trained:.0f} s"
    )
    if options.readme:
        told = f"{describe_asked(options)}; {describe_cpu()}; {seconds}."
        write_readme(rows, dynamo_rows, run / "report.png", told, describe_dynamo(options))
    console.print(f"heads: {run / 'last'}\npicture: {run / 'report.png'}\n{seconds}", highlight=False, soft_wrap=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/demo/grounded.yaml", help="run to train (default: %(default)s)")
    parser.add_argument("--no-training", action="store_true", help="measure the heads of the last run again")
    parser.add_argument("--readme", action="store_true", help="write table and picture into README.md")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved repeats (default: %(default)s)")
    return parser


def train(config: str, console: Console) -> None:
    """Run the training command with the accelerate of this very environment; its output goes to the terminal.

    Raises:
        ValueError: accelerate is not installed, or the training failed.
    """
    accelerate = Path(sys.executable).parent / "accelerate"
    if not accelerate.exists():
        raise ValueError(f"There is no accelerate beside {sys.executable}; install the project's packages: make setup.")
    console.print(f"$ accelerate launch train.py --config {config}", highlight=False, style="bold")
    done = subprocess.run([accelerate, "launch", "train.py", "--config", config], check=False)
    if done.returncode != 0:
        raise ValueError(f"Training ended with exit code {done.returncode}; the reason stands above.")


def report(console: Console, run: Path, options: argparse.Namespace) -> tuple[list[MethodResult], list[MethodResult]]:
    """Decode, print the tables, write them as JSON and draw the picture."""
    names = ["grounded, just trained", *SHIPPED]
    opened = open_heads([run / "last", *SHIPPED.values()])
    opened = dataclasses.replace(opened, token_heads=dict(zip(names, opened.token_heads.values(), strict=True)))
    rows = decode(console, opened, options)
    same = all(row.same_text.startswith("yes") for row in rows)
    console.print(speed_table(rows, f"\n{describe_asked(options)}"))
    console.print(f"same text: {'yes' if same else 'no'}", highlight=False)
    dynamo_rows = decode_dynamo(console, options)
    console.print(speed_table(dynamo_rows, f"\nDynaMo on its own trained backbone; {describe_dynamo(options)}"))
    write_json(run / "decoding.json", {"greedy": rows, "dynamo": dynamo_rows}, opened.model.device)
    draw_report(run / "metrics.jsonl", rows, run / "report.png")
    return rows, dynamo_rows


def decode_dynamo(console: Console, options: argparse.Namespace) -> list[MethodResult]:
    """DynaMo's backbone was trained with its heads, so it has a plain row of its own; fewer and shorter texts."""
    opened = open_heads([DYNAMO])
    model, (token_heads,) = opened.model, opened.token_heads.values()
    request = GreedySettings(new_tokens=options.new_tokens // 2)
    table = open_ngrams(opened)
    dynamics = [
        dynamic(model, token_heads, request, f"dynamic decoding, ε_b {threshold:g}", threshold, table, TOP_K)
        for threshold in THRESHOLDS
    ]
    methods = [
        plain(model, request),
        tree(model, token_heads, request, "tree decoding, lossless"),
        tree(model, token_heads, request, "tree decoding, heads alone", lookup=0),
        *dynamics,
    ]
    prompts = default_prompts(opened.source, opened.tokenizer, max(1, options.prompts // 2))
    prompts = [prompt_1T.to(model.device) for prompt_1T in prompts]
    return measure(console, model, methods, request, prompts, 1, "decoding, dynamo")


def open_ngrams(opened: Opened) -> NgramTable:
    """The co-occurrence table of the demo corpus, counted where it is not there yet."""
    if not NGRAMS.is_dir():
        heldout = str(Path(opened.source) / "training.json")
        count_ngrams_command(opened.source, ["python-stdlib"], NGRAMS, heldout_list=heldout)
    return NgramTable.open(NGRAMS, opened.tokenizer)


def describe_dynamo(options: argparse.Namespace) -> str:
    return (
        f"{max(1, options.prompts // 2)} held-out prompts, {options.new_tokens // 2} new tokens, "
        f"the likeliest token, or the likeliest n-gram of {TOP_K} candidates a place"
    )


def describe_asked(options: argparse.Namespace) -> str:
    return f"{options.prompts} held-out prompts, {options.new_tokens} new tokens, greedy"


def describe_cpu() -> str:
    machine = describe_machine(torch.device("cpu"))
    return f"{machine['cpu']}, {machine['threads']} threads"


def decode(console: Console, opened: Opened, options: argparse.Namespace) -> list[MethodResult]:
    """All methods on held-out prompts; the last row again without lookup, so that copying is not taken for heads."""
    model, request = opened.model, GreedySettings(new_tokens=options.new_tokens)
    ours = [tree(model, token_heads, request, name) for name, token_heads in opened.token_heads.items()]
    name, token_heads = list(opened.token_heads.items())[-1]
    alone = tree(model, token_heads, request, f"{name}, heads alone", lookup=0)
    drafted = draft_model(model, open_draft_model(DRAFT), request, "adaptive")
    methods = [plain(model, request), prompt_lookup(model, request), drafted, *ours, alone]
    prompts = default_prompts(opened.source, opened.tokenizer, options.prompts)
    prompts = [prompt_1T.to(model.device) for prompt_1T in prompts]
    return measure(console, model, methods, request, prompts, options.repeats, "decoding")


def write_readme(
    rows: Sequence[MethodResult], dynamo_rows: Sequence[MethodResult], picture: Path, told: str, dynamo_told: str
) -> None:
    """Put the tables and the picture into the README, between its markers."""
    shutil.copyfile(picture, README_PICTURE)
    block = (
        f"{markdown(rows)}\n{told}\n\n![accuracy through training and speed]({README_PICTURE})\n\n"
        f"DynaMo heads, against plain decoding of the backbone that was trained with them ({dynamo_told}):\n\n"
        f"{markdown(dynamo_rows)}"
    )
    before, marker, rest = README.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not end:
        raise ValueError(f"README.md has lost the markers {MARKERS[0]} and {MARKERS[1]}; put them back.")
    README.write_text(f"{before}{marker}\n{block}{end}{after}", encoding="utf-8")


def markdown(rows: Sequence[MethodResult]) -> str:
    head = (
        "| | tokens per pass | tokens per second | ratio to plain | repeated 4-grams | same text |\n"
        + "|---" * 6
        + "|\n"
    )
    lines = [
        f"| {r.name} | {r.tokens_per_pass:.2f} | {r.tokens_per_second:.1f} | {r.ratio:.2f} | {r.repeated_4grams:.0%} | "
        f"{r.same_text} |\n"
        for r in rows
    ]
    return head + "".join(lines)


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    explain_errors(main)

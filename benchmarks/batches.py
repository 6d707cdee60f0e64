"""Tokens per second by batch size: `python -m benchmarks.batches`. Plain `generate` beside tree decoding, in one run.

Prompts of different length are padded on the left; rows accept different numbers of tokens and end at different places.
A pass over a batch of trees has batch x nodes rows of matrix products, so the tree that pays shrinks as the batch
grows: heads alone are shown with several node budgets, and the default decoder (with its looked-up chain) beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.consoles import wide_console
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import Request
from heads.evaluation.prompts import default_prompts
from heads.evaluation.report import PALETTE, save_figure, tidy
from heads.evaluation.tables import describe_machine, progress_bar, versions, write_json
from heads.evaluation.throughput import SameText, clock_of, describe_verdicts, rotated
from heads.opening import Opened, open_heads
from train.run import explain_errors

SHORTEST = 16  # tokens of the shortest prompt of a batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Left-padded prompts (B, T) and which of their tokens are real."""

    tokens_BT: Tensor
    mask_BT: Tensor

    def prompt(self, row: int) -> Tensor:
        """(1, T): one prompt without its padding."""
        return self.tokens_BT[row : row + 1, self.mask_BT[row].bool()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One method at one batch size.

    Attributes:
        ratio: tokens per second over plain generate's at the same batch size.
        tokens_per_pass: of a row that still runs.
    """

    name: str
    batch: int
    tokens_per_second: float
    ratio: float
    tokens_per_pass: float
    same_text: str


Run = Callable[[Batch], tuple[list[list[int]], float]]
"""Each row's new tokens, and tokens per pass of a row."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads([options.heads])
    request = Request(new_tokens=options.new_tokens)
    machine, found = describe_machine(opened.model.device), versions()
    console.print(
        f"{opened.source} with {options.heads}, prompts of {SHORTEST} to {options.prompt_tokens} tokens, "
        f"{options.new_tokens} new tokens at most, medians of {options.repeats} repeats\n"
        f"{machine['cpu']}, {machine['threads']} threads, device {machine['device']}, torch {found['torch']}",
        highlight=False,
        soft_wrap=True,
    )
    prompts = default_prompts(opened.source, opened.tokenizer, max(options.batches), options.prompt_tokens)
    rows = [row for n in options.batches for row in measure_batch(console, opened, request, prompts[:n], options)]
    console.print(table(rows))
    if options.json:
        write_json(options.json, {"batches": rows}, opened.model.device, options=vars(options))  # type: ignore[dict-item]
    if options.picture:
        draw(rows, options.picture)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="batch sizes")
    parser.add_argument("--trees", type=int, nargs="+", default=[2, 4, 8], help="node budgets of heads alone")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of the longest prompt (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=96, help="new tokens of each row at most (default: 96)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write rows, machine, versions and command here")
    parser.add_argument("--picture", metavar="FILE", help="draw tokens per second by batch size here, as PNG")
    return parser


def make_batch(prompts: Sequence[Tensor], device: torch.device) -> Batch:
    """Prompts cut to lengths from `SHORTEST` to their own, spread evenly."""
    size, longest = len(prompts), prompts[0].shape[1]
    step = (longest - SHORTEST) / max(1, size - 1)
    tokens_BT, mask_BT = torch.zeros(2, size, longest, dtype=torch.long, device=device)
    for b, prompt_1T in enumerate(prompts):
        length = longest - round(b * step)
        tokens_BT[b, -length:], mask_BT[b, -length:] = prompt_1T[0, :length], 1
    return Batch(tokens_BT=tokens_BT, mask_BT=mask_BT)


def measure_batch(
    console: Console, opened: Opened, request: Request, prompts: Sequence[Tensor], options: argparse.Namespace
) -> list[BatchRow]:
    """All methods on one batch, interleaved; the first one is plain generate."""
    batch, size = make_batch(prompts, opened.model.device), len(prompts)
    methods = build_methods(opened, request, options.trees)
    clock, names = clock_of(opened.model.device), list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results = {name: methods[name](batch) for name in names}  # warm-up
    with progress_bar(console, f"batch {size}", len(names) * options.repeats) as advance:
        for repeat in range(options.repeats):
            for name in rotated(names, repeat):
                start = clock()
                methods[name](batch)
                seconds[name].append(clock() - start)
                advance()
    speeds = {n: sum(map(len, results[n][0])) / statistics.median(seconds[n]) for n in names}
    verdict = SameText(model=opened.model, request=request)
    plain_texts = results[names[0]][0]
    return [
        BatchRow(
            name=name,
            batch=size,
            tokens_per_second=speeds[name],
            ratio=speeds[name] / speeds[names[0]],
            tokens_per_pass=results[name][1],
            same_text=describe_verdicts(
                [verdict(batch.prompt(b), plain_texts[b], text) for b, text in enumerate(results[name][0])]
            ),
        )
        for name in names
    ]


def build_methods(opened: Opened, request: Request, trees: Sequence[int]) -> dict[str, Run]:
    (token_heads,) = opened.token_heads.values()
    decodings: dict[str, Any] = {"plain": None, "default": TreeDecoding(token_heads)}
    decodings |= {f"heads alone, {nodes} nodes": TreeDecoding(token_heads, nodes, lookup=0) for nodes in trees}
    return {name: runner(opened, request, decoding) for name, decoding in decodings.items()}


def runner(opened: Opened, request: Request, decoding: Any) -> Run:
    def run(batch: Batch) -> tuple[list[list[int]], float]:
        asked = {"attention_mask": batch.mask_BT, "max_new_tokens": request.new_tokens, "do_sample": False}
        out = opened.model.generate(batch.tokens_BT, custom_generate=decoding, return_dict_in_generate=True, **asked)
        new = out.sequences[:, batch.tokens_BT.shape[1] :].tolist()
        if decoding is None:
            return [until_end(row, opened) for row in new], 1.0
        texts = [row[: len(drafted)] for row, drafted in zip(new, out.stats.drafted, strict=True)]
        return texts, out.stats.tokens_per_pass

    return run


def until_end(tokens: list[int], opened: Opened) -> list[int]:
    """Plain generate fills rows that ended up to the longest: padding is no text."""
    named = opened.model.generation_config.eos_token_id
    ends = [] if named is None else named if isinstance(named, list) else [named]
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]


def table(rows: Sequence[BatchRow]) -> Table:
    columns = ("batch", "tokens\nper s", "ratio\nto plain", "tokens\nper pass")
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right")
    shown.add_column("same text")
    for row in rows:
        figures = (f"{row.tokens_per_second:.1f}", f"{row.ratio:.2f}", f"{row.tokens_per_pass:.2f}")
        shown.add_row(row.name, str(row.batch), *figures, row.same_text)
    return shown


def draw(rows: Sequence[BatchRow], path: str) -> None:
    """Tokens per second against the batch size, a line for each method."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(row.name for row in rows)):
        mine = [row for row in rows if row.name == name]
        color = PALETTE[i % len(PALETTE)]
        axes.plot([r.batch for r in mine], [r.tokens_per_second for r in mine], "o-", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes := sorted({row.batch for row in rows}), [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes, "tokens per second", "rows in the batch")
    save_figure(figure, path)


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()  # ours are enough
    explain_errors(main)

"""Tokens per second by batch size: `python -m benchmarks.speed.batches`. Plain `generate` beside trees, in one run.

The same prompts are decoded in batches of one, two and so on, with a repetition penalty (without it a small model's
text loops, and copying a loop shows nothing about speed). Prompt lengths differ, so batches are padded on the left;
rows accept different numbers of tokens and end at different places. A pass over a batch of trees computes batch × nodes
rows, so the best tree is smaller in larger batches. Hence heads alone are measured with several node budgets, and then
heads with lookup beside lookup without heads.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shared import (
    add_file_flags,
    describe_cpu,
    figures_table,
    held_out,
    parser_of,
    run_benchmark,
    say,
    wide_console,
)
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.static import Tree
from heads.evaluation.methods import LOOKUP_ALONE, GreedySettings
from heads.evaluation.pictures import PALETTE, save_figure, tidy
from heads.evaluation.same_text import SameText
from heads.evaluation.tables import describe_machine, progress_bar, versions, write_json
from heads.evaluation.throughput import clock_of, describe_verdicts, ratio_interval, ratios, rotated

SHORTEST = 16  # tokens of the shortest prompt
LENGTHS = 4  # different ones, one after the other: any four neighbours have them all


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
        batch: rows that are decoded together; all prompts are decoded, this many at a time.
        ratio: tokens per second divided by plain generate's at the same batch size, the median over the repeats;
            `ratio_low` and `ratio_high` are its range over them.
        interval: 95 % interval of the ratio, by a paired bootstrap over the batches; None for a single batch.
        tokens_per_pass: mean over the rows that have not ended.
    """

    name: str
    batch: int
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    interval: tuple[float, float] | None
    tokens_per_pass: float
    same_text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """A batch's new tokens by row, and the number of passes that its rows took before they ended."""

    texts: list[list[int]]
    row_passes: int


Run = Callable[[Batch], Decoded]
Figures = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Tokens of each batch (B,), and its seconds in each repeat (B, R)."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads([options.heads])
    request = GreedySettings(new_tokens=options.new_tokens, repetition_penalty=options.repetition_penalty)
    machine, found = describe_machine(opened.model.device), versions()
    say(
        console,
        f"{opened.source} with {options.heads}, prompts of {SHORTEST} to {options.prompt_tokens} tokens, "
        f"{options.new_tokens} new tokens at most, greedy, repetition penalty {options.repetition_penalty}, "
        f"medians of {options.repeats} repeats\n"
        f"{describe_cpu()}, device {machine['device']}, torch {found['torch']}",
    )
    prompts = held_out(opened, options.prompts, options.prompt_tokens)
    prompts = [cut_prompt(i, prompt_1T) for i, prompt_1T in enumerate(prompts)]
    rows = [row for n in options.batches for row in measure_size(console, opened, request, prompts, n, options)]
    console.print(table(rows))
    if options.json:
        write_json(options.json, {"batches": rows}, opened.model.device, options=vars(options))  # type: ignore[dict-item]
    if options.picture:
        draw(rows, options.picture)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.batches", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="batch sizes")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts, all for each size")
    parser.add_argument("--trees", type=int, nargs="+", default=[2, 4, 8], help="node budgets of heads alone")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="new tokens of each row at most")
    parser.add_argument("--repetition-penalty", type=float, default=1.1, help="1 is none")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats")
    add_file_flags(parser, picture="tokens per second by batch size")
    return parser


def cut_prompt(i: int, prompt_1T: Tensor) -> Tensor:
    """Prompt i, cut to one of `LENGTHS` lengths from `SHORTEST` to its whole length, which prompts have in turn."""
    step = (prompt_1T.shape[1] - SHORTEST) / (LENGTHS - 1)
    return prompt_1T[:, : prompt_1T.shape[1] - round(i % LENGTHS * step)]


def make_batch(prompts: Sequence[Tensor]) -> Batch:
    longest = max(prompt_1T.shape[1] for prompt_1T in prompts)
    tokens_BT, mask_BT = torch.zeros(2, len(prompts), longest, dtype=torch.long, device=prompts[0].device)
    for b, prompt_1T in enumerate(prompts):
        tokens_BT[b, -prompt_1T.shape[1] :], mask_BT[b, -prompt_1T.shape[1] :] = prompt_1T[0], 1
    return Batch(tokens_BT=tokens_BT, mask_BT=mask_BT)


def measure_size(
    console: Console,
    opened: Opened,
    request: GreedySettings,
    prompts: Sequence[Tensor],
    size: int,
    options: argparse.Namespace,
) -> list[BatchRow]:
    """All methods on all prompts, `size` together; the first method is plain generate."""
    batches = [make_batch(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    methods = build_methods(opened, request, options.trees)
    with progress_bar(console, f"batch {size}", len(methods) * (options.repeats + 1)) as advance:
        results, seconds = time_methods(methods, batches, clock_of(opened.model.device), options.repeats, advance)
    plain, verdict = next(iter(methods)), SameText(model=opened.model, settings=request)
    figures = {name: (tokens_of(results[name]), np.array(seconds[name])) for name in methods}
    ratios_R = {name: ratios(*figures[name], *figures[plain], np.ones(len(batches))) for name in methods}
    return [
        BatchRow(
            name=name,
            batch=size,
            tokens_per_second=float(np.median(tokens_B.sum() / seconds_BR.sum(axis=0))),
            ratio=float(np.median(ratios_R[name])),
            ratio_low=float(ratios_R[name].min()),
            ratio_high=float(ratios_R[name].max()),
            interval=interval_over_batches(figures[name], figures[plain]),
            tokens_per_pass=float(tokens_B.sum()) / sum(decoded.row_passes for decoded in results[name]),
            same_text=compare(verdict, batches, results[plain], results[name]),
        )
        for name, (tokens_B, seconds_BR) in figures.items()
    ]


def interval_over_batches(ours: Figures, plain: Figures) -> tuple[float, float] | None:
    """`ratio_interval` with batches in place of prompts.

    >>> tokens, seconds = np.array([8.0, 8.0]), np.array([[4.0], [4.0]])
    >>> interval_over_batches((tokens, seconds / 2), (tokens, seconds))
    (2.0, 2.0)
    >>> interval_over_batches((tokens[:1], seconds[:1]), (tokens[:1], seconds[:1]))
    """
    return ratio_interval(*ours, *plain, np.random.default_rng(0)) if len(ours[0]) > 1 else None


def time_methods(
    methods: Mapping[str, Run],
    batches: Sequence[Batch],
    clock: Callable[[], float],
    repeats: int,
    advance: Callable[[], None],
) -> tuple[dict[str, list[Decoded]], dict[str, list[list[float]]]]:
    """Each method's output for all batches, and its seconds for each in every repeat; repeats are interleaved."""
    results: dict[str, list[Decoded]] = {}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in methods}
    for repeat in range(-1, repeats):  # the first round warms up
        for name in rotated(list(methods), max(repeat, 0)):
            results[name] = []
            for batch, spent in zip(batches, seconds[name], strict=True):
                start = clock()
                results[name].append(methods[name](batch))
                if repeat >= 0:
                    spent.append(clock() - start)
            advance()
    return results, seconds


def tokens_of(found: Sequence[Decoded]) -> NDArray[np.float64]:
    """New tokens of each batch (B,)."""
    return np.array([sum(map(len, decoded.texts)) for decoded in found], dtype=np.float64)


def compare(verdict: SameText, batches: Sequence[Batch], plain: Sequence[Decoded], ours: Sequence[Decoded]) -> str:
    """Compare all batches row by row; `verdict` decides whether rounding explains a difference."""
    return describe_verdicts(
        [
            verdict(batch.prompt(b), plain_text, text)
            for batch, expected, found in zip(batches, plain, ours, strict=True)
            for b, (plain_text, text) in enumerate(zip(expected.texts, found.texts, strict=True))
        ]
    )


def build_methods(opened: Opened, request: GreedySettings, trees: Sequence[int]) -> dict[str, Run]:
    (token_heads,) = opened.token_heads.values()
    decodings: dict[str, Any] = {"plain": None}
    decodings |= {f"heads alone, {nodes} nodes": TreeDecoding(token_heads, nodes, lookup=0) for nodes in trees}
    decodings[LOOKUP_ALONE] = TreeDecoding(token_heads, Tree.root_only(), lookup=DEFAULT_LOOKUP)
    decodings["heads with lookup"] = TreeDecoding(token_heads, lookup=DEFAULT_LOOKUP)
    return {name: runner(opened, request, decoding) for name, decoding in decodings.items()}


def runner(opened: Opened, request: GreedySettings, decoding: Any) -> Run:
    def run(batch: Batch) -> Decoded:
        out = opened.model.generate(
            batch.tokens_BT,
            attention_mask=batch.mask_BT,
            custom_generate=decoding,
            return_dict_in_generate=True,
            max_new_tokens=request.new_tokens,
            do_sample=False,
            repetition_penalty=request.repetition_penalty,
        )
        new = out.sequences[:, batch.tokens_BT.shape[1] :].tolist()
        if decoding is None:
            texts = [until_end(row, opened) for row in new]
            return Decoded(texts=texts, row_passes=sum(map(len, texts)))
        texts = [row[: len(drafted)] for row, drafted in zip(new, out.stats.drafted, strict=True)]
        return Decoded(texts=texts, row_passes=out.stats.row_passes)

    return run


def until_end(tokens: list[int], opened: Opened) -> list[int]:
    """A row up to its end token, without what plain generate pads it with."""
    named = opened.model.generation_config.eos_token_id
    ends = [] if named is None else named if isinstance(named, list) else [named]
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]


def table(rows: Sequence[BatchRow]) -> Table:
    columns = ("batch", "tokens\nper s", "ratio\nto plain", "its 95 %\ninterval", "its\nrange", "tokens\nper pass")
    shown = figures_table(None, "method", *columns)
    shown.add_column("same text")
    for row in rows:
        spread = f"{row.ratio_low:.2f}–{row.ratio_high:.2f}"
        interval = "–" if row.interval is None else "{:.2f}–{:.2f}".format(*row.interval)
        figures = (f"{row.tokens_per_second:.1f}", f"{row.ratio:.2f}", interval, spread, f"{row.tokens_per_pass:.2f}")
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
    run_benchmark(main)

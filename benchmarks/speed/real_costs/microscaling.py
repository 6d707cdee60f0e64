"""Speculation and MX weights, alone and together: `python -m benchmarks.speed.real_costs.microscaling`.

The setting is that of *Speculative sampling and microscaling formats*, figures 7 and 8: batch 1, a draft model at 16
bits that drafts K = 7 tokens, a target at 16 bits and in MXFP6. Added are MXFP4, float32, and grounded heads alone. The
target is the demo's backbone widened to a larger shape (wide_backbone.py). All methods decode the same prompts in turn,
in one run, and each text is compared with plain generation's on the same weights.

The weights of 0.96B take about 8 GiB in all; --quick, at 0.16B, takes 2 minutes on one busy thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.shared import (
    describe_cpu,
    figures_table,
    held_out,
    parse_with_defaults_of,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    write_figures,
)
from benchmarks.speed.real_costs.cells import BEST
from benchmarks.speed.real_costs.shapes import SHAPES, what_stops
from benchmarks.speed.real_costs.wide_heads import widen_heads
from benchmarks.speed.real_costs.widened import open_widened
from heads.backbone.model import Backbone
from heads.checkpoint.opening import Opened, open_draft_model
from heads.evaluation.lossy.rounded_weights import linear_layers
from heads.evaluation.methods import GreedySettings, Method, Outcome, draft_model, plain, tree
from heads.evaluation.pictures import new_figure, save_figure, tidy
from heads.evaluation.same_text import Float32Judge, SameText
from heads.evaluation.tables import progress_bar
from heads.evaluation.throughput import MethodResult, clock_of, compare, count_runs, describe_verdicts
from heads.interface.token_heads import TokenHeads
from heads.quantization.formats import FORMATS, find_format
from heads.quantization.linear import MXLinear

FIRST, DENSE = "bfloat16", ("bfloat16", "float32")
PLAIN, DRAFT, HEADS = "plain", "draft model", "heads"
QUICK: dict[str, Any] = {"shape": "0.16B", "prompts": 3, "new_tokens": 24}
Texts = dict[tuple[str, int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The backbone with one kind of weights, and heads on it; `judge` is the same function in float32, or None.

    `judge` gives the scores by which differences of 16-bit texts are explained.
    """

    kind: str
    model: Any
    token_heads: TokenHeads
    judge: Any

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one kind of weights; ratios are to plain 16-bit generation, and to plain on the same weights."""

    weights: str
    method: str
    mebibytes: float
    tokens_per_pass: float
    tokens_per_second: float
    ratio: float
    interval: tuple[float, float]
    to_own_plain: float
    same_text: str


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_with_defaults_of("quick", QUICK, build_parser(), arguments)
    console, shape = wide_console(), SHAPES[options.shape]
    if reason := what_stops(shape, torch.float32, torch.device("cpu")):
        raise ValueError(f"--shape {options.shape} does not fit: {reason}; give a smaller one of {', '.join(SHAPES)}.")
    narrow, targets = open_targets(options.shape, options.formats)
    settings = GreedySettings(new_tokens=options.new_tokens)
    prompts, draft = held_out(narrow, options.prompts), open_draft_model("checkpoints/demo/draft", "bfloat16")
    rows = measure(console, targets, draft, prompts, settings, options.k)
    show(console, f"{options.shape}, batch 1, {len(prompts)} prompts, {options.new_tokens} new tokens", rows)
    say(console, f"{describe_cpu()}; the draft model in bfloat16, k = {options.k}; heads: {BEST} alone")
    describe_product(console, rows)
    write_figures(options.json, [asdict(row) for row in rows])
    if options.picture:
        draw(rows, options.picture)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.real_costs.microscaling", __doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.96B", help="of the target")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["mxfp6_e2m3", "mxfp4_e2m1"])
    parser.add_argument("--k", type=int, default=7, help="tokens that the draft model proposes for each pass")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=32, help="for each prompt")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--picture", help="PNG file of tokens a second")
    parser.add_argument("--quick", action="store_true", help=f"a share of all this: {QUICK}")
    return parser


def open_targets(shape: str, formats: Sequence[str]) -> tuple[Opened, list[Target]]:
    """The demo as it is, and targets in bfloat16, in float32, and with packed weights and 16-bit activations."""
    targets: list[Target] = []
    for kind in DENSE:
        widened = open_widened([BEST], SHAPES[shape], getattr(torch, kind))
        judge = widened.narrow.model if kind == FIRST else None
        targets.append(Target(kind=kind, model=widened.model, token_heads=widened.token_heads[BEST], judge=judge))
    for format in formats:
        model = packed_copy(targets[0].model, format)
        token_heads = widen_heads(widened.narrow.token_heads[BEST], Backbone(model))
        targets.append(Target(kind=format, model=model, token_heads=token_heads, judge=None))
    return widened.narrow, targets


def packed_copy(model: Any, format: str) -> Any:
    """The model with its linear layers packed; all else is shared."""
    packed = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    names = {id(layer): name for name, layer in packed.named_modules()}
    for layer in list(linear_layers(packed)):
        packed.set_submodule(names[id(layer)], MXLinear.of(layer, find_format(format)))
    return packed


def measure(
    console: Console, targets: Sequence[Target], draft: Any, prompts: Sequence[Tensor], settings: GreedySettings, k: int
) -> list[Row]:
    """All methods on all targets in turn; the first is plain 16-bit generation."""
    texts: Texts = {}
    methods = [
        recorded(method, f"{target.kind}/{name}", prompts, texts)
        for target in targets
        for name, method in (
            (PLAIN, plain(target.model, settings)),
            (DRAFT, draft_model(target.model, draft, settings, k)),
            (HEADS, tree(target.model, target.token_heads, settings, HEADS, lookup=0, compile=False)),
        )
    ]
    with progress_bar(console, "measuring", count_runs(methods, prompts, 1)) as advance:
        found = compare(
            methods, prompts, repeats=1, verdict=nothing_promised, clock=clock_of(torch.device("cpu")), advance=advance
        )
    by_name = {result.name: result for result in found}
    return [
        row_of(target, name, by_name, same_text(target, name, prompts, texts, settings))
        for target in targets
        for name in (PLAIN, DRAFT, HEADS)
    ]


def recorded(method: Method, name: str, prompts: Sequence[Tensor], texts: Texts) -> Method:
    """The method under another name, whose texts are put into `texts` and not compared with those of other weights."""
    numbers = {id(prompt): number for number, prompt in enumerate(prompts)}

    def run(prompt_1T: Tensor) -> Outcome:
        outcome = method.run(prompt_1T)
        texts[name, numbers[id(prompt_1T)]] = outcome.tokens
        return outcome

    return replace(method, name=name, run=run, promises="lossy")


def nothing_promised(*_: Any) -> Any:
    raise AssertionError("texts on different weights are not compared")


def same_text(target: Target, name: str, prompts: Sequence[Tensor], texts: Texts, settings: GreedySettings) -> str:
    """Whether a method wrote plain generation's texts on the same weights, up to rounding, in words."""
    judge = None
    if target.model.dtype != torch.float32:
        judge = Float32Judge(model=target.model, settings=settings)
        judge._copy = None if target.judge is None else copy.copy(target.judge)
    same = SameText(model=target.model, settings=settings, float32=judge)
    return describe_verdicts(
        [
            same(prompt_1T, texts[f"{target.kind}/{PLAIN}", i], texts[f"{target.kind}/{name}", i])
            for i, prompt_1T in enumerate(prompts)
        ]
    )


def row_of(target: Target, name: str, found: dict[str, MethodResult], same: str) -> Row:
    result, own = found[f"{target.kind}/{name}"], found[f"{target.kind}/{PLAIN}"]
    return Row(
        weights=target.kind,
        method=name,
        mebibytes=target.weight_bytes / 2**20,
        tokens_per_pass=result.tokens_per_pass,
        tokens_per_second=result.tokens_per_second,
        ratio=result.ratio,
        interval=result.interval,
        to_own_plain=result.ratio / own.ratio,
        same_text=same,
    )


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    columns = ("MiB", "tokens/pass", "tokens/s", "× plain 16-bit", "95 %", "× own plain", "same text")
    table = figures_table(title, "weights", "method", *columns, left=2)
    for row in rows:
        low, high = row.interval
        table.add_row(
            row.weights,
            row.method,
            f"{row.mebibytes:,.0f}",
            f"{row.tokens_per_pass:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row.to_own_plain:.2f}",
            row.same_text,
        )
    console.print(table)


def describe_product(console: Console, rows: Sequence[Row]) -> None:
    """Print what speculation and packed weights gain each, together, and multiplied; the paper has about 4 × together.

    On a processor without bfloat16 products plain float32 is faster than plain 16-bit generation, and ratios to the
    latter would flatter; so the ratio to the faster of the two comes first.
    """
    ratios = {(row.weights, row.method): row.ratio for row in rows}
    fastest = max(DENSE, key=lambda kind: ratios[kind, PLAIN])
    for weights in dict.fromkeys(row.weights for row in rows if row.weights not in DENSE):
        for method in (DRAFT, HEADS):
            alone, packed = ratios[FIRST, method], ratios[weights, PLAIN]
            say(
                console,
                f"{weights} with {method}: {ratios[weights, method] / ratios[fastest, PLAIN]:.2f} × the faster plain, "
                f"{fastest}; {ratios[weights, method]:.2f} × plain 16-bit, alone {packed:.2f} and {alone:.2f}, "
                f"whose product is {packed * alone:.2f} (the paper: about 4)",
            )


def draw(rows: Sequence[Row], path: str) -> None:
    """Tokens a second: for each kind of weights a group of bars."""
    kinds = list(dict.fromkeys(row.weights for row in rows))
    figure = new_figure(7.0, 3.4)
    axes = figure.subplots()
    for i, method in enumerate((PLAIN, DRAFT, HEADS)):
        speeds = [row.tokens_per_second for row in rows if row.method == method]
        axes.bar([at + 0.27 * (i - 1) for at in range(len(kinds))], speeds, width=0.25, label=method)
    axes.set_xticks(range(len(kinds)), kinds)
    tidy(axes, "tokens a second, batch 1", "weights of the target")
    axes.legend(fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    run_benchmark(main)

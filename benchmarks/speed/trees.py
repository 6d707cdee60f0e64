"""Trees fitted to heads and machine: `python -m benchmarks.speed.trees`. Predicted beside measured speed, in one run.

For each folder of heads a tree is tuned on one half of held-out prompts. The other half is decoded with plain
`generate`, with the default, the best static and the best dynamic tree of the heads alone, with prompt lookup and the
tree fitted for it, and with prompt lookup without heads, of which nothing is predicted. Then the halves swap and both
results are pooled. If the texts of one half repeat themselves more than the other's, one prediction is too high and the
other too low, which pooling cancels; the table also has each half's deviation. Predictions and measurements leave out
the prompts' passes. Finally the heads that were fastest alone are tuned for a batch of 16, which leaves a
pass little room.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shared import (
    ON_BASE,
    figures_table,
    held_out,
    or_dash,
    parser_of,
    run_benchmark,
    say,
    shipped,
    wide_console,
    write_figures,
)
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.defaults import default_nodes
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.static import TYPICAL_ACCURACY, Tree, grow_tree
from heads.evaluation.methods import LOOKUP_ALONE
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import clock_of, ratio_interval
from heads.interface.token_heads import TokenHeads
from heads.tuning.config import TuneConfig
from heads.tuning.decoding_speed import BatchTotals, Speed, measure_batches
from heads.tuning.report import describe, describe_heads, verdict
from heads.tuning.search import Choice, choice_of
from heads.tuning.tree_with_lookup import TreeWithLookup
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import Tuning

ALLOWED = 0.10
BESIDE = "tuned beside lookup"
UNPREDICTED = Speed(tokens_per_pass=math.nan, tokens_per_second=math.nan)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One decoding: what was predicted on one half of the prompts and measured on the other.

    Attributes:
        halves: the two lines that this one pools; empty in a line of one half.
        rounds: what was measured, round by round, and plain generation's beside it; the pooled line has none.
    """

    heads: str
    decoding: str
    tree: str
    predicted: Speed
    measured: Speed
    plain_predicted: float
    plain_measured: float
    halves: tuple[Line, ...] = ()
    rounds: tuple[tuple[BatchTotals, BatchTotals], ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the measured ratio to plain generation, by a paired bootstrap over prompts."""
        parts = [half.rounds for half in self.halves or (self,)]
        if not all(parts):
            return None
        ours, plain = ([[pair[i] for pair in rounds] for rounds in parts] for i in (0, 1))
        return ratio_interval(*join(ours), *join(plain), np.random.default_rng(0))

    @property
    def deviation(self) -> float:
        """The relative deviation of predicted from measured tokens per second."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1

    @property
    def ratio_deviation(self) -> float:
        """The same for ratios to plain generation, which do not depend on changes of the machine's speed."""
        return (1 + self.deviation) * self.plain_measured / self.plain_predicted - 1


def join(parts: Sequence[Sequence[BatchTotals]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens of each prompt (P,) and its seconds in each round (P, R), of all parts' rounds."""
    tokens_P = np.concatenate([np.array(rounds[0].tokens) for rounds in parts])
    return tokens_P, np.concatenate([np.array([one.seconds for one in rounds]).T for rounds in parts])


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads(options.heads)
    prompts = held_out(opened, 2 * options.prompts, options.prompt_tokens)
    lines: list[Line] = []
    for name, token_heads in opened.token_heads.items():
        config = TuneConfig(
            new_tokens=options.new_tokens,
            repeats=options.repeats,
            checked_prompts=options.prompts,
            repetition_penalty=options.repetition_penalty,
        )
        halves = []
        for fitted, other in ((prompts[0::2], prompts[1::2]), (prompts[1::2], prompts[0::2])):
            tuning = tune(token_heads, fitted, config, clock=clock_of(opened.model.device))
            say_choice(console, name, tuning)
            halves.append(compare(name, opened, token_heads, tuning, other, options.rounds))
            for line in halves[-1]:
                say(console, f"  {line.decoding}: {line.tree}")
        lines += pool(*halves)
    console.print(lines_table(lines))
    alone = [line for line in lines if line.decoding not in (BESIDE, LOOKUP_ALONE)]
    for what, ours in (
        ("heads alone", alone),
        ("with a looked-up chain", [line for line in lines if line.decoding == BESIDE]),
    ):
        if ours:
            say_worst(console, what, ours)
    fastest = max(alone, key=lambda line: line.measured.tokens_per_second).heads
    say_large_batch(console, fastest, opened.token_heads[fastest], prompts[0::2], options)
    if options.json:
        found = [
            dataclasses.asdict(line)
            | {"interval": line.interval}
            | {"deviation": line.deviation, "ratio_deviation": line.ratio_deviation}
            | {"ratio_deviation_of_halves": [half.ratio_deviation for half in line.halves]}
            for line in lines
        ]
        machine = {"machine": describe_machine(opened.model.device), "versions": versions()}
        write_figures(options.json, {"lines": found, **machine})


def say_choice(console: Console, name: str, tuning: Tuning) -> None:
    """Print the chosen tree, and for each head the node budget from which on it pays on these prompts."""
    say(console, f"{name}: {verdict(tuning)}")
    say(console, f"  {describe_heads(tuning)}")


def pool(first: Sequence[Line], second: Sequence[Line]) -> list[Line]:
    """Pool the two halves of each decoding that both have; tokens a second are averaged by the harmonic mean.

    That is the rate over both halves if they have equally many tokens.
    """
    by_name = {line.decoding: line for line in second}
    return [
        Line(
            heads=one.heads,
            decoding=one.decoding,
            tree=one.tree if one.tree == other.tree else f"{one.tree}; {other.tree}",
            predicted=pool_speeds(one.predicted, other.predicted),
            measured=pool_speeds(one.measured, other.measured),
            plain_predicted=statistics.harmonic_mean([one.plain_predicted, other.plain_predicted]),
            plain_measured=statistics.harmonic_mean([one.plain_measured, other.plain_measured]),
            halves=(one, other),
        )
        for one in first
        if (other := by_name.get(one.decoding)) is not None
    ]


def pool_speeds(one: Speed, other: Speed) -> Speed:
    """
    >>> pool_speeds(Speed(tokens_per_pass=2, tokens_per_second=60), Speed(tokens_per_pass=2, tokens_per_second=120))
    Speed(tokens_per_pass=2.0, tokens_per_second=80.0)
    """
    return Speed(
        tokens_per_pass=statistics.harmonic_mean([one.tokens_per_pass, other.tokens_per_pass]),
        tokens_per_second=statistics.harmonic_mean([one.tokens_per_second, other.tokens_per_second]),
    )


def say_worst(console: Console, what: str, lines: Sequence[Line]) -> None:
    """Print the worst deviation of the ratio to plain generation, which does not depend on the machine's speed."""
    worst = max(lines, key=lambda line: abs(line.ratio_deviation))
    within = "yes" if abs(worst.ratio_deviation) <= ALLOWED else "no"
    drifts = [half.plain_measured / half.plain_predicted - 1 for line in lines for half in line.halves or (line,)]
    say(
        console,
        f"{what}: speed over plain generation predicted within {ALLOWED:.0%} of measured: {within} (worst: "
        f"{worst.heads}, {worst.decoding}, {worst.ratio_deviation:+.1%}); between the two plain generation itself "
        f"changed its speed by {min(drifts):+.1%} to {max(drifts):+.1%}",
    )


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.trees", __doc__)
    parser.add_argument(
        "--heads",
        nargs="+",
        default=shipped(*ON_BASE),
        help="folders of heads on one backbone; those that are fastest alone are tuned for the large batch too",
    )
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts of either half")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.1,
        help="without one small models' texts loop, some at once and some late, and copying them is no prediction ",
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds of timing while tuning")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of measuring, medians count")
    parser.add_argument("--batch", type=int, default=16, help="the large batch; 0 leaves it out")
    parser.add_argument("--json", metavar="FILE", help="write lines, machine and versions here")
    return parser


def compare(
    name: str, opened: Opened, token_heads: TokenHeads, tuning: Tuning, prompts: Sequence[Tensor], rounds: int
) -> list[Line]:
    """Decode prompts that were not used for tuning; one line for each tree."""
    trees: dict[str, Choice | TreeWithLookup] = {"default tree": default_choice(token_heads, tuning)}
    trees |= {f"tuned {kind}": choice for kind, choice in tuning.finalists.items()}
    if tuning.with_lookup is not None:
        trees[BESIDE] = tuning.with_lookup
    decodings: dict[str, TreeDecoding | None] = {"plain": None}
    for what, choice in trees.items():
        tree, lookup = (choice.choice.tree, DEFAULT_LOOKUP) if isinstance(choice, TreeWithLookup) else (choice.tree, 0)
        decodings[what] = TreeDecoding(token_heads, tree, lookup=lookup)
    decodings[LOOKUP_ALONE] = TreeDecoding(token_heads, Tree.root_only(), lookup=DEFAULT_LOOKUP)
    clock = clock_of(opened.model.device)
    found = [measure_batches(opened.model, decodings, prompts, tuning.config, clock) for _ in range(rounds)]
    measured = {what: median_speed([one[what].speed for one in found]) for what in decodings}
    by_round = {what: tuple((one[what], one["plain"]) for one in found) for what in decodings}
    lines = [
        Line(
            heads=name,
            decoding=what,
            tree=describe(choice.choice.tree if isinstance(choice, TreeWithLookup) else choice.tree),
            predicted=Speed(tokens_per_pass=choice.tokens_per_pass, tokens_per_second=choice.tokens_per_second),
            measured=measured[what],
            plain_predicted=tuning.plain,
            plain_measured=measured["plain"].tokens_per_second,
            rounds=by_round[what],
        )
        for what, choice in trees.items()
    ]
    copied = dataclasses.replace(
        lines[0],
        decoding=LOOKUP_ALONE,
        tree="none",
        predicted=UNPREDICTED,
        measured=measured[LOOKUP_ALONE],
        rounds=by_round[LOOKUP_ALONE],
    )
    return [*lines, copied]


def default_choice(token_heads: TokenHeads, tuning: Tuning) -> Choice:
    """The tree that heads decode with before tuning, with its predicted times."""
    nodes, accuracy = default_nodes(token_heads.backbone.device), token_heads.measured_accuracy or TYPICAL_ACCURACY
    times = tuning.times.scaled(tuning.calibration)
    return choice_of(grow_tree(nodes, token_heads.num_heads, accuracy), tuning.replays, times)


def median_speed(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        tokens_per_pass=statistics.median(speed.tokens_per_pass for speed in speeds),
        tokens_per_second=statistics.median(speed.tokens_per_second for speed in speeds),
    )


def lines_table(lines: Sequence[Line]) -> Table:
    title = (
        "\npredicted on one half of the prompts, measured on the other, both ways; greedy with a repetition penalty;\n"
        "the last columns: the ratio's deviation where the first half was fitted, and where the second was"
    )
    table = figures_table(title, "heads\n", "tree\n", left=2)
    for what in ("tokens\nper pass", "tokens\nper s", "ratio\nto plain"):
        table.add_column(what, justify="right")
        table.add_column("mea-\nsured", justify="right")
        if "pass" not in what:
            table.add_column("devi-\nation", justify="right")
    table.add_column("95 % of\nmeasured", justify="right")
    for half in ("first", "second"):
        table.add_column(f"{half}\nhalf", justify="right")
    for line in lines:
        predicted, measured = line.predicted, line.measured
        table.add_row(
            line.heads,
            line.decoding,
            known(predicted.tokens_per_pass, ".2f"),
            f"{measured.tokens_per_pass:.2f}",
            known(predicted.tokens_per_second, ".1f"),
            f"{measured.tokens_per_second:.1f}",
            known(line.deviation, "+.1%"),
            known(predicted.tokens_per_second / line.plain_predicted, ".2f"),
            f"{measured.tokens_per_second / line.plain_measured:.2f}",
            known(line.ratio_deviation, "+.1%"),
            "–" if line.interval is None else "{:.2f}–{:.2f}".format(*line.interval),
            *(known(half.ratio_deviation, "+.1%") for half in line.halves),
        )
    return table


def known(value: float, form: str) -> str:
    return or_dash(None if math.isnan(value) else value, form)


def say_large_batch(
    console: Console, name: str, token_heads: TokenHeads, prompts: Sequence[Tensor], options: argparse.Namespace
) -> None:
    """Print the result of tuning for a large batch, whose passes have no room for trees."""
    if not options.batch:
        return
    config = TuneConfig(new_tokens=options.new_tokens, batch=options.batch, repeats=min(5, options.repeats))
    tuning = tune(token_heads, prompts, config, clock=clock_of(token_heads.backbone.device))
    say(console, f"\n{name}, batch {options.batch}: {verdict(tuning)}")


if __name__ == "__main__":
    run_benchmark(main)

"""FLOPs per generated token: DynaMo, table 3, on the demo backbone that was trained with DynaMo heads.

The paper's rows are plain generation, speculative sampling with a draft model, medusa heads and dynamic decoding. Here
dynamic decoding is counted at several ε_b, and tree decoding alone, with lookup, and lookup without heads beside it.
Operations are PyTorch's own count of matrix products and attention of backbone, heads and draft model, the prompt's
pass included. They are counts, so no clock is read and a repeated run gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shared import (
    NGRAMS,
    figures_table,
    held_out,
    open_ngrams,
    parser_of,
    run_benchmark,
    say,
    wide_console,
)
from heads.checkpoint.opening import open_draft_model, open_heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import GreedySettings, Method, draft_model, dynamic, lookup_alone, plain, tree
from heads.evaluation.runs.ratios import Ratio, ratio_of_ratios
from heads.evaluation.speed.flops import flops_of

THRESHOLDS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One method's operations, tokens and passes of the backbone, prompt by prompt."""

    name: str
    flops: list[int]
    tokens: list[int]
    passes: list[int]

    def over(self, plain: Counts) -> Ratio:
        """Operations per token over plain generation's."""
        return ratio_of_ratios(self.flops, self.tokens, plain.flops, plain.tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console, opened = wide_console(), open_heads([options.heads])
    model, (token_heads,) = opened.model, opened.token_heads.values()
    settings = GreedySettings(new_tokens=options.new_tokens)
    ngrams, draft = open_ngrams(opened, options.ngrams), open_draft_model(options.draft)
    methods = [
        plain(model, settings),
        draft_model(model, draft, settings),
        tree(model, token_heads, settings, "tree decoding, heads alone", lookup=0),
        lookup_alone(model, token_heads, settings),
        tree(model, token_heads, settings, "tree decoding, with lookup", lookup=DEFAULT_LOOKUP),
        *(
            dynamic(model, token_heads, settings, f"dynamic decoding, ε_b {value:g}", value, ngrams, options.top_k)
            for value in options.thresholds
        ),
    ]
    prompts = held_out(opened, options.prompts)
    rows = [count(method, prompts) for method in methods]
    console.print(table(rows, f"{options.prompts} held-out prompts, at most {options.new_tokens} new tokens, greedy"))
    say(
        console,
        "In brackets: 95 % interval over prompts. Dynamic decoding is lossy: its texts are not plain generation's. A "
        f"tree's rejected nodes and a draft model's rejected tokens are counted; the draft model is {options.draft}.",
    )


def count(method: Method, prompts: Sequence[Any]) -> Counts:
    found = [flops_of(partial(method.run, prompt_1T)) for prompt_1T in prompts]
    outcomes = [outcome for _, outcome in found]
    return Counts(
        name=method.name,
        flops=[flops for flops, _ in found],
        tokens=[len(outcome.tokens) for outcome in outcomes],
        passes=[outcome.passes or 0 for outcome in outcomes],
    )


def table(rows: Sequence[Counts], title: str) -> Any:
    shown = figures_table(title, "method", "MFLOPs per token", "over plain", "tokens per pass")
    for row in rows:
        per_token = sum(row.flops) / sum(row.tokens) / 1e6
        per_pass = f"{sum(row.tokens) / sum(row.passes):.2f}"
        shown.add_row(row.name, f"{per_token:.1f}", "1.00" if row is rows[0] else str(row.over(rows[0])), per_pass)
    return shown


def build_parser() -> Any:
    parser = parser_of("benchmarks.paper.dynamo_flops", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument("--draft", default="checkpoints/demo/draft", help="draft model of speculative sampling")
    parser.add_argument("--ngrams", default=NGRAMS, help="table of n-grams; counted where it does not exist")
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS, help="ε_b of dynamic decoding")
    parser.add_argument("--top-k", type=int, default=16, help="candidates of a place, as in benchmarks.speed.dynamo")
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="most new tokens of a text")
    return parser


if __name__ == "__main__":
    run_benchmark(main)

"""FLOPs per generated token: DynaMo, table 3, on the demo backbone that was trained with DynaMo heads.

The paper's rows are plain generation, speculative sampling with a draft model, medusa heads and dynamic decoding. Here
dynamic decoding is counted at several ε_b, and tree decoding alone, with lookup, and lookup without heads beside it.
Operations are PyTorch's own count of matrix products and attention of backbone, heads and draft model. They are counts,
so no clock is read and a repeated run gives the same.

The prompt's pass costs all methods about the same and pulls ratios to 1, the more the shorter texts are. So the first
figures leave it out, with the tokens that it emits.
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
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import GreedySettings, Method, draft_model, dynamic, lookup_alone, plain, tree
from heads.evaluation.runs.ratios import ratio_of_ratios
from heads.evaluation.speed.flops import flops_of
from heads.ngrams.table import NgramTable

THRESHOLDS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One method's operations, tokens and passes of the backbone, prompt by prompt.

    Attributes:
        first_flops, first_tokens: of the first pass, which reads the prompt.
    """

    name: str
    flops: list[int]
    tokens: list[int]
    passes: list[int]
    first_flops: list[int]
    first_tokens: list[int]

    @property
    def later(self) -> tuple[list[int], list[int]]:
        """Operations and tokens of all passes but the first."""
        return subtract(self.flops, self.first_flops), subtract(self.tokens, self.first_tokens)

    @property
    def whole(self) -> tuple[list[int], list[int]]:
        return self.flops, self.tokens


def subtract(values: Sequence[int], others: Sequence[int]) -> list[int]:
    return [value - other for value, other in zip(values, others, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console, opened = wide_console(), open_heads([options.heads])
    (token_heads,) = opened.token_heads.values()
    most = token_heads.num_heads + 1
    if options.new_tokens <= most:
        raise ValueError(
            f"--new-tokens {options.new_tokens} was given; the first pass may emit {most} tokens, so give more."
        )
    ngrams, draft = open_ngrams(opened, options.ngrams), open_draft_model(options.draft)
    lengths = [
        methods_of(opened, GreedySettings(new_tokens=length), draft, ngrams, options)
        for length in (*range(1, most + 1), options.new_tokens)
    ]
    prompts = held_out(opened, options.prompts)
    rows = [count(of_lengths, prompts) for of_lengths in zip(*lengths, strict=True)]
    read = sum(prompt_1T.shape[1] for prompt_1T in prompts) / len(prompts)
    console.print(
        table(rows, f"{options.prompts} held-out prompts of {read:.0f} tokens, {options.new_tokens} new ones, greedy")
    )
    say(
        console,
        "After the prompt: without the pass that reads it and the tokens which that pass emits. In brackets: 95 % "
        "interval over prompts. Dynamic decoding is lossy: its texts are not plain generation's. A tree's rejected "
        f"nodes and a draft model's rejected tokens are counted; the draft model is {options.draft}.",
    )


def methods_of(
    opened: Opened, settings: GreedySettings, draft: Any, ngrams: NgramTable, options: Any
) -> Sequence[Method]:
    model, (token_heads,) = opened.model, opened.token_heads.values()
    return [
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


def count(of_lengths: Sequence[Method], prompts: Sequence[Any]) -> Counts:
    """Count one method's texts.

    Args:
        of_lengths: the method with room for 1, 2, … tokens, as many as its first pass may emit, and for whole texts.
    """
    *short, whole = of_lengths
    found = [flops_of(partial(whole.run, prompt_1T)) for prompt_1T in prompts]
    first = [first_pass(short, prompt_1T) for prompt_1T in prompts]
    outcomes = [outcome for _, outcome in found]
    return Counts(
        name=whole.name,
        flops=[flops for flops, _ in found],
        tokens=[len(outcome.tokens) for outcome in outcomes],
        passes=[outcome.passes or 0 for outcome in outcomes],
        first_flops=[flops for flops, _ in first],
        first_tokens=[tokens for _, tokens in first],
    )


def first_pass(of_lengths: Sequence[Method], prompt_1T: Any) -> tuple[int, int]:
    """Operations and tokens of the first pass: of the longest text for which it is the only one."""
    found = [flops_of(partial(method.run, prompt_1T)) for method in of_lengths]
    return [(flops, len(outcome.tokens)) for flops, outcome in found if outcome.passes == 1][-1]


def table(rows: Sequence[Counts], title: str) -> Any:
    columns = ("MFLOPs per token\nafter the prompt", "over plain", "MFLOPs per token\nwith its pass", "over plain")
    shown = figures_table(title, "method", *columns, "tokens per pass")
    for row in rows:
        per_pass = f"{sum(row.tokens) / sum(row.passes):.2f}"
        cells = (*cells_of(row.later, rows[0].later), *cells_of(row.whole, rows[0].whole))
        shown.add_row(row.name, *cells, per_pass)
    return shown


def cells_of(counted: tuple[list[int], list[int]], plain: tuple[list[int], list[int]]) -> tuple[str, str]:
    """MFLOPs per token, and their ratio to plain generation's."""
    per_token = sum(counted[0]) / sum(counted[1]) / 1e6
    return f"{per_token:.1f}", "1.00" if counted == plain else str(ratio_of_ratios(*counted, *plain))


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

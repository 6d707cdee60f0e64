"""DynaMo's heads on their own trained backbone: lossless tree decoding and lossy dynamic decoding beside plain.

The backbone was trained with its heads, so it has a plain row of its own. Dynamic decoding verifies nothing: beside its
speed stand the 4-grams that its texts repeat and their perplexity under another model, here the demo's draft model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.shared import (
    NGRAMS,
    add_decoding_flags,
    add_file_flags,
    describe_cpu,
    held_out,
    open_ngrams,
    parser_of,
    run_benchmark,
    say,
    wide_console,
)
from heads.checkpoint.opening import open_draft_model, open_heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import GreedySettings, dynamic, lookup_alone, plain, tree
from heads.evaluation.tables import measure, speed_table, write_json


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console, opened = wide_console(), open_heads([options.heads])
    model, (token_heads,) = opened.model, opened.token_heads.values()
    request = GreedySettings(new_tokens=options.new_tokens)
    ngrams = open_ngrams(opened, options.ngrams)
    methods = [
        plain(model, request),
        tree(model, token_heads, request, "tree decoding, heads alone", lookup=0),
        lookup_alone(model, token_heads, request),
        tree(model, token_heads, request, "tree decoding, with lookup", lookup=DEFAULT_LOOKUP),
        *(
            dynamic(model, token_heads, request, f"dynamic decoding, ε_b {value:g}", value, ngrams, options.top_k)
            for value in options.thresholds
        ),
    ]
    other_model = open_draft_model(options.other_model) if options.other_model else None
    prompts = held_out(opened, options.prompts)
    rows = measure(console, model, methods, request, prompts, options.repeats, other_model=other_model)
    scored = f"; texts scored by {options.other_model}" if options.other_model else ""
    say(console, f"{describe_cpu()}; {options.prompts} held-out prompts, {options.new_tokens} new tokens{scored}")
    title = f"\n{options.heads}: the likeliest token, or the likeliest n-gram of {options.top_k} candidates a place"
    console.print(speed_table(rows, title))
    if options.json:
        write_json(options.json, {"dynamo": rows}, model.device)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.dynamo", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument(
        "--other-model", default="checkpoints/demo/draft", help="a model that scores all texts; '' leaves it out"
    )
    parser.add_argument("--ngrams", default=NGRAMS, help="table of n-grams; counted where it does not exist")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0], help="values of ε_b")
    parser.add_argument(
        "--top-k", type=int, default=16, help="candidates of a place: 50³ n-grams take longer than a small model's pass"
    )
    add_decoding_flags(parser, prompts=20, new_tokens=64, repeats=3)
    add_file_flags(parser)
    return parser


if __name__ == "__main__":
    run_benchmark(main)

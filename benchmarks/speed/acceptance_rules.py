"""Tokens per pass under each rule of acceptance, with the same heads: `python -m benchmarks.speed.acceptance_rules`.

Held-out prompts are decoded by sampling with the heads alone (no prompt lookup), under each rule with each tree. The
tables show tokens per pass without the prompt's pass, with the standard error over prompts, and the milliseconds (ms)
of drafting and acceptance for each pass of a row; then the texts' quality: perplexity under another model and the share
of repeated 4-grams. Exact and rejection sampling write the backbone's own distribution; typical acceptance does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

import heads
from benchmarks.shared import (
    ON_BASE,
    describe_cpu,
    figures_table,
    held_out,
    parser_of,
    run_benchmark,
    say,
    shipped,
    wide_console,
    write_figures,
)
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.evaluation.generated_text import repeated_ngrams
from heads.evaluation.lossy.other_model import log_likelihood
from heads.evaluation.throughput import perplexity
from heads.interface.token_heads import TokenHeads

RULES = {"exact": "exact", "rejection": "rejection", "typical (lossy)": "typical"}
SETTINGS: dict[str, dict[str, Any]] = {
    "T 0.7": {"temperature": 0.7},
    "T 1.0": {"temperature": 1.0},
    "T 1.0, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """Measurements of one rule with one tree under one setting."""

    heads: str
    tree: str
    rule: str
    setting: str
    tokens_per_pass: float
    standard_error: float
    milliseconds: float
    perplexity: float
    repeated_4grams: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads(options.heads)
    prompts_BT = torch.cat(held_out(opened, options.prompts, options.prompt_tokens))
    say(
        console,
        f"{opened.source} with {', '.join(opened.token_heads)}; {options.prompts} held-out prompts, "
        f"{options.new_tokens} new tokens, {options.seeds} seed(s), texts scored by {options.other_model}; "
        f"{describe_cpu()}",
    )
    found, other_model = [], open_draft_model(options.other_model)
    for name, token_heads in opened.token_heads.items():
        kept = [
            measure(opened, name, token_heads, prompts_BT, options, other_model, tree=tree, rule=rule, setting=setting)
            for tree in trees(token_heads)
            for rule in RULES
            for setting in SETTINGS
        ]
        console.print(table_of(name, kept))
        console.print(quality_table(name, kept))
        found += kept
    if options.json:
        write_figures(options.json, [dataclasses.asdict(kept) for kept in found])
        console.print(f"rows: {options.json}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.acceptance_rules", __doc__)
    parser.add_argument("--heads", nargs="+", default=shipped(*ON_BASE))
    parser.add_argument(
        "--other-model", default="checkpoints/demo/draft", help="a model with the backbone's tokenizer scores the texts"
    )
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts, decoded as one batch")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--seeds", type=int, default=2, help="seeds, each of which decodes all prompts")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    return parser


def trees(token_heads: TokenHeads) -> dict[str, heads.Tree | int]:
    """A chain, and the default trees of 8 and 16 nodes."""
    chain = heads.Tree([[0] * depth for depth in range(1, token_heads.num_heads + 1)])
    return {"chain": chain, "8 nodes": 8, "16 nodes": 16}


def measure(
    opened: Opened,
    name: str,
    token_heads: TokenHeads,
    prompts_BT: Tensor,
    options: argparse.Namespace,
    other_model: Any,
    *,
    tree: str,
    rule: str,
    setting: str,
) -> Accepted:
    """Decode all prompts with each seed; an end token does not end a text, so that all are equally long."""
    per_pass, seconds, passes = [], 0.0, 0
    texts: list[list[int]] = []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        decoding = heads.TreeDecoding(token_heads, trees(token_heads)[tree], lookup=0, rule=RULES[rule])
        out = opened.model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            custom_generate=decoding,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            max_new_tokens=options.new_tokens,
            return_dict_in_generate=True,
            **SETTINGS[setting],
        )
        stats = out.stats
        texts += out.sequences[:, prompts_BT.shape[1] :].tolist()
        # `drafted` says of each emitted token whether it was drafted. A pass emits its accepted drafts and one token of
        # the backbone's own, so the tokens that were not drafted count the passes. The first one is the prompt's pass,
        # which is left out. Of the last pass the limit on new tokens may have cut some.
        per_pass += [(len(row) - 1) / max(1, len(row) - 1 - sum(row)) for row in stats.drafted]
        seconds += stats.seconds["draft"] + stats.seconds["accept"]
        passes += stats.row_passes - len(prompts_BT)
    return Accepted(
        heads=name,
        tree=tree,
        rule=rule,
        setting=setting,
        tokens_per_pass=statistics.mean(per_pass),
        standard_error=statistics.stdev(per_pass) / math.sqrt(len(per_pass)),
        milliseconds=1000 * seconds / passes,
        perplexity=perplexity([*prompts_BT[:, None]] * options.seeds, texts, partial(log_likelihood, other_model)),
        repeated_4grams=statistics.mean(map(repeated_ngrams, texts)),
    )


def table_of(name: str, kept: Sequence[Accepted]) -> Table:
    """A table of tokens per pass by tree and rule, with a column for each setting."""
    title = f"\n{name}: tokens per pass"
    table = figures_table(title, "tree", "rule", *SETTINGS, "ms", left=2, look=box.MARKDOWN)
    for (tree, rule), row in by_tree_and_rule(kept).items():
        cells = [f"{one.tokens_per_pass:.2f} ± {one.standard_error:.2f}" for one in row]
        table.add_row(tree, rule, *cells, f"{statistics.mean(one.milliseconds for one in row):.2f}")
    return table


def quality_table(name: str, kept: Sequence[Accepted]) -> Table:
    """A table of perplexities and repeated 4-grams by tree and rule, with a column for each setting."""
    title = f"\n{name}: perplexity under another model, 4-grams that repeat"
    table = figures_table(title, "tree", "rule", *SETTINGS, left=2, look=box.MARKDOWN)
    for (tree, rule), row in by_tree_and_rule(kept).items():
        table.add_row(tree, rule, *(f"{one.perplexity:.1f}, {one.repeated_4grams:.0%}" for one in row))
    return table


def by_tree_and_rule(kept: Sequence[Accepted]) -> dict[tuple[str, str], list[Accepted]]:
    """The measurements by tree and rule, in the order of the settings."""
    rows: dict[tuple[str, str], list[Accepted]] = {}
    for one in kept:
        rows.setdefault((one.tree, one.rule), []).append(one)
    return rows


if __name__ == "__main__":
    run_benchmark(main)

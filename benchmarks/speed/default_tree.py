"""Which tree without tuning? `python -m benchmarks.speed.default_tree`: node budgets and dynamic trees side by side.

The default of `TreeDecoding` is one node budget for each kind of device (heads/decoding/defaults.py). Budgets around it
and dynamic trees decode the same held-out prompts, interleaved, as heads alone and beside a looked-up chain: greedily,
with a repetition penalty, and sampled, where no text loops.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.shared import (
    add_decoding_flags,
    add_file_flags,
    describe_cpu,
    held_out,
    parser_of,
    run_benchmark,
    say,
    wide_console,
)
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.defaults import default_nodes
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.evaluation.methods import GreedySettings, Method, SampledSettings, Settings, lookup_alone, plain, tree
from heads.evaluation.tables import measure, speed_table, write_json

LOOKUPS = {"heads alone": 0, "with lookup": DEFAULT_LOOKUP}


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console, opened = wide_console(), open_heads([options.heads])
    prompts = held_out(opened, options.prompts)
    say(
        console,
        f"{opened.source} with {options.heads}; {len(prompts)} held-out prompts, {options.new_tokens} new tokens, "
        f"medians of {options.repeats} repeats; {describe_cpu()}",
    )
    blocks = {}
    for name, settings in settings_of(options.new_tokens, options.penalty).items():
        methods = build_methods(opened, settings, options)
        blocks[name] = measure(console, opened.model, methods, settings, prompts, options.repeats, name)
        console.print(speed_table(blocks[name], f"\n{name}"))
    if options.json:
        write_json(options.json, blocks, opened.model.device)


def settings_of(new_tokens: int, penalty: float) -> Mapping[str, Settings]:
    """How the methods of each table choose tokens, by the table's name."""
    return {
        "greedy": GreedySettings(new_tokens=new_tokens),
        f"greedy, repetition penalty {penalty}": GreedySettings(new_tokens=new_tokens, repetition_penalty=penalty),
        "sampled, temperature 1": SampledSettings(new_tokens=new_tokens),
    }


def build_methods(opened: Opened, settings: Settings, options: argparse.Namespace) -> list[Method]:
    """Plain generation, then each tree of the heads alone; lookup without heads, then each tree with lookup."""
    model, (token_heads,) = opened.model, opened.token_heads.values()
    default = default_nodes(model.device)
    static = {f"{n} nodes{', the default' * (n == default)}": n for n in sorted({default, *options.nodes})}
    trees = static | {f"dynamic, {n} nodes": DynamicTree(nodes=n) for n in options.dynamic}
    found = [plain(model, settings)]
    for what, lookup in LOOKUPS.items():
        found += [lookup_alone(model, token_heads, settings)] if lookup else []
        found += [
            tree(model, token_heads, settings, f"{what}, {name}", shape, lookup, compile=False)
            for name, shape in trees.items()
        ]
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.default_tree", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads")
    parser.add_argument("--nodes", type=int, nargs="+", default=[12, 16, 24], help="of static trees beside the default")
    parser.add_argument("--dynamic", type=int, nargs="+", default=[16, 40], help="nodes of dynamic trees")
    parser.add_argument("--penalty", type=float, default=1.1, help="repetition penalty of the second table")
    add_decoding_flags(parser, prompts=20, new_tokens=64, repeats=3)
    add_file_flags(parser)
    return parser


if __name__ == "__main__":
    run_benchmark(main)

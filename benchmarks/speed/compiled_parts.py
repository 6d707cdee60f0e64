"""What compiling saves, by kind of kernel: `python -m benchmarks.speed.compiled_parts`, torch.profiler on the demo.

A pass of 64 nodes after 512 and 2,048 tokens, and a draft of the default tree by grounded heads, each eager and
compiled. Matrix products and attention are calls of libraries in both forms; what compiling can make less is the rest:
norms, activations, copies, the calls of operators, Python.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, shipped, wide_console
from benchmarks.speed.pass_costs import filled_state, make_pass
from benchmarks.speed.real_costs.cells import timed
from heads.backbone.compiling.compiled_backbone import CompiledBackbone
from heads.backbone.model import CommitPlan
from heads.checkpoint.opening import open_heads
from heads.decoding.defaults import choose_tree
from heads.decoding.proposers.heads import DraftIndices, compiled_drafting
from heads.decoding.proposers.static_tree import draft
from heads.interface.token_heads import TokenHeads
from heads.tuning.timing import interleaved_medians

PRODUCTS = ("mm", "linear", "gemm", "mkl")
ATTENTION = ("attention",)
CONTEXTS = (512, 2048)
NODES = 64


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    say(console, f"{describe_cpu()}, medians of {options.rounds} interleaved rounds; shares by torch.profiler")
    (token_heads,) = open_heads(shipped("grounded")).token_heads.values()
    tasks = dict([*drafts(token_heads), *passes(token_heads)])
    seconds = interleaved_medians({name: timed(run, time.perf_counter) for name, run in tasks.items()}, options.rounds)
    table = figures_table("milliseconds", "", "all", "products", "attention", "the rest", "operators called", left=1)
    for name, run in tasks.items():
        whole, (products, attention, calls) = 1000 * seconds[name], parts_of(run, options.rounds)
        rest = whole - products - attention
        table.add_row(name, *(f"{ms:.2f}" for ms in (whole, products, attention, rest)), str(calls))
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.compiled_parts", __doc__)
    parser.add_argument("--rounds", type=int, default=21, help="interleaved; medians count")
    return parser


def passes(token_heads: TokenHeads) -> Iterator[tuple[str, Callable[[], Any]]]:
    for context in CONTEXTS:
        for form, backbone in (("eager", token_heads.backbone), ("compiled", CompiledBackbone(token_heads.backbone))):
            state = filled_state(token_heads.backbone, context)
            yield f"pass of {NODES} nodes after {context} tokens, {form}", make_pass(backbone, state, NODES)


@torch.no_grad()
def drafts(token_heads: TokenHeads) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Drafting the default tree for one row, after a prompt of a few tokens."""
    backbone = token_heads.backbone
    tokens_BT = torch.arange(16, device=backbone.device)[None]
    _, output = backbone.prefill(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), token_heads.taps)
    plan = CommitPlan.whole(torch.ones_like(tokens_BT, dtype=torch.bool))
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    tree = choose_tree(token_heads, None)
    index = DraftIndices(tree, grounded=True).tree(1, backbone.device, 0)
    given = (token_heads, [token_heads.projection(k) for k in range(1, 1 + token_heads.num_heads)], state)
    root_B = tokens_BT[:, 0]
    for form, run in (("eager", draft), ("compiled", compiled_drafting(token_heads).draft)):
        yield f"draft of grounded heads, {form}", functools.partial(no_grad, run, *given, root_B, index)


@torch.no_grad()
def no_grad(run: Callable[..., Any], *given: Any) -> Any:
    return run(*given)


def parts_of(run: Callable[[], Any], repeats: int) -> tuple[float, float, int]:
    """Milliseconds of products and of attention in one run, medians of several, and the operators that it calls."""
    found = [profiled(run) for _ in range(repeats)]
    return statistics.median(p for p, _, _ in found), statistics.median(a for _, a, _ in found), found[-1][-1]


def profiled(run: Callable[[], Any]) -> tuple[float, float, int]:
    """Milliseconds of products and of attention in one run, and the operators that it calls."""
    spent, calls = {PRODUCTS: 0.0, ATTENTION: 0.0}, 0
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    for event in found.key_averages():
        calls += event.count * event.key.startswith(("aten::", "mkldnn::", "mkl::"))
        kind = next((kind for kind in (ATTENTION, PRODUCTS) if any(word in event.key for word in kind)), None)
        if kind is not None:
            spent[kind] += event.self_cpu_time_total / 1000
    return spent[PRODUCTS], spent[ATTENTION], calls


if __name__ == "__main__":
    run_benchmark(main)

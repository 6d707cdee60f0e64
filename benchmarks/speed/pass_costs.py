"""Cost of a pass, to turn tokens per pass into a speed-up: `python -m benchmarks.speed.pass_costs`.

A backbone of a given shape with random weights verifies trees of 1 to 64 nodes after contexts of 512 to 8k tokens.
Time depends on shapes alone, so no trained weights are needed. The cost of a pass of N nodes, in plain steps (passes of
one node), gives the speed-up from tokens per pass:

    ratio to plain generation = tokens per pass / (cost of a pass + cost of drafting, both in plain steps)

The demo's shape runs on any machine; that of a 7B, in bfloat16, needs a GPU and is otherwise skipped with a reason.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.budget import Budget
from benchmarks.shared import figures_table, parser_of, run_benchmark, say, wide_console, write_figures
from heads.backbone.compiling.compiled_backbone import CompiledBackbone
from heads.backbone.compiling.graph import what_stops_compiling
from heads.backbone.model import Backbone, BackboneState, CommitPlan
from heads.decoding.trees.static import grow_tree
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import clock_of, rotated

NODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 2048, 8192)
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Median milliseconds of a pass; `steps` is the same in passes of one node after the same context."""

    shape: str
    compiled: bool
    batch: int
    context: int
    nodes: int
    milliseconds: float
    steps: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    costs: list[Cost] = []
    for name in options.shapes:
        if reason := why_not(name, device):
            say(console, f"\n{name}: skipped, {reason}")
            continue
        backbone = Backbone(make_model(name, device), check_projection=False)
        budget = Budget(None if options.minutes is None else options.minutes / len(options.shapes))
        for form in forms(console, backbone, compile=options.compile):
            for batch in options.batches:
                if found := measure_within(console, budget, name, form, batch, options):
                    costs += found
                    console.print(cost_table(found))
                    console.print(worth_table(found, options.tokens_per_pass, options.draft))
    measured_on = {"machine": describe_machine(device), "versions": versions()}
    write_figures(options.json, {"costs": [asdict(cost) for cost in costs], **measured_on})


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.pass_costs", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["demo", "7b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="texts in a pass, each with its own tree")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES), help="with the root; 1 is always measured")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved repeats; medians count")
    parser.add_argument("--compile", action="store_true", help="measure compiled passes as well")
    parser.add_argument("--tokens-per-pass", nargs="+", type=float, default=[2.0, 3.0, 4.0], help="from elsewhere")
    parser.add_argument("--draft", type=float, default=0.0, help="cost of drafting in plain steps")
    parser.add_argument("--minutes", type=float, help="shared equally by shapes; contexts that are left out are named")
    parser.add_argument("--json", metavar="FILE")
    return parser


def why_not(name: str, device: torch.device) -> str:
    """The reason why a shape is not measured on this machine; empty if it is measured."""
    needed = {"demo": 0, "1b": 6, "7b": 20}[name]  # GiB: weights in bfloat16 and a cache
    if not needed:
        return ""
    if device.type != "cuda":
        return f"it needs a GPU with about {needed} GiB and none is here"
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    return "" if free >= needed else f"it needs a GPU with about {needed} GiB and {free:.0f} GiB are free"


def make_model(name: str, device: torch.device) -> Any:
    """Random weights, on the device from the start."""
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=2 * max(CONTEXTS))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def forms(console: Console, backbone: Backbone, *, compile: bool) -> list[Backbone]:
    """The plain backbone, and its compiled form if that is requested and possible."""
    if not compile:
        return [backbone]
    if obstacle := what_stops_compiling(backbone):
        say(console, f"compiled passes are left out: {obstacle}")
        return [backbone]
    return [backbone, CompiledBackbone(backbone)]


def measure_within(
    console: Console, budget: Budget, name: str, form: Backbone, batch: int, options: argparse.Namespace
) -> list[Cost]:
    """Measure passes after each context, as far as time and memory allow; contexts that are left out are named."""
    costs = []
    for context in options.contexts:
        reason = budget.describe() if budget.is_spent() else ""
        if not reason:
            try:
                with budget.one():
                    costs += measure(name, form, [context], options.nodes, options.repeats, batch=batch)
            except torch.OutOfMemoryError:
                reason = "the GPU's memory does not hold it"
        if reason:
            what = "compiled" if isinstance(form, CompiledBackbone) else "eager"
            say(console, f"{name}, {what}, batch {batch}, context {context} is left out: {reason}")
    return costs


def measure(
    name: str,
    backbone: Backbone,
    contexts: Sequence[int],
    node_counts: Sequence[int],
    repeats: int,
    *,
    batch: int = 1,
) -> list[Cost]:
    """Each context's passes, interleaved; the first call of each (allocations, compiling) is not counted."""
    clock = clock_of(backbone.device)
    costs = []
    for context in contexts:
        state = filled_state(backbone, context, batch)
        passes = {nodes: make_pass(backbone, state, nodes) for nodes in sorted({1, *node_counts})}
        seconds: dict[int, list[float]] = {nodes: [] for nodes in passes}
        for one in passes.values():
            one()
        for repeat in range(repeats):
            for nodes in rotated(list(passes), repeat):
                start = clock()
                passes[nodes]()
                seconds[nodes].append(clock() - start)
        step = statistics.median(seconds[1])
        costs += [
            Cost(
                shape=name,
                compiled=isinstance(backbone, CompiledBackbone),
                batch=batch,
                context=context,
                nodes=nodes,
                milliseconds=1000 * statistics.median(found),
                steps=statistics.median(found) / step,
            )
            for nodes, found in seconds.items()
        ]
    return costs


@torch.no_grad()
def filled_state(backbone: Backbone, context: int, batch: int = 1) -> BackboneState:
    """A state with `context` committed tokens, which are read in blocks, since one long prefill would need memory."""
    tokens_BT = torch.randint(backbone.vocab_size, (batch, context), device=backbone.device)
    first = tokens_BT[:, :512]
    state, _ = Backbone.prefill(backbone, first, torch.ones_like(first, dtype=torch.bool))
    for start in range(512, context, 512):
        block_BT = tokens_BT[:, start : start + 512]
        length = block_BT.shape[1]
        sees_TT = torch.ones(length, length, dtype=torch.bool, device=backbone.device).tril()
        depth_T = torch.arange(length, device=backbone.device)
        output = Backbone.verify(backbone, state, block_BT, depth_T, sees_TT)
        state = backbone.commit(state, output, CommitPlan.whole(torch.ones_like(block_BT, dtype=torch.bool)))
    return state


def make_pass(backbone: Backbone, state: BackboneState, nodes: int) -> Callable[[], Any]:
    """A function for one pass over a best-first tree, with unembedding, which commits nothing."""
    shape = grow_tree(nodes, 4) if nodes > 1 else None
    depth_N = shape.depth_tensor(backbone.device) if shape else torch.zeros(1, dtype=torch.long, device=backbone.device)
    sees_NN = shape.sees_NN(backbone.device) if shape else torch.ones(1, 1, dtype=torch.bool, device=backbone.device)
    tokens_BN = torch.randint(backbone.vocab_size, (len(state.next_position_B), nodes), device=backbone.device)

    @torch.no_grad()
    def run() -> Any:
        return backbone.logits(backbone.verify(state, tokens_BN, depth_N, sees_NN).final_BND)

    return run


def cost_table(costs: Sequence[Cost]) -> Table:
    """A table of milliseconds, each followed by plain steps."""
    return filled_table(
        costs, "milliseconds of a pass (plain steps)", lambda c: f"{c.milliseconds:.2f} ({c.steps:.2f})"
    )


def worth_table(costs: Sequence[Cost], tokens_per_pass: Sequence[float], draft: float) -> Table:
    """A table of the speed-up for several tokens per pass at each cost."""
    given = ", ".join(f"{tokens:g}" for tokens in tokens_per_pass)
    title = f"ratio to plain generation with {given} tokens per pass and {draft:g} plain steps of drafting"
    return filled_table(
        costs, title, lambda c: " ".join(f"{speed_up(tokens, c.steps, draft):.2f}" for tokens in tokens_per_pass)
    )


def speed_up(tokens_per_pass: float, steps: float, draft: float) -> float:
    """The ratio to plain generation, by the formula above.

    >>> speed_up(3.0, 1.25, 0.25)
    2.0
    """
    return tokens_per_pass / (steps + draft)


def filled_table(costs: Sequence[Cost], what: str, cell: Callable[[Cost], str]) -> Table:
    first = costs[0]
    title = f"\n{first.shape}{', compiled' if first.compiled else ''}, batch {first.batch}: {what}"
    contexts = sorted({cost.context for cost in costs})
    table = figures_table(title, "nodes", *(f"context {context}" for context in contexts), left=0)
    by_place = {(cost.nodes, cost.context): cost for cost in costs}
    for nodes in sorted({cost.nodes for cost in costs}):
        table.add_row(str(nodes), *(cell(by_place[nodes, context]) for context in contexts))
    return table


if __name__ == "__main__":
    run_benchmark(main)

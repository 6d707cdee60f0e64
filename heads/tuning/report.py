"""Show the result of tuning: tables, sentences about the choice, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import Kind
from heads.evaluation.pictures import GREY, MARKERS, PALETTE, new_figure, save_figure, tidy
from heads.tuning.acceptance_rates import RankCounts
from heads.tuning.pass_times import PassTimes
from heads.tuning.search import Choice, best_by_size, fastest
from heads.tuning.tuned_tree import COMPILED, Tuning

RANKS_SHOWN = 4


def show(console: Console, tuning: Tuning) -> None:
    tables: Sequence[Table] = (
        acceptance_table(tuning.counts),
        verify_table(tuning.times),
        draft_table(tuning.times),
        sizes_table(tuning),
        decoded_table(tuning),
    )
    for table in tables:
        console.print(table)
    for sentence in filter(None, (verdict(tuning), describe_heads(tuning), describe_levels(tuning))):
        console.print(sentence, highlight=False, soft_wrap=True)


def acceptance_table(counts: RankCounts) -> Table:
    table = new_table("\nacceptance: share of right candidates by rank,\ngiven that the path to them was right")
    for column in ("depth", "after rank", "places", *(f"rank {rank}" for rank in range(RANKS_SHOWN))):
        table.add_column(column, justify="right")
    depths = max(1, *counts.at_depth)
    for depth in range(depths):
        for last in [None] if depth == 0 else [None, 0, 1]:
            seen = counts.at_depth[depth] if last is None else counts.at_last[depth, last]
            found = counts.by_depth if last is None else counts.by_last
            keys = [(depth, rank) if last is None else (depth, last, rank) for rank in range(RANKS_SHOWN)]
            shares = [f"{found[key] / seen:.1%}" if seen else "" for key in keys]  # type: ignore[index]
            table.add_row(str(depth + 1), "any" if last is None else str(last), str(seen), *shares)
    return table


def verify_table(times: PassTimes) -> Table:
    title = f"\nverifying, batch {times.batch} after {times.context} tokens; a plain step {1000 * times.plain:.2f} ms"
    table = new_table(title)
    for column in ("nodes", "ms", "of a plain step"):
        table.add_column(column, justify="right")
    for nodes, seconds in sorted(times.verify.items()):
        table.add_row(str(nodes), f"{1000 * seconds:.2f}", f"{seconds / times.plain:.2f}")
    return table


def draft_table(times: PassTimes) -> Table:
    rest = f"rest of a pass {1000 * times.rest_static:.2f} ms static, {1000 * times.rest_dynamic:.2f} ms dynamic"
    table = new_table(
        f"\ndrafting in ms: a static level by its expanding nodes, a whole dynamic tree by depth and width;\n{rest}"
    )
    counts, widths = (sorted({at for _, at in found}) for found in (times.step, times.grow))
    headers = [f"{'static' if i == 0 else ''}\n{n}" for i, n in enumerate(counts)]
    headers += [f"{'width' if i == 0 else ''}\n{n}" for i, n in enumerate(widths)]
    for column in ("depth\n", *headers):
        table.add_column(column, justify="right")
    for depth in sorted({k for k, _ in times.step}):
        steps = [times.step.get((depth, count)) for count in counts]
        grown = [times.grow.get((depth, width)) for width in widths]
        table.add_row(str(depth), *("" if s is None else f"{1000 * s:.2f}" for s in (*steps, *grown)))
    return table


def sizes_table(tuning: Tuning) -> Table:
    table = new_table("\nthe fastest tree of each size, predicted, heads alone")
    speed = ("tokens\n/pass", "tokens\n/s")
    for column in ("nodes\n", "static\ndepth", *speed, "dynamic\ndepth, width", *speed):
        table.add_column(column, justify="right")
    static, dynamic = ({c.nodes: c for c in best_by_size(found)} for found in (tuning.static, tuning.dynamic))
    for nodes in sorted({*static, *dynamic}):
        table.add_row(str(nodes), *cells(static.get(nodes)), *cells(dynamic.get(nodes)))
    return table


def cells(choice: Choice | None) -> tuple[str, str, str]:
    if choice is None:
        return "", "", ""
    wide = f", {choice.tree.width}" if isinstance(choice.tree, DynamicTree) else ""
    return f"{choice.depth}{wide}", f"{choice.tokens_per_pass:.2f}", f"{choice.tokens_per_second:.1f}"


def decoded_table(tuning: Tuning) -> Table:
    table = new_table("\ndecoded here, without the prompts' passes")
    for column in ("", "tokens/pass", "tokens/s", "ratio to plain"):
        table.add_column(column, justify="right" if column else "left")
    plain = tuning.decoded["plain"].tokens_per_second
    for name, speed in tuning.decoded.items():
        ratio = f"{speed.tokens_per_second / plain:.2f}"
        table.add_row(name, f"{speed.tokens_per_pass:.2f}", f"{speed.tokens_per_second:.1f}", ratio)
    return table


def verdict(tuning: Tuning) -> str:
    """What decoding will use, and why."""
    return describe_tree_choice(tuning) + (describe_compiled(tuning) if tuning.config.compile else "")


def describe_heads(tuning: Tuning) -> str:
    """How many heads the tree uses, and the node budget from which on each head pays."""
    budgets = [
        f"head {head} {'at no budget' if nodes is None else f'from {nodes} nodes'}"
        for head, nodes in tuning.heads_pay_from.items()
    ]
    return (
        f"It uses {tuning.tree.depth or 0} of {tuning.num_heads} heads. The fastest static trees, heads alone and "
        f"predicted for up to {max(tuning.times.verify)} nodes, use {', '.join(budgets)}."
    )


def describe_levels(tuning: Tuning) -> str:
    """For recurrent layers: what a level costs, and whether a chain or a tree is faster; "" for attention alone."""
    times = tuning.times
    if not times.level:
        return ""
    best = {
        name: fastest(found)
        for name, chain in (("chain", True), ("tree", False))
        if (found := [one for one in tuning.static if (one.nodes == one.depth + 1) == chain])
    }
    said = [f"the best {name} ({one.nodes} nodes) {one.tokens_per_second:.1f} tokens/s" for name, one in best.items()]
    pays = max(best, key=lambda name: best[name].tokens_per_second)
    return (
        f"Recurrent layers take a tree level by level: each level beyond the first adds "
        f"{times.level / times.plain:.2f} plain steps. Heads alone and predicted, {' and '.join(said)}: "
        f"a {pays} pays more here."
    )


def describe_compiled(tuning: Tuning) -> str:
    """The speed of compiled passes; predictions are for passes that are not compiled."""
    fastest = {
        compiled: max(
            (speed.tokens_per_second for name, speed in tuning.decoded.items() if name.endswith(COMPILED) == compiled),
            default=0.0,
        )
        for compiled in (True, False)
    }
    use = "used (compile)" if tuning.compile else "not used"
    return (
        f" Compiled passes decoded {fastest[True]:.1f} tokens/s at best, uncompiled ones {fastest[False]:.1f}: {use}; "
        f"the prediction is for uncompiled ones."
    )


def describe_tree_choice(tuning: Tuning) -> str:
    ratios = {kind: choice.tokens_per_second / tuning.plain for kind, choice in tuning.finalists.items()}
    if tuning.kind == "plain":
        how, why = "with prompt lookup alone" if tuning.lookup else "plainly", why_plain(tuning, ratios)
        return f"No tree pays at batch {tuning.config.batch}: {why}. TreeDecoding decodes {how} here."
    if tuning.lookup and tuning.with_lookup is not None:
        return (
            f"Chosen: {describe(tuning.with_lookup.choice.tree)} with prompt lookup (lookup={tuning.lookup}); "
            f"predicted {tuning.with_lookup.tokens_per_pass:.2f} tokens per pass, "
            f"{tuning.with_lookup.tokens_per_second:.1f} tokens/s, "
            f"{tuning.with_lookup.tokens_per_second / tuning.plain:.2f} × plain on these texts; heads alone at best "
            f"{max(ratios.values(), default=0):.2f} ×."
        )
    choice, others = tuning.finalists[tuning.kind], [kind for kind in ratios if kind != tuning.kind]
    other = f" (the best {others[0]} tree {ratios[others[0]]:.2f} ×)" if others else ""
    faster = "faster" if tuning.lookup else "not faster"
    return (
        f"Chosen: {describe(choice.tree)}; predicted {choice.tokens_per_pass:.2f} tokens per pass, "
        f"{choice.tokens_per_second:.1f} tokens/s, {ratios[tuning.kind]:.2f} × plain, heads alone{other}; "
        f"a tree with prompt lookup is {faster} here (lookup={tuning.lookup})."
    )


def why_plain(tuning: Tuning, ratios: Mapping[Kind, float]) -> str:
    """Why no tree is used: no draft is accepted, no tree is predicted to be faster, or it decoded more slowly."""
    if not ratios:
        return "no drafted token is accepted on these prompts, so train the heads further or give other prompts"
    if tuning.predicted == "plain":
        return ", ".join(f"the best {kind} tree has {ratio:.2f} of plain's speed" for kind, ratio in ratios.items())
    decoded = ", ".join(f"{name} {speed.tokens_per_second:.1f}" for name, speed in tuning.decoded.items())
    tree, ratio = tuning.finalists[tuning.predicted].tree, ratios[tuning.predicted]
    return f"{describe(tree)} was predicted {ratio:.2f} × plain, but decoding measured in tokens/s {decoded}"


def describe(tree: Tree | DynamicTree) -> str:
    if isinstance(tree, DynamicTree):
        return f"a dynamic tree of {tree.nodes} nodes, depth {tree.depth}, width {tree.width}"
    return f"a static tree of {tree.num_nodes} nodes, depth {tree.depth}"


def new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def draw_tuning(tuning: Tuning, path: str | Path) -> None:
    """Draw milliseconds of verifying and predicted tokens per second, both against the number of nodes."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    nodes = sorted(tuning.times.verify)
    left.plot(nodes, [1000 * tuning.times.verify[n] for n in nodes], color=PALETTE[0], marker=MARKERS[0])
    left.axhline(1000 * tuning.times.plain, color=GREY, linestyle="--", label="a plain step")
    speed: Callable[[Choice], float] = lambda choice: choice.tokens_per_second  # noqa: E731 - drawn twice
    for i, (name, found) in enumerate({"static": tuning.static, "dynamic": tuning.dynamic}.items()):
        best = best_by_size(found)
        right.plot([c.nodes for c in best], [speed(c) for c in best], color=PALETTE[i], marker=MARKERS[i], label=name)
    right.axhline(tuning.plain, color=GREY, linestyle="--", label="plain")
    titles = ("verifying, milliseconds", "fastest tree of each size, predicted tokens/s")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        tidy(axes, title, "nodes")
    save_figure(figure, path)

"""Tables of the demo's text at a larger model's price, and the share of tokens per pass that becomes speed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.shared import figures_table, ratio_cell, say
from benchmarks.speed.real_costs.cells import NODES, PACKED, TUNED, MethodSpeed, PassTimes, Speeds
from benchmarks.speed.real_costs.methods import COMPILED

TARGET = 0.9
KINDS = (f", {PACKED}", COMPILED)
LABEL = (
    "The demo's text and acceptance at a larger model's price: its backbone and heads, zero-padded to each shape, "
    "write the same text (2,048 tokens of vocabulary; attention heads of 32 units)."
)


def show(console: Console, passes: Sequence[PassTimes], speeds: Sequence[Speeds]) -> None:
    """Print all that was measured so far."""
    say(console, LABEL)
    if passes:
        console.print(passes_table(passes))
    for cell in speeds:
        console.print(speeds_table(cell))
    if speeds:
        for line in verdicts(speeds):
            say(console, line)


def passes_table(found: Sequence[PassTimes]) -> Table:
    """Milliseconds of a pass by its nodes, and in brackets its cost in passes of one node."""
    table = figures_table(
        "\nmilliseconds of a pass (plain steps)", "shape", "dtype", "weights", *map(str, NODES), left=3
    )
    for row in found:
        for form, by_nodes in row.milliseconds.items():
            one = row.milliseconds["plain"]["1"]
            cells = (f"{ms:.0f} ({ms / one:.2f})" for ms in (by_nodes[str(nodes)] for nodes in NODES))
            table.add_row(row.shape, row.dtype, form, *cells)
    return table


def speeds_table(cell: Speeds) -> Table:
    title = f"\nspeed beside plain generate: {cell.shape} {cell.dtype}, batch {cell.batch}, {cell.decoding}"
    figures_of = ("tokens\nper pass", "tokens\nper s", "× plain", "95 % over\nprompts", "share\nreached")
    table = figures_table(title, "method", *figures_of, "4-grams\nrepeat")
    table.add_column("tree")
    table.add_column("same text")
    for line in cell.lines:
        table.add_row(line.method, *figures(cell, line), line.tree, line.same_text)
    return table


def figures(cell: Speeds, line: MethodSpeed) -> tuple[str, ...]:
    low, high = line.interval
    return (
        f"{line.tokens_per_pass:.2f}",
        f"{line.tokens_per_second:.1f}",
        f"{line.ratio:.2f}",
        f"{low:.2f}–{high:.2f}",
        f"{reached(cell, line):.2f}" if line.tree else "",
        f"{line.repeated_4grams:.0%}",
    )


def reached(cell: Speeds, line: MethodSpeed) -> float:
    """The ratio to plain generation, divided by tokens per pass.

    If drafting and a pass cost as much as a plain step, the ratio would be the tokens per pass and this share 1. It can
    exceed 1, since `generate` does more around a pass than our loop. Packed or compiled methods are compared with plain
    generation that is packed or compiled too.
    """
    return line.ratio / plain_like(cell, line).ratio / line.tokens_per_pass


def plain_like(cell: Speeds, line: MethodSpeed) -> MethodSpeed:
    """Plain generation with packed weights, or compiled, if the line's method is."""
    kind = next((kind for kind in KINDS if line.method.endswith(kind)), "")
    return next(x for x in cell.lines if x.method == f"plain{kind}")


def verdicts(found: Sequence[Speeds]) -> list[str]:
    """For each cell with a batch of one: the fastest heads alone, and whether `reached` meets the target.

    The target is for passes that are not compiled; compiled heads have lines beside compiled plain generation.
    """
    lines = []
    for cell in found:
        alone = [line for line in cell.lines if " alone" in line.method and line.tree and not is_compiled(line)]
        if cell.batch == 1 and alone:
            best = max(alone, key=lambda line: line.ratio)
            share, plain = reached(cell, best), plain_like(cell, best)
            beside = "" if plain.method == "plain" else f" ({best.ratio / plain.ratio:.2f} × {plain.method})"
            lines.append(
                f"{cell.shape} {cell.dtype}, {cell.decoding}: {best.method} is {best.ratio:.2f} × plain{beside} with "
                f"{best.tokens_per_pass:.2f} tokens per pass, {share:.2f} of that bound; target {TARGET}: "
                f"{'reached' if share >= TARGET else 'not reached'}"
            )
        lines += beside_compiled(cell)
    return lines


def is_compiled(line: MethodSpeed) -> bool:
    return line.method.endswith(COMPILED)


def beside_compiled(cell: Speeds) -> list[str]:
    """Lines on compiled heads against compiled plain `generate`, the harder comparison."""
    by_name = {line.method: line for line in cell.lines}
    plain = by_name.get(f"plain{COMPILED}")
    ours = [line for line in cell.lines if is_compiled(line) and line.tree]
    return [
        f"{cell.shape} {cell.dtype}, batch {cell.batch}, {cell.decoding}: {line.method} is "
        f"{line.tokens_per_second / plain.tokens_per_second:.2f} × {plain.method}"
        for line in ours
        if plain is not None
    ]


def markdown(found: Sequence[Speeds]) -> str:
    """A line for each method at a batch of one, with shapes and decodings side by side; a dash if it was not measured.

    Tuned trees are left to the results: on these texts they are level with the default tree.
    """
    cells = [cell for cell in found if cell.batch == 1]
    methods = dict.fromkeys(line.method for cell in cells for line in cell.lines if TUNED not in line.method)
    names = sorted(methods, key=place_of)
    head = "".join(f" {cell.shape} {cell.dtype}, {cell.decoding}: tokens per pass | × plain |" for cell in cells)
    rows = [f"| |{head} same text |", "|---" * (2 * len(cells) + 2) + "|"]
    for name in names:
        lines = [next((line for line in cell.lines if line.method == name), None) for cell in cells]
        figures = "|".join(
            "–|–" if line is None else f"{line.tokens_per_pass:.2f}|{ratio_cell(line, line.method, digits=1)}"
            for line in lines
        )
        verdicts = dict.fromkeys(line.same_text for line in lines if line is not None)
        rows.append(f"|{name}|{figures}|{'; '.join(verdicts).replace(' ', '&nbsp;')}|")
    shares = (f"{cell.lines[0].repeated_4grams:.0%}| " for cell in cells)
    rows.append(f"|*share of repeated 4-grams*|{'|'.join(shares)}| |")
    return "\n".join(rows) + "\n"


def place_of(method: str) -> int:
    """Plain generation comes first, then heads alone, then what copies text or has a draft model, then packed weights.

    >>> sorted(["grounded alone, packed", "lookup without heads", "medusa alone", "plain"], key=place_of)
    ['plain', 'medusa alone', 'lookup without heads', 'grounded alone, packed']
    """
    if PACKED in method or COMPILED in method:
        return 3
    if method == "plain":
        return 0
    return 1 if method.endswith(" alone") or method.startswith("plain") else 2

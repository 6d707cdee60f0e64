"""The report of the decoding benchmark: tables, the picture, the headlines, and a line for each target.

Every headline is computed from rows of the tables and has the ratio's interval.

For a method that reports its phases, the largest possible ratio to plain generation is
    tokens per pass × seconds of a plain step / seconds of (verify + draft) in a pass,
which a decoder without any other work would reach. Prefill counts as a pass, and its time as verifying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.shared import figures_table, say
from benchmarks.speed.decoding.time_by_part import Parts
from heads.evaluation.methods import LOOKUP_ALONE
from heads.evaluation.pictures import GREY, PALETTE, draw_speeds, save_figure, tidy
from heads.evaluation.throughput import MethodResult

ALONE, WITH_LOOKUP = ", heads alone", ", heads with lookup"  # what the name of a row says after the heads'
COMPILED, STATIC = ", compiled", "plain, compiled static cache"
PHASES = ("draft", "verify", "accept", "commit", "other")


def phase_table(rows: Sequence[MethodResult], title: str) -> Table:
    """The time of a pass by phase, for methods that report it; the prompt's pass counts as verifying."""
    table = figures_table(title, "method", *PHASES, "ms a pass")
    for row in rows:
        if row.milliseconds:
            spent = row.milliseconds | {"verify": row.milliseconds["verify"] + row.milliseconds["prefill"]}
            total = sum(spent[phase] for phase in PHASES)
            table.add_row(row.name, *(f"{spent[phase] / total:.0%}" for phase in PHASES), f"{total:.2f}")
    return table


def parts_table(parts: Sequence[Parts], title: str) -> Table:
    forwards = ("backbone forward\n(with unembedding)", "head forwards\n(with projection)")
    table = figures_table(title, "method", *forwards, "everything\nelse", "total\n")
    for p in parts:
        table.add_row(p.name, *(f"{value:.2f}" for value in (p.backbone, p.heads, p.rest, p.total)))
    return table


def scaled(parts: Sequence[Parts], rows: Sequence[MethodResult]) -> list[Parts]:
    """Scale each method's parts so that they add up to the milliseconds a token of its row in the other tables.

    >>> plain = MethodResult(name="plain", tokens=9, tokens_per_second=100.0, ratio=1.0, ratio_low=1.0, ratio_high=1.0,
    ...             interval=(1.0, 1.0), tokens_per_pass=1.0, repeated_4grams=0.0, same_text="yes")
    >>> scaled([Parts(name="plain", backbone=15.0, heads=0.0, rest=5.0)], [plain])
    [Parts(name='plain', backbone=7.5, heads=0.0, rest=2.5)]
    """
    speeds = {row.name: row.tokens_per_second for row in rows}
    found = []
    for p in parts:
        factor = 1000 / speeds[p.name] / p.total
        found.append(Parts(name=p.name, backbone=factor * p.backbone, heads=factor * p.heads, rest=factor * p.rest))
    return found


def headlines(name: str, rows: Sequence[MethodResult]) -> list[str]:
    """The best heads alone first; then the best with lookup, beside lookup without heads; then the best compiled ones.

    Compiled methods are compared with compiled plain generation, and come last.
    """
    alone, with_lookup = (best_lossless(rows, kind) for kind in (ALONE, WITH_LOOKUP))
    copied = next(row for row in rows if row.name == LOOKUP_ALONE)
    lines = [describe(alone), f"{describe(with_lookup)}; {describe(copied)}"]
    for static in (row for row in rows if row.name == STATIC):
        alone, with_lookup = (best_lossless(rows, f"{kind}{COMPILED}") for kind in (ALONE, WITH_LOOKUP))
        for best in (alone, with_lookup, *(row for row in rows if row.name == f"{LOOKUP_ALONE}{COMPILED}")):
            lines.append(f"{best.name} {against(best, static):.2f} × {STATIC}, {best.ratio:.2f} × plain")
    return [f"{name}: {line}" for line in lines]


def best_lossless(rows: Sequence[MethodResult], kind: str) -> MethodResult:
    """The fastest row of this kind (`ALONE`, `WITH_LOOKUP`, either compiled) that is not lossy."""
    return max((row for row in rows if row.name.endswith(kind) and row.same_text != "lossy"), key=lambda row: row.ratio)


def against(row: MethodResult, plain: MethodResult) -> float:
    return row.tokens_per_second / plain.tokens_per_second


def describe(row: MethodResult) -> str:
    low, high = row.interval
    return (
        f"{row.name} {row.ratio:.2f} × plain ({low:.2f}–{high:.2f} over prompts, {row.ratio_low:.2f}–"
        f"{row.ratio_high:.2f} over repeats) at {row.tokens_per_pass:.2f} tokens a pass"
    )


def draw(blocks: Mapping[str, list[MethodResult]], parts: Mapping[str, list[Parts]], path: str) -> None:
    """Draw speeds above and, where they were measured, milliseconds below, with a column for each setting."""
    longest = max(map(len, blocks.values()))
    tall = 0.3 * longest + 1
    figure = Figure(figsize=(6.5 * len(blocks), tall + (3.5 if parts else 0)), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(tall, 3.5)) if parts else [figure]
    for axes, (name, rows) in zip(halves[0].subplots(1, len(blocks)), blocks.items(), strict=True):
        draw_speeds(axes, rows, f"tokens per second, {name}")
    if parts:
        for axes, (name, found) in zip(halves[1].subplots(1, len(parts)), parts.items(), strict=True):
            draw_parts(axes, found, f"milliseconds for each token, {name}")
    save_figure(figure, path)


def draw_parts(axes: Any, parts: Sequence[Parts], title: str) -> None:
    names = [p.name for p in parts]
    shares = {"backbone": PALETTE[0], "heads": PALETTE[1], "rest": GREY}
    labels = {"backbone": "backbone forward", "heads": "head forwards", "rest": "everything else"}
    left = [0.0] * len(parts)
    for part, color in shares.items():
        widths = [getattr(p, part) for p in parts]
        axes.barh(names, widths, left=left, color=color, height=0.6, label=labels[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    tidy(axes, title, "ms")
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


TARGET_RATIO = 2.33
TARGET_ALONE = 1.6  # with a repetition penalty, each against plain generation of its own kind: as it is, or compiled
TARGET_GROUNDED = 1.07
TARGET_EFFICIENCY = 0.9
FORWARDS = ("prefill", "verify", "draft")


def say_targets(
    console: Console, rows: Sequence[MethodResult], parts: Sequence[Parts], *, counts: bool, alone: bool = False
) -> None:
    """Print the targets of one block; there is a target of speed if `counts`, since looping text flatters every method.

    Args:
        alone: whether the block is the one of which `TARGET_ALONE` is asked.
    """
    by_name = {row.name: row for row in rows}
    plain = by_name["plain"]
    ours = [row for row in rows if row.same_text != "lossy" and (ALONE in row.name or WITH_LOOKUP in row.name)]
    if alone:
        say_alone(console, rows)
    if counts:
        say_best(console, rows, ours)
    for name, row in by_name.items():
        if name.startswith("grounded") and (other := by_name.get(name.replace("grounded", "medusa", 1))):
            found = row.tokens_per_second / other.tokens_per_second
            tell(console, f"{name} ≥ {TARGET_GROUNDED} × {other.name}", f"{found:.2f}", found >= TARGET_GROUNDED)
    for row in ours:
        found = row.ratio / passes_allow(row, plain)
        text = f"{found:.2f} ({row.ratio:.2f} of {passes_allow(row, plain):.2f})"
        tell(
            console,
            f"{row.name}: ratio ≥ {TARGET_EFFICIENCY} × what its passes allow",
            text,
            found >= TARGET_EFFICIENCY,
        )
    for p in parts[1:]:
        text = f"{p.rest:.2f} against {parts[0].rest:.2f} ms"
        tell(console, f"{p.name}: time outside forwards ≤ plain's", text, p.rest <= parts[0].rest)
    for row in rows[1:]:
        if row.same_text not in ("lossy", "same distribution"):
            tell(console, f"{row.name}: same text as plain", row.same_text, row.same_text.startswith("yes"))


def say_best(console: Console, rows: Sequence[MethodResult], ours: Sequence[MethodResult]) -> None:
    """The best of each kind against plain generation, compiled if it is, and what limits those that miss the target."""
    for suffix, plain in (("", rows[0].name), (COMPILED, STATIC)):
        for beside in (row for row in rows if row.name == plain):
            for kind in (ALONE, WITH_LOOKUP):
                best = best_lossless(rows, f"{kind}{suffix}")
                found = against(best, beside) if suffix else best.ratio
                tell(
                    console,
                    f"best lossless ({best.name}) ≥ {TARGET_RATIO} × {plain}",
                    f"{found:.2f}",
                    found >= TARGET_RATIO,
                )
    for row in ours:
        if row.ratio < TARGET_RATIO:
            say(console, f"  {what_limits(row, rows[0])}")


def say_alone(console: Console, rows: Sequence[MethodResult]) -> None:
    """Heads alone against plain, and compiled heads against compiled plain: never one against the other."""
    for suffix, plain in (("", "plain"), (COMPILED, STATIC)):
        beside = next((row for row in rows if row.name == plain), None)
        ours = [row for row in rows if row.name.endswith(f"{ALONE}{suffix}") and row.same_text != "lossy"]
        if beside is None or not ours:
            say(console, f"  target heads alone{suffix} ≥ {TARGET_ALONE} × {plain}: not measured in this run")
            continue
        best = max(ours, key=lambda row: row.tokens_per_second)
        found = best.ratio if beside is rows[0] else best.tokens_per_second / beside.tokens_per_second
        tell(console, f"{best.name} ≥ {TARGET_ALONE} × {plain}", f"{found:.2f}", found >= TARGET_ALONE)


def passes_allow(row: MethodResult, plain: MethodResult) -> float:
    """The ratio to plain generation if nothing but verifying and drafting took time.

    >>> plain = MethodResult(name="plain", tokens=9, tokens_per_second=100.0, ratio=1.0, ratio_low=1.0, ratio_high=1.0,
    ...             interval=(1.0, 1.0), tokens_per_pass=1.0, repeated_4grams=0.0, same_text="yes")
    >>> import dataclasses
    >>> spent = {"verify": 12.0, "draft": 3.0, "commit": 1.0}
    >>> ours = dataclasses.replace(plain, tokens_per_pass=3.0, milliseconds=spent)
    >>> passes_allow(ours, plain)                         # 3 tokens in 15 ms, where plain steps take 10 ms each
    2.0
    """
    forwards = sum(row.milliseconds.get(phase, 0.0) for phase in FORWARDS)
    return row.tokens_per_pass * 1000 / plain.tokens_per_second / forwards


def what_limits(row: MethodResult, plain: MethodResult) -> str:
    """One sentence: the ratio that its passes allow, and the time of a pass at which the target would be met."""
    step = 1000 / plain.tokens_per_second
    verify = row.milliseconds["prefill"] + row.milliseconds["verify"]
    free = row.tokens_per_pass * step / verify
    needed = row.tokens_per_pass / TARGET_RATIO
    return (
        f"limit of {row.name}: {row.tokens_per_pass:.2f} tokens a pass, a pass costs {verify / step:.2f} plain steps "
        f"({verify:.1f} against {step:.1f} ms), so {free:.2f} × with all else free; {TARGET_RATIO} × needs passes and "
        f"drafts of together at most {needed:.2f} plain steps, which backbones have whose steps wait for weights "
        f"(python -m benchmarks.speed.pass_costs)"
    )


def tell(console: Console, target: str, found: str, reached: bool) -> None:
    say(console, f"  target {target}: {found}, {'reached' if reached else 'not reached'}")

"""The report of the suite `speed`: sections from its figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from heads.evaluation.report.sections import Section, Table
from heads.evaluation.runs.ratios import LEAST_UNITS
from heads.evaluation.speed.drawings import draw_bars, draw_lines, draw_phases, draw_tree, lay_out
from heads.evaluation.speed.figures import OVERALL
from heads.evaluation.speed.measuring import SpeedFigures
from heads.evaluation.speed.speakers import PLAIN

FEW_PASSES = 0.25
"""A point of the curve over positions with a smaller share of the median point's passes is not drawn."""
FEW_REACHED = 10
"""Conditional acceptance of fewer passes than this is not shown."""
FEW = "too few questions"
INTERVAL = (
    "In brackets: 95 % interval over questions, Student's t of the ratio's logarithm (a jackknife), from "
    f"{LEAST_UNITS} questions on. Of differences that are none, one verdict in 20 is still wrong. "
)


def speed_sections(results: SpeedFigures) -> list[Section]:
    """Everything that was measured, the answer to most readers' question first."""
    sections = [categories_section(results), pictures_section(results), depth_section(results)]
    if results["position"]["curve"]:
        sections.append(position_section(results))
    sections.append(phases_section(results))
    if results["tree"] is not None:
        sections.append(tree_section(results))
    return [*sections, texts_section(results)]


def interval(found: Mapping[str, Any]) -> str:
    """
    >>> interval({"value": 1.5, "low": 1.4, "high": 1.62, "questions": 4}), interval({"value": 1.5, "questions": 2})
    ('1.50 (1.40–1.62)', '1.50')
    """
    if found["questions"] < LEAST_UNITS:
        return f"{found['value']:.2f}"
    return f"{found['value']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def verdict(found: Mapping[str, Any]) -> str:
    """Whether a ratio to plain is a win; an interval that holds 1 is none, whatever the value."""
    if found["questions"] < LEAST_UNITS:
        return FEW
    return "faster" if found["low"] > 1 else "slower" if found["high"] < 1 else "no difference"


def categories_section(results: SpeedFigures) -> Section:
    rows = []
    for category, methods in in_order(results["categories"]).items():
        for method, found in methods.items():
            flops = found["flops_per_token"]
            rows.append(
                [
                    category,
                    method,
                    str(found["questions"]),
                    "1.00" if method == PLAIN else interval(found["tokens_per_pass"]),
                    f"{found['tokens_per_pass_mean_of_requests']:.2f}",
                    f"{found['tokens_per_second']:.1f}",
                    "1.00" if method == PLAIN else interval(found["speed_up"]),
                    "" if method == PLAIN else verdict(found["speed_up"]),
                    "" if flops is None else f"{flops / 1e6:,.1f}",
                ]
            )
    columns = [
        "category", "method", "questions", "tokens per pass, pooled", "mean of requests", "tokens/s",
        "speed over plain", "is it faster?", "MFLOPs per token",
    ]  # fmt: skip
    note = (
        INTERVAL + "Pooled: all tokens over all passes; mean of requests: each request's own, averaged. Speeds are of "
        "whole calls with the caches of earlier turns kept, medians over repeats; a warm-up is not counted. "
    )
    if reason := results["flops_not_counted"]:
        note += f"FLOPs are not counted, since {reason}."
    else:
        note += (
            "FLOPs: matrix products and attention of one answer of each category, its prompt's pass included, over its "
            "tokens."
        )
    repeats = f"{results['repeats']} interleaved repeat{'s' * (results['repeats'] > 1)}"
    text = (
        f"{results['questions']} questions with {results['turns']} turns from {results['file']}, as {results['form']}, "
        f"greedy, at most {results['new_tokens']} new tokens, {repeats}. "
        f"{results['drafting']}"
    )
    return Section(title="Speed by category", text=text, tables=[Table(columns=columns, rows=rows, note=note)])


def in_order(categories: Mapping[str, Any]) -> dict[str, Any]:
    """The overall figures first."""
    return {OVERALL: categories[OVERALL]} | {name: found for name, found in categories.items() if name != OVERALL}


def pictures_section(results: SpeedFigures) -> Section:
    categories = in_order(results["categories"])
    ours = [method for method in results["methods"] if method != PLAIN]

    def bars(figure: str) -> dict[str, dict[str, tuple[float, float, float]]]:
        return {
            category: {m: tuple(methods[m][figure][k] for k in ("value", "low", "high")) for m in ours}
            for category, methods in categories.items()
        }

    return Section(
        title="Categories side by side",
        pictures=[
            draw_bars(
                bars("tokens_per_pass"),
                "Tokens per backbone pass by category, with 95 % intervals.",
                "tokens per pass",
                1.0,
            ),
            draw_bars(
                bars("speed_up"), "Speed over plain generation, with 95 % intervals.", "tokens/s over plain's", 1.0
            ),
        ],
    )


def depth_section(results: SpeedFigures) -> Section:
    methods = results["depth"]
    lines: dict[str, list[tuple[float, float]]] = {}
    for method, found in methods.items():
        for kind in ("conditional", "joint"):
            if points := [(float(d), found[kind][d - 1]) for d in enough_passes(found)]:
                lines[f"{kind}, {method}"] = points
    table = Table(
        columns=["depth", *(f"{method}, {kind}" for method in methods for kind in ("conditional", "joint"))],
        rows=depth_rows(methods),
        note="Joint: share of all verifying passes that accepted at least so many drafted tokens. Conditional: share "
        f"of those that had accepted all tokens before; empty where these were fewer than {FEW_REACHED} passes.",
    )
    shows = "Acceptance by depth: of all passes (joint), and given the tokens before (conditional)."
    pictures = [draw_lines(lines, shows, "depth", "accepted", percent=True, whole_steps=True)] if lines else []
    return Section(title="Acceptance by depth", tables=[table], pictures=pictures)


def depth_rows(methods: Mapping[str, Any]) -> list[list[str]]:
    """One row a depth, down to the last that enough passes of a method reached.

    >>> depth_rows({"heads alone": {"passes": 40, "joint": [0.5, 0.1, 0.05], "conditional": [0.5, 0.2, 0.5]}})
    [['1', '50.0%', '50.0%'], ['2', '20.0%', '10.0%']]
    """
    shown = {method: set(enough_passes(found)) for method, found in methods.items()}
    deepest = max((d for depths in shown.values() for d in depths), default=0)
    return [
        [str(d)]
        + [
            f"{found[kind][d - 1]:.1%}" if d in shown[method] else ""
            for method, found in methods.items()
            for kind in ("conditional", "joint")
        ]
        for d in range(1, deepest + 1)
    ]


def enough_passes(found: Mapping[str, Any]) -> list[int]:
    """The depths before which enough passes had accepted every token for a share of them to say something."""
    reached = [found["passes"], *(round(share * found["passes"]) for share in found["joint"])]
    return [d for d in range(1, len(reached)) if reached[d - 1] >= min(FEW_REACHED, found["passes"]) > 0]


def position_section(results: SpeedFigures) -> Section:
    found = results["position"]
    curve = found["curve"]
    enough = FEW_PASSES * statistics.median(one["passes"] for one in curve)
    kept = [one for one in curve if one["passes"] >= enough]
    points = [((one["from"] + one["to"]) / 2, one["tokens_per_pass"]) for one in kept]
    texts = f"{found['texts']} text{'s' * (found['texts'] != 1)}"
    text = (
        f"{texts} of up to {found['tokens']} tokens by {found['method']}; the "
        f"backbone has {found['longest'] or 'no limit of'} positions. An end-of-text token does not end these texts."
    )
    if found["cut"]:
        text += " The texts end before the last position; --position-tokens 0 writes on to it."
    if left_out := len(curve) - len(kept):
        text += f" {left_out} of {len(curve)} points rest on few passes (the texts' ends) and are left out."
    rows = [[f"{one['from']}–{one['to'] - 1}", str(one["passes"]), f"{one['tokens_per_pass']:.2f}"] for one in kept]
    table = Table(columns=["position in the output", "passes", "tokens per pass"], rows=rows)
    shows = "Tokens per pass against the position in the output where the pass begins."
    picture = draw_lines({found["method"]: points}, shows, "position in the output", "tokens per pass")
    return Section(title="Acceptance by position", text=text, tables=[table], pictures=[picture])


def phases_section(results: SpeedFigures) -> Section:
    phases = results["phases"]
    names = list(dict.fromkeys(name for found in phases.values() for name in found))
    rows = [
        [method, *(f"{found[name]:.2f}" if name in found else "" for name in names)] for method, found in phases.items()
    ]
    note = "Milliseconds on the host; work that an accelerator still has to do is counted where the host waits for it."
    return Section(
        title="Time of a pass by part",
        tables=[Table(columns=["ms per pass", *names], rows=rows, note=note)],
        pictures=[draw_phases(phases, "Milliseconds of a pass by part, the prompt's pass included.")],
    )


def tree_section(results: SpeedFigures) -> Section:
    tree = results["tree"]
    text = (
        f"{len(tree['parents']) - 1} drafted tokens, verified {tree['verified']:,} times by heads alone. The figure at "
        f"a node is the share of these passes that accepted it. Node 0 is the root."
    )
    depths, _ = lay_out(tree["parents"])
    rows = [
        [str(node), str(parent), str(depths[node]), f"{tree['accepted'][node] / max(1, tree['verified']):.1%}"]
        for node, parent in enumerate(tree["parents"])
        if parent >= 0
    ]
    return Section(
        title="The tree, with acceptance at its edges",
        text=text,
        tables=[Table(columns=["node", "after node", "depth", "accepted"], rows=rows)],
        pictures=[draw_tree(tree, "The verified tree: wide edges are accepted often.")],
    )


def texts_section(results: SpeedFigures) -> Section:
    """Whether the texts are plain's, and what was left out."""
    overall = results["categories"][OVERALL]
    sentences = [
        f"{method}: {found['requests'] - found['different_texts']} of {found['requests']} texts are plain generate's"
        + (f", {found['ties']} ties of two best tokens within rounding among them" if found["ties"] else "")
        + (f"; {found['different_texts']} DIFFER beyond rounding" if found["different_texts"] else "")
        + "."
        for method, found in overall.items()
        if method != PLAIN
    ]
    left_out: Sequence[str] = results["left_out"]
    if left_out:
        shown = "; ".join(left_out[:10]) + (f"; and {len(left_out) - 10} more" if len(left_out) > 10 else "")
        sentences.append(f"Left out, since prompt and answer do not fit the backbone's positions: {shown}.")
    return Section(title="Same text?", text="\n\n".join(sentences))

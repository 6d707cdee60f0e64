"""Two pictures: perplexity and diversity by k, prefix and length (figures 8 to 11); cosines (figures 3 and 15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from benchmarks.paper.superposed.claims import Rows
from heads.evaluation.pictures import DARK, GREY, PALETTE, STYLE, new_figure, save_figure, tidy

LINES = (
    ("superposed", "superposed, best of k", "o-"),
    ("nucleus", "nucleus, one", "o:"),
    ("nucleus", "nucleus, best of k", "o-"),
    ("beam", "beam, best of k", "o-"),
)
TICKS = (5, 10, 20, 50, 100, 200, 500, 1000)
COLORS = {"superposed": PALETTE[0], "nucleus": PALETTE[1], "beam": PALETTE[2]}


def draw_quality(rows: Rows, path: Path) -> None:
    """Best perplexity along each sweep, Self-BLEU and unique n-grams by length, P@k."""
    figure = new_figure(12, 7)
    upper, lower = figure.subplots(2, 3)
    for axes, axis, label in zip(
        upper, ("drafts", "prefix", "length"), ("drafts k", "tokens of prefix", "tokens of a draft"), strict=True
    ):
        for name, words, line in LINES:
            points = rows["sweeps"][axis]
            values = [np.asarray(point[name]["perplexity"]) for point in points]
            means = [value[:, 0].mean() if words.endswith("one") else value.min(axis=1).mean() for value in values]
            axes.plot([point["value"] for point in points], means, line, color=COLORS[name], label=words)
        axes.set_yscale("log")  # one text of nucleus sampling can outweigh all others
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
        tidy(axes, "perplexity under the judge", label)
        axes.legend(fontsize=8, frameon=False)
    draw_by_length(lower[0], rows, "self_bleu", "Self-BLEU of drafts")
    draw_unique(lower[1], rows)
    draw_facts(lower[2], rows)
    save_figure(figure, path)


def draw_by_length(axes: Any, rows: Rows, measure: str, title: str) -> None:
    points = rows["sweeps"]["length"]
    for name in ("superposed", "nucleus"):
        means = [np.mean(point[name][measure]) for point in points]
        axes.plot([point["value"] for point in points], means, "o-", color=COLORS[name], label=name)
    tidy(axes, title, "tokens of a draft")
    axes.legend(fontsize=8, frameon=False)


def draw_unique(axes: Any, rows: Rows) -> None:
    points = rows["sweeps"]["length"]
    for name in ("superposed", "nucleus"):
        for n, line in enumerate((":", "--", "-")):
            means = [np.asarray(point[name]["unique"])[:, n].mean() for point in points]
            label = f"{name}, {n + 1}-grams"
            axes.plot([point["value"] for point in points], means, line, color=COLORS[name], label=label)
    tidy(axes, "share of unique n-grams in a draft", "tokens of a draft")
    axes.legend(fontsize=7, frameon=False)


def draw_facts(axes: Any, rows: Rows) -> None:
    wanted = {"greedy": GREY, "nucleus": PALETTE[1], "beam": PALETTE[2], "superposed, no n-grams": PALETTE[0]}
    for i, (name, color) in enumerate(wanted.items()):
        shares = np.mean(rows["facts"]["precision"][name], axis=0)
        places = np.arange(len(shares)) + 0.2 * i
        axes.bar(places, shares, width=0.18, color=color, label=name)
    axes.set_ylim(0, 1)
    axes.set_xticks(np.arange(len(shares)) + 0.3, [f"P@{n + 1}" for n in range(len(shares))])
    axes.legend(fontsize=7, frameon=False)
    tidy(axes, "exact match on code facts", "")


def draw_linearity(rows: Rows, path: Path) -> None:
    cosine, control = (np.asarray(rows["linearity"][name]) for name in ("cosine", "control"))
    figure = new_figure(11, 3.8)
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, cosine.shape[1] + 1)
    for values, name, color in ((cosine, "own beams", PALETTE[0]), (control, "another prefix's beams", GREY)):
        mean, spread = values[:, :, -1].mean(axis=0), values[:, :, -1].std(axis=0)
        left.plot(steps, mean, color=color, label=name)
        left.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.25)
    left.axhline(0.6, color=DARK, linestyle="--", linewidth=1)
    left.annotate("the paper: ≥ 0.6 for ten steps", (steps[-1], 0.6), ha="right", va="bottom", **STYLE)
    left.set_ylim(0, 1.02)
    left.legend(fontsize=8, frameon=False)
    tidy(left, "cosine of superposed and summed logits", "step")
    for step in range(min(5, cosine.shape[1])):
        right.plot(cosine[:, step].mean(axis=0), "o-", markersize=3, color=PALETTE[step], label=f"step {step + 1}")
    right.legend(fontsize=8, frameon=False)
    tidy(right, "by layer: 0 is the embedding, the last are the logits", "layer")
    save_figure(figure, path)

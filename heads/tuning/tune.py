"""Fit a tree to heads, machine and kind of text: measure acceptance and times, search, check, and say what was found.

The prediction is for the heads alone and for the tokens behind each prompt's own pass: tokens per pass by replay over
the seconds of a pass, which for the best static and the best dynamic tree is timed whole. With a batch it holds while
all rows run. A looked-up chain adds drafts that no model of heads foretells, so it is not predicted: the winner is
decoded with it and without it, and tree.json says which was faster on these texts.
"""
# B row, L position

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.decoding.dynamic_tree import DynamicTree
from heads.decoding.lookup import DEFAULT_LOOKUP
from heads.decoding.tree import Tree
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.tuned import Kind
from heads.interface import TokenHeads
from heads.tuning.acceptance import RankCounts
from heads.tuning.config import TuneConfig
from heads.tuning.replay import Replay, Texts, replay, write_texts
from heads.tuning.search import Choice, dynamic_choices, fastest, static_choices
from heads.tuning.speeds import Progress, Speed, measure_speeds
from heads.tuning.timing import Bench, Clock, PassTimes, interleaved_medians, measure_times

ROWS = 16
"""Texts that are written and replayed at once."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All that was measured and what follows from it.

    Attributes:
        replays: the texts that acceptance was measured on.
        static, dynamic: every tree that was considered, by the model of times.
        finalists: the fastest of either kind, their passes timed whole.
        plain: tokens a second of plain `generate`, timed in the same rounds as the finalists.
        checked: measured speeds by name, on prompts of the fit.
    """

    config: TuneConfig
    replays: Sequence[Replay]
    times: PassTimes
    static: Sequence[Choice]
    dynamic: Sequence[Choice]
    finalists: dict[Kind, Choice]
    plain: float
    checked: dict[str, Speed] = field(default_factory=dict)

    @property
    def counts(self) -> RankCounts:
        return RankCounts([replay.ranks_PK for replay in self.replays])

    @property
    def kind(self) -> Kind:
        """The faster finalist, or plain where neither beats it."""
        best = max(self.finalists, key=lambda kind: self.finalists[kind].tokens_per_second)
        return best if self.finalists[best].tokens_per_second > self.plain else "plain"

    @property
    def tree(self) -> Tree | DynamicTree:
        return Tree.root_only() if self.kind == "plain" else self.finalists[self.kind].tree


def tune(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    config: TuneConfig,
    *,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> Tuning:
    """Measure, search, and check the winner.

    Args:
        prompts: (1, T) each, at least two.
        clock: seconds; must wait for what an accelerator still computes (`clock_of`).

    Raises:
        ValueError: fewer than two prompts, or texts that end at once.
    """
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts were given; trees are grown on one half and judged on the other: 2.")
    model = token_heads.backbone.model
    rows = min(ROWS, len(prompts))
    texts = write_texts(
        model, prompts, config.request, rows=rows, advance=progress("writing texts", -(-len(prompts) // rows))
    )
    times = measure_times(
        token_heads,
        context_of(texts, config.batch),
        settings=config.settings,
        repeats=config.repeats,
        clock=clock,
        advance=progress("timing passes", config.repeats + 1),
    )
    replays = replay_all(token_heads, texts, times, progress)
    static, dynamic = list(static_choices(replays, times)), list(dynamic_choices(replays, times))
    if not static:
        raise ValueError(
            "No drafted token would ever be accepted on these prompts; train the heads further or give other prompts."
        )
    tuning = Tuning(
        config=config,
        replays=replays,
        times=times,
        static=static,
        dynamic=dynamic,
        **time_finalists(token_heads, texts, config, fastest(static), fastest(dynamic), clock, progress),
    )
    return dataclasses.replace(tuning, checked=check(token_heads, prompts, tuning, clock, progress))


def context_of(texts: Sequence[Texts], batch: int) -> Tensor:
    """(B, S): prompts and half of what was written behind them, rows repeated up to the batch size."""
    cut = [text.tokens_BL[:, : (text.valid_BT.shape[1] + text.tokens_BL.shape[1]) // 2] for text in texts]
    length = min(tokens_BL.shape[1] for tokens_BL in cut)
    rows_RS = torch.cat([tokens_BL[:, :length] for tokens_BL in cut])
    return rows_RS[torch.arange(batch, device=rows_RS.device) % len(rows_RS)]


def replay_all(token_heads: TokenHeads, texts: Sequence[Texts], times: PassTimes, progress: Progress) -> list[Replay]:
    widths = sorted({width for _, width in times.grow})
    advance = progress("replaying texts", sum(max(text.lengths) - 1 for text in texts))
    found = [
        one
        for text in texts
        for one in replay(token_heads, text, widths=widths, nodes=max(times.verify), advance=advance)
    ]
    if len(found) < 2:
        raise ValueError("The texts behind the prompts end at once; give prompts that the backbone goes on from.")
    return found


def time_finalists(
    token_heads: TokenHeads,
    texts: Sequence[Texts],
    config: TuneConfig,
    static: Choice,
    dynamic: Choice,
    clock: Clock,
    progress: Progress,
) -> dict[str, Any]:
    """The fastest of either kind and plain `generate`, passes timed whole in the same rounds."""
    bench = Bench(token_heads, context_of(texts, config.batch), clock, config.settings)
    tasks = {
        "plain": lambda: bench.seconds_per_pass(None),
        "static": bench.whole_pass(static.tree),
        "dynamic": bench.whole_pass(dynamic.tree),
    }
    seconds = interleaved_medians(tasks, config.repeats, progress("timing the best", config.repeats + 1))
    return {
        "finalists": {
            "static": dataclasses.replace(static, seconds_per_pass=seconds["static"]),
            "dynamic": dataclasses.replace(dynamic, seconds_per_pass=seconds["dynamic"]),
        },
        "plain": config.batch / seconds["plain"],
    }


def check(
    token_heads: TokenHeads, prompts: Sequence[Tensor], tuning: Tuning, clock: Clock, progress: Progress
) -> dict[str, Speed]:
    """Decode some of the prompts plainly, with lookup alone, and with the winner with and without lookup."""
    decodings = {"plain": None, "lookup alone": TreeDecoding(token_heads, Tree.root_only(), lookup=DEFAULT_LOOKUP)}
    if tuning.kind != "plain":
        decodings["tuned tree"] = TreeDecoding(token_heads, tuning.tree, lookup=0)
        decodings["tuned tree, lookup"] = TreeDecoding(token_heads, tuning.tree, lookup=DEFAULT_LOOKUP)
    return measure_speeds(token_heads.backbone.model, decodings, prompts, tuning.config, clock, progress)

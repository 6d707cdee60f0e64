"""Fit a tree to heads, machine and kind of text: measure acceptance and times, search, check, and say what was found.

The prediction is for the heads alone and for the tokens behind each prompt's own pass: tokens per pass by replay over
the seconds of a pass, which for the best static and the best dynamic trees is timed whole. With a batch it holds while
all rows run. A looked-up chain adds drafts that no model of heads foretells, so it is not predicted: the winner is
decoded with it and without it, beside the chain alone and plain `generate`, and what was fastest on these texts is what
tree.json says.
"""
# B row, L position

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import Kind
from heads.interface.token_heads import TokenHeads
from heads.tuning.acceptance import RankCounts
from heads.tuning.beside_lookup import Beside, best_beside_lookup
from heads.tuning.config import TuneConfig
from heads.tuning.replay import Replay, Texts, replay, write_texts
from heads.tuning.search import Choice, dynamic_choices, fastest, leaders, static_choices
from heads.tuning.speeds import Progress, Speed, measure_speeds
from heads.tuning.timing import Bench, Clock, PassTimes, interleaved_medians, measure_times

ROWS = 16
"""Texts that are written and replayed at once."""
PLAIN, LOOKUP_ALONE, TREE, TREE_AND_LOOKUP = "plain", "lookup alone", "tuned tree", "tree beside lookup"
"""What is decoded in the end."""
COMPILED = ", compiled"
"""Behind the name of what is decoded with compiled passes."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All that was measured and what follows from it.

    Attributes:
        replays: the texts that acceptance was measured on.
        static, dynamic: every tree that was considered, by the model of times.
        finalists: the fastest of either kind, their passes timed whole; none of a kind whose drafts are never accepted.
        plain: tokens a second of plain `generate`, timed in the same rounds as the finalists.
        beside: the static tree that is predicted to be the fastest beside a looked-up chain, one row at a time.
        calibration: seconds of whole passes over what their parts, timed earlier, add up to: parts find warmer
            caches, and machines change their speed.
        checked: measured speeds by name, on prompts of the fit; of trees the one that is predicted to be the fastest.
    """

    config: TuneConfig
    replays: Sequence[Replay]
    times: PassTimes
    static: Sequence[Choice]
    dynamic: Sequence[Choice]
    finalists: dict[Kind, Choice]
    plain: float
    checked: dict[str, Speed]
    beside: Beside | None = None
    calibration: float = 1.0

    @property
    def counts(self) -> RankCounts:
        return RankCounts([replay.ranks_PK for replay in self.replays])

    @property
    def predicted(self) -> Kind:
        """The faster finalist, or plain where none beats it."""
        return predict(self.finalists, self.plain)

    @property
    def chosen(self) -> str:
        """The fastest of what was decoded; of equals the simplest."""
        return max(self.checked, key=lambda name: self.checked[name].tokens_per_second)

    @property
    def way(self) -> str:
        """The chosen way of decoding, whether its passes are compiled or not."""
        return self.chosen.removesuffix(COMPILED)

    @property
    def compile(self) -> bool:
        return self.chosen.endswith(COMPILED)

    @property
    def kind(self) -> Kind:
        """Of the tree that was the fastest when it was decoded."""
        if self.way == TREE_AND_LOOKUP:
            return "static" if self.beside is not None else self.predicted
        return self.predicted if self.way == TREE else "plain"

    @property
    def lookup(self) -> int:
        return DEFAULT_LOOKUP if self.way in (LOOKUP_ALONE, TREE_AND_LOOKUP) else 0

    @property
    def tree(self) -> Tree | DynamicTree:
        if self.kind == "plain":
            return Tree.root_only()
        if self.way == TREE_AND_LOOKUP and self.beside is not None:
            return self.beside.choice.tree
        return self.finalists[self.kind].tree


def predict(finalists: dict[Kind, Choice], plain: float) -> Kind:
    best = max(finalists, key=lambda kind: finalists[kind].tokens_per_second, default=None)
    return "plain" if best is None or finalists[best].tokens_per_second <= plain else best


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
    bench = Bench(token_heads, context_of(texts, config.batch), clock, config.settings)
    advance = progress("timing the best", config.repeats + 1)
    finalists, plain = time_finalists(bench, leaders(static), leaders(dynamic), config.repeats, advance)
    calibration = whole_over_modelled(static, finalists)
    kind = predict(finalists, plain)
    winner = None if kind == "plain" else finalists[kind].tree
    beside = None
    if config.batch == 1:  # in a batch chains wait for each other, which is not played
        slower = [dataclasses.replace(one, seconds_per_pass=calibration * one.seconds_per_pass) for one in static]
        beside = best_beside_lookup(slower, replays, times.scaled(calibration), DEFAULT_LOOKUP)
    return Tuning(
        config=config,
        replays=replays,
        times=times,
        static=static,
        dynamic=dynamic,
        finalists=finalists,
        plain=plain,
        beside=beside,
        calibration=calibration,
        checked=check(token_heads, prompts, winner, beside, config, clock, progress),
    )


def whole_over_modelled(static: Sequence[Choice], finalists: dict[Kind, Choice]) -> float:
    """What the fastest static tree took, timed whole, over what its parts say; 1 where there is none."""
    if (whole := finalists.get("static")) is None:
        return 1.0
    modelled = next(one.seconds_per_pass for one in static if one.tree is whole.tree)
    return whole.seconds_per_pass / modelled


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
    bench: Bench, static: Sequence[Choice], dynamic: Sequence[Choice], repeats: int, advance: Callable[[], Any]
) -> tuple[dict[Kind, Choice], float]:
    """The fastest of either kind and plain tokens a second, whole passes of all of them timed in the same rounds.

    Args:
        static, dynamic: the leaders of a kind; a kind without any has no finalist.
        advance: called `repeats` + 1 times.
    """
    choices: dict[Kind, Sequence[Choice]] = {"static": static, "dynamic": dynamic}
    tasks = {(kind, i): bench.whole_pass(one.tree) for kind, found in choices.items() for i, one in enumerate(found)}
    seconds = interleaved_medians({("plain", 0): lambda: bench.seconds_per_pass(None), **tasks}, repeats, advance)
    finalists = {
        kind: fastest([dataclasses.replace(one, seconds_per_pass=seconds[kind, i]) for i, one in enumerate(found)])
        for kind, found in choices.items()
        if found
    }
    return finalists, len(bench.tokens_BS) / seconds["plain", 0]


def check(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    winner: Tree | DynamicTree | None,
    beside: Beside | None,
    config: TuneConfig,
    clock: Clock,
    progress: Progress,
) -> dict[str, Speed]:
    """Decode some of the prompts plainly, with lookup alone, with the winner alone and with a tree beside lookup.

    With `config.compile` each of ours once more with compiled passes, behind a round in which their graphs are made.
    """
    ways: dict[str, tuple[Tree | DynamicTree, int]] = {LOOKUP_ALONE: (Tree.root_only(), DEFAULT_LOOKUP)}
    if winner is not None:
        ways[TREE] = winner, 0
    with_chain = winner if beside is None else beside.choice.tree
    if with_chain is not None:
        ways[TREE_AND_LOOKUP] = with_chain, DEFAULT_LOOKUP

    def all_ways(compile: bool) -> dict[str, TreeDecoding | None]:
        return {
            name + COMPILED * compile: TreeDecoding(token_heads, tree, lookup=lookup, compile=compile)
            for name, (tree, lookup) in ways.items()
        }

    model, decodings = token_heads.backbone.model, {PLAIN: None, **all_ways(compile=False)}
    if config.compile:
        compiled = all_ways(compile=True)
        measure_speeds(model, compiled, prompts, config, clock, lambda _, total: progress("compiling", total))
        decodings |= compiled
    return measure_speeds(model, decodings, prompts, config, clock, progress)

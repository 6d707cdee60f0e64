"""Fit a tree to heads, machine and kind of text: measure acceptance and times, search, and decode with the best tree.

The predicted speed is the replayed tokens per pass divided by the seconds of a pass, without lookup and without the
prompt's pass; whole passes are timed for the best static and dynamic trees. For a batch the prediction holds until the
first row ends. The best tree is then decoded with and without lookup, beside lookup alone and plain `generate`, and
tree.json names the method that was fastest on these texts.
"""
# B row, S context position, L token of a row

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import Kind
from heads.interface.token_heads import TokenHeads
from heads.tuning.config import TuneConfig
from heads.tuning.decoding_speed import Progress, Speed, measure_speeds
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import Replay, Texts, replay, write_texts
from heads.tuning.search import Choice, dynamic_choices, fastest, leaders, static_choices
from heads.tuning.timing import Clock, PassTimer, interleaved_medians, measure_times
from heads.tuning.tree_with_lookup import TreeWithLookup, best_tree_with_lookup
from heads.tuning.tuned_tree import COMPILED, LOOKUP_ALONE, PLAIN, TREE, TREE_AND_LOOKUP, Tuning, predict_kind

ROWS = 16
"""How many texts are generated and replayed in one batch."""


def tune(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    config: TuneConfig,
    *,
    clock: Clock,
) -> Tuning:
    """Measure, search, and decode with the best tree, at one batch size.

    Args:
        prompts: (1, T) each, at least two.
        clock: returns seconds; must wait for an accelerator to finish (`clock_of`).

    Raises:
        ValueError: fewer than two prompts, or fewer than two texts with two new tokens.
    """
    return tune_batches(token_heads, prompts, [config], clock=clock)[0]


def tune_batches(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    configs: Sequence[TuneConfig],
    *,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> list[Tuning]:
    """`tune` for configs that differ only in batch size; texts are generated and replayed once."""
    if len(prompts) < 2:
        raise ValueError(
            f"{len(prompts)} prompts were given; trees are grown on one half and tested on the other, so give 2."
        )
    rows = min(ROWS, len(prompts))
    texts = write_texts(
        token_heads.backbone.model,
        prompts,
        configs[0].request,
        rows=rows,
        advance=progress("writing texts", -(-len(prompts) // rows)),
    )
    replays: list[Replay] = []
    found = []
    for config in configs:
        times = measure_times(
            token_heads,
            context_of(texts, config.batch),
            settings=config.settings,
            repeats=config.repeats,
            clock=clock,
            advance=progress(f"timing passes, batch {config.batch}", config.repeats + 1),
        )
        replays = replays or replay_all(token_heads, texts, times, progress)
        found.append(fit(token_heads, prompts, config, texts, times, replays, clock, progress))
    return found


def fit(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    config: TuneConfig,
    texts: Sequence[Texts],
    times: PassTimes,
    replays: Sequence[Replay],
    clock: Clock,
    progress: Progress,
) -> Tuning:
    """Search for the best tree with these times, and decode with it."""
    static, dynamic = list(static_choices(replays, times)), list(dynamic_choices(replays, times))
    timer = PassTimer(token_heads, context_of(texts, config.batch), clock, config.settings)
    advance = progress("timing the best", config.repeats + 1)
    finalists, plain = time_finalists(timer, leaders(static), leaders(dynamic), config.repeats, advance)
    calibration = whole_over_modelled(static, finalists)
    kind = predict_kind(finalists, plain)
    winner = None if kind == "plain" else finalists[kind].tree
    with_lookup = None
    if config.batch == 1:  # rows of a batch wait for each other, which is not simulated
        slower = [dataclasses.replace(one, seconds_per_pass=calibration * one.seconds_per_pass) for one in static]
        with_lookup = best_tree_with_lookup(slower, replays, times.scaled(calibration), DEFAULT_LOOKUP)
    return Tuning(
        config=config,
        replays=replays,
        times=times,
        static=static,
        dynamic=dynamic,
        finalists=finalists,
        plain=plain,
        with_lookup=with_lookup,
        calibration=calibration,
        decoded=decode_winner(token_heads, prompts, winner, with_lookup, config, clock, progress),
    )


def whole_over_modelled(static: Sequence[Choice], finalists: dict[Kind, Choice]) -> float:
    """The measured seconds of the fastest static tree's passes over the modelled ones; 1 if there is no such tree."""
    if (whole := finalists.get("static")) is None:
        return 1.0
    modelled = next(one.seconds_per_pass for one in static if one.tree is whole.tree)
    return whole.seconds_per_pass / modelled


def context_of(texts: Sequence[Texts], batch: int) -> Tensor:
    """(B, S): prompts with half of the texts after them, with rows repeated up to the batch size."""
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
        raise ValueError("The texts end right after the prompts; give prompts that the backbone continues.")
    return found


def time_finalists(
    timer: PassTimer, static: Sequence[Choice], dynamic: Sequence[Choice], repeats: int, advance: Callable[[], Any]
) -> tuple[dict[Kind, Choice], float]:
    """The fastest tree of each kind, and plain tokens per second, timed in the same rounds of whole passes.

    Args:
        static, dynamic: the leaders of each kind; a kind without leaders has no finalist.
        advance: called `repeats` + 1 times.
    """
    choices: dict[Kind, Sequence[Choice]] = {"static": static, "dynamic": dynamic}
    tasks = {(kind, i): timer.whole_pass(one.tree) for kind, found in choices.items() for i, one in enumerate(found)}
    seconds = interleaved_medians({("plain", 0): lambda: timer.seconds_per_pass(None), **tasks}, repeats, advance)
    finalists = {
        kind: fastest([dataclasses.replace(one, seconds_per_pass=seconds[kind, i]) for i, one in enumerate(found)])
        for kind, found in choices.items()
        if found
    }
    return finalists, len(timer.tokens_BS) / seconds["plain", 0]


def decode_winner(
    token_heads: TokenHeads,
    prompts: Sequence[Tensor],
    winner: Tree | DynamicTree | None,
    with_lookup: TreeWithLookup | None,
    config: TuneConfig,
    clock: Clock,
    progress: Progress,
) -> dict[str, Speed]:
    """The speeds of plain `generate`, of lookup alone, of the best tree alone, and of a tree with lookup.

    With `config.compile` all but the first are measured with compiled passes too, after a round that compiles them.
    """
    methods: dict[str, tuple[Tree | DynamicTree, int]] = {LOOKUP_ALONE: (Tree.root_only(), DEFAULT_LOOKUP)}
    if winner is not None:
        methods[TREE] = winner, 0
    with_chain = winner if with_lookup is None else with_lookup.choice.tree
    if with_chain is not None:
        methods[TREE_AND_LOOKUP] = with_chain, DEFAULT_LOOKUP

    def build(compile: bool) -> dict[str, TreeDecoding | None]:
        return {
            name + COMPILED * compile: TreeDecoding(token_heads, tree, lookup=lookup, compile=compile)
            for name, (tree, lookup) in methods.items()
        }

    model, decodings = token_heads.backbone.model, {PLAIN: None, **build(compile=False)}
    if config.compile:
        compiled = build(compile=True)
        measure_speeds(model, compiled, prompts, config, clock, lambda _, total: progress("compiling", total))
        decodings |= compiled
    return measure_speeds(model, decodings, prompts, config, clock, progress)

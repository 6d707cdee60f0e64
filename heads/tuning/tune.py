"""Fit a tree to heads, machine and kind of text: measure acceptance and times, search, check, and say what was found.

The prediction is for the heads alone and for the tokens behind each prompt's own pass: tokens per pass by replay over
the seconds of a pass, which for the best static and the best dynamic tree is timed whole. With a batch it holds while
all rows run. A looked-up chain adds drafts that no model of heads foretells, so it is not predicted: the winner is
decoded with it and without it, and tree.json says which was faster on these texts.
"""
# B row, L position

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.decoding.dynamic_tree import DynamicTree
from heads.decoding.generate import generate
from heads.decoding.lookup import DEFAULT_LOOKUP
from heads.decoding.tree import Tree
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.tuned import Kind, TunedTree, name_dtype
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import end_tokens
from heads.interface import TokenHeads
from heads.tuning.acceptance import RankCounts
from heads.tuning.replay import Replay, Texts, length_of, pad_left, replay, write_texts
from heads.tuning.search import Choice, dynamic_choices, fastest, static_choices
from heads.tuning.timing import Bench, Clock, PassTimes, Stamps, interleaved_medians, measure_times

ROWS = 16
"""Texts that are written and replayed at once."""
Progress = Callable[[str, int], Callable[[], Any]]
"""Begins a stage of so many steps; what it returns is called at each."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What a tree is fitted for.

    Attributes:
        new_tokens: written behind each prompt.
        batch: rows decoded at once.
        repetition_penalty, temperature: as in `generate`; temperature 0 is greedy.
        repeats: rounds of timing, of which medians are taken.
        checked_prompts: prompts that the winner is decoded on, at least one batch.

    Raises:
        ValueError: a number outside of what is allowed.
    """

    new_tokens: int = 128
    batch: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 0.0
    repeats: int = 15
    checked_prompts: int = 4

    def __post_init__(self) -> None:
        for name, least in {"new_tokens": 2, "batch": 1, "repeats": 1, "checked_prompts": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} was given; allowed are {least} and more.")

    @property
    def request(self) -> dict[str, Any]:
        """Sampling settings for `generate`."""
        settings: dict[str, Any] = {"do_sample": self.temperature > 0, "max_new_tokens": self.new_tokens}
        if self.temperature > 0:
            settings["temperature"] = self.temperature
        if self.repetition_penalty != 1:
            settings["repetition_penalty"] = self.repetition_penalty
        return settings


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured on whole texts, the prompts' passes and first tokens left out."""

    tokens_per_pass: float
    tokens_per_second: float


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
    bench = Bench(token_heads, context_of(texts, config.batch), clock)
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


def measure_speeds(
    model: Any,
    decodings: dict[str, TreeDecoding | None],
    prompts: Sequence[Tensor],
    config: TuneConfig,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> dict[str, Speed]:
    """Each decoding (None: plain `generate`) on the first prompts, in batches, one decoding after the other."""
    wanted = max(config.checked_prompts, config.batch)
    count = wanted - wanted % config.batch
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    batches = [chosen[i : i + config.batch] for i in range(0, count, config.batch)]
    totals = {name: [0.0, 0.0, 0.0] for name in decodings}  # tokens, row passes, seconds
    advance = progress("decoding", len(batches) * len(decodings))
    for batch in batches:
        for name, decoding in decodings.items():
            totals[name] = [
                a + b for a, b in zip(totals[name], decode(model, decoding, batch, config, clock), strict=True)
            ]
            advance()
    return {
        name: Speed(tokens_per_pass=tokens / max(1, passes), tokens_per_second=tokens / seconds)
        for name, (tokens, passes, seconds) in totals.items()
    }


def decode(
    model: Any, decoding: TreeDecoding | None, prompts: Sequence[Tensor], config: TuneConfig, clock: Clock
) -> tuple[float, float, float]:
    """Tokens, passes of a row and seconds of one `generate` call, without the prompt's pass and each first token."""
    tokens_BT, valid_BT = pad_left(prompts)
    stamps = Stamps(clock)
    output = generate(
        model,
        decoding,
        input_ids=tokens_BT,
        attention_mask=valid_BT.long(),
        return_dict_in_generate=True,
        streamer=stamps,
        **config.request,
    )
    rows = len(prompts)
    new = output.sequences[:, tokens_BT.shape[1] :].tolist()
    tokens = sum(length_of(row, end_tokens(model)) for row in new) - rows
    if decoding is None:
        return tokens, tokens, stamps.seconds[-1] - stamps.seconds[0]
    return tokens, output.stats.row_passes - rows, stamps.seconds[-1] - stamps.seconds[rows - 1]


def tuned_tree(token_heads: TokenHeads, tuning: Tuning, *, num_prompts: int) -> TunedTree:
    """What goes into tree.json."""
    backbone, kind = token_heads.backbone, tuning.kind
    static = tuning.finalists["static"].tree
    dynamic = tuning.finalists["dynamic"].tree
    assert isinstance(static, Tree)
    assert isinstance(dynamic, DynamicTree)
    return TunedTree(
        kind=kind,
        paths=() if kind == "plain" else static.paths[1:],
        dynamic=dynamic if kind == "dynamic" else None,
        lookup=choose_lookup(tuning),
        prediction=describe_prediction(tuning),
        measured_on={
            **describe_machine(backbone.device),
            "device_type": backbone.device.type,
            "dtype": name_dtype(backbone.dtype),
            "batch": tuning.times.batch,
            "context": tuning.times.context,
            "prompts": num_prompts,
            **dataclasses.asdict(tuning.config),
            "versions": versions(),
        },
        heads_sha256=token_heads.checksum,
    )


def choose_lookup(tuning: Tuning) -> int:
    """The looked-up chain stands beside the tree where it was faster with it, on the prompts that were decoded."""
    alone, beside = ("plain", "lookup alone") if tuning.kind == "plain" else ("tuned tree", "tuned tree, lookup")
    faster = tuning.checked[beside].tokens_per_second > tuning.checked[alone].tokens_per_second
    return DEFAULT_LOOKUP if faster else 0


def describe_prediction(tuning: Tuning) -> dict[str, Any]:
    """Of the heads alone, behind each prompt's own pass."""
    if tuning.kind == "plain":
        best = max(choice.tokens_per_second for choice in tuning.finalists.values())
        return {
            "tokens_per_pass": 1.0,
            "tokens_per_second": round(tuning.plain, 2),
            "ratio_to_plain": 1.0,
            "best_tree_ratio_to_plain": round(best / tuning.plain, 3),
        }
    choice = tuning.finalists[tuning.kind]
    return {
        "tokens_per_pass": round(choice.tokens_per_pass, 3),
        "tokens_per_second": round(choice.tokens_per_second, 2),
        "ratio_to_plain": round(choice.tokens_per_second / tuning.plain, 3),
        "milliseconds_per_pass": round(1000 * choice.seconds_per_pass, 3),
        "lookup": 0,
    }

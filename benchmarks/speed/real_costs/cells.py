"""What is measured of one shape in one dtype: what a pass costs, and methods side by side at one batch size.

Every method decodes the same groups of prompts, in turn with plain `generate`. End tokens do not end a text, so all
rows of a batch are equally long. Trees are chosen for the shape: acceptance is replayed on the demo's own backbone,
which computes the same function, and passes are timed on the widened one.
"""
# B row of a group, T prompt position, L text position

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared import held_out
from benchmarks.speed.pass_costs import filled_state, make_pass
from benchmarks.speed.real_costs.methods import assisted_method, compiled_methods, make_method
from benchmarks.speed.real_costs.widened import Widened, packed_twin
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.static import Tree
from heads.evaluation.generated_text import Verdict
from heads.evaluation.methods import LOOKUP_ALONE, GreedySettings, Method, Settings
from heads.evaluation.same_text import Float32Judge, SameText
from heads.evaluation.throughput import clock_of, compare
from heads.tuning.config import TuneConfig
from heads.tuning.replay import write_texts
from heads.tuning.report import describe
from heads.tuning.search import Choice, fastest, static_choices
from heads.tuning.timing import interleaved_medians, measure_times
from heads.tuning.tune import context_of, replay_all

NODES = (1, 4, 8, 16, 32, 64)
CONTEXT = 128  # committed tokens before a pass that is timed
ROUNDS = 3  # of times for a tuned tree, of which medians are taken
BEST = "grounded"
"""The family that is also measured with a tuned tree, and beside a looked-up chain."""
PACKED = "packed"
TUNED = "tuned"
ALSO_PACKED = ("plain", f"{BEST} alone", f"{BEST} alone, {TUNED}", LOOKUP_ALONE, f"{BEST} with lookup")


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Median milliseconds of a pass by its nodes, with "plain" weights and, if they can be packed, with packed ones."""

    shape: str
    dtype: str
    milliseconds: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class MethodSpeed:
    """One method: `interval` is the ratio's 95 % interval over groups of prompts, `tree` what it verified.

    `repeated_4grams` is the share of its texts' 4-grams that stood in them before, which copying lives on.
    """

    method: str
    tree: str
    tokens_per_pass: float
    tokens_per_second: float
    ratio: float
    interval: tuple[float, float]
    same_text: str
    repeated_4grams: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Methods at one batch size; the first is plain `generate`. `decoding` says how all of them choose tokens."""

    shape: str
    dtype: str
    batch: int
    decoding: str
    lines: list[Any]

    def __post_init__(self) -> None:
        """Turn the dicts of a file into lines."""
        object.__setattr__(self, "lines", [MethodSpeed(**x) if isinstance(x, dict) else x for x in self.lines])


def measure_passes(widened: Widened, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds by form and nodes, in interleaved rounds; the first round allocates memory and is not counted."""
    forms = {"plain": widened, PACKED: packed_twin(widened)}
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    for form, one in forms.items():
        if one is not None:
            backbone = next(iter(one.token_heads.values())).backbone
            clock, state = clock_of(backbone.device), filled_state(backbone, CONTEXT)
            tasks |= {(form, nodes): timed(make_pass(backbone, state, nodes), clock) for nodes in NODES}
    found = interleaved_medians(tasks, rounds)
    return {form: {str(nodes): 1000 * found[form, nodes] for nodes in NODES} for form in forms if (form, 1) in found}


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> Callable[[], float]:
    """A function that runs `run` and returns its seconds."""

    def measured() -> float:
        start = clock()
        run()
        return clock() - start

    return measured


def groups_of(widened: Widened, count: int, batch: int) -> list[Tensor]:
    """`count` groups (B, T) of held-out prompts."""
    prompts = held_out(widened.narrow, count * batch)
    return [torch.cat(prompts[i::count]) for i in range(count)]


def measure_speeds(
    widened: Widened, settings: Settings, batch: int, groups: int, *, repeats: int, tuned: bool, compile: bool
) -> list[MethodSpeed]:
    """Measure plain, each family's heads alone, and for the best family a tuned tree, lookup alone, and both together.

    With `compile`, the best family and plain are also compiled; groups of one row have `assistant_model` too.
    """
    prompts = groups_of(widened, groups, batch)
    methods, trees = build_methods(widened, settings, batch, tuned=tuned)
    if BEST in widened.token_heads and (twin := packed_twin(widened)) is not None:
        more, their_trees = build_methods(twin, settings, batch, tuned=tuned)
        packed = [replace(method, name=f"{method.name}, {PACKED}") for method in more if method.name in ALSO_PACKED]
        methods += packed
        trees |= {f"{name}, {PACKED}": tree for name, tree in their_trees.items()}
    if BEST in widened.token_heads and batch == 1:
        methods.append(assisted_method(widened, settings))
    if BEST in widened.token_heads and compile:
        more, decodings = compiled_methods(widened, settings, BEST)
        methods += more
        trees |= {name: describe(one.settings.at(batch).tree) for name, one in decodings.items()}
    same = SameRows(widened, settings)
    found = compare(methods, prompts, repeats=repeats, verdict=same, clock=clock_of(widened.model.device))
    return [
        MethodSpeed(
            method=row.name,
            tree=trees.get(row.name, ""),
            tokens_per_pass=row.tokens_per_pass,
            tokens_per_second=row.tokens_per_second,
            ratio=row.ratio,
            interval=row.interval,
            same_text=row.same_text,
            repeated_4grams=row.repeated_4grams,
        )
        for row in found
    ]


def build_methods(
    widened: Widened, settings: Settings, batch: int, *, tuned: bool
) -> tuple[list[Method], dict[str, str]]:
    """The methods, plain `generate` first, and by method the words for its tree."""
    decodings: dict[str, TreeDecoding | None] = {"plain": None}
    for name, token_heads in widened.token_heads.items():
        decodings[f"{name} alone"] = TreeDecoding(token_heads, lookup=0)
    if (best := widened.token_heads.get(BEST)) is not None:
        if tuned and isinstance(settings, GreedySettings) and (choice := tuned_choice(widened, settings, batch)):
            decodings[f"{BEST} alone, {TUNED}"] = TreeDecoding(best, choice.tree, lookup=0)
        decodings[LOOKUP_ALONE] = TreeDecoding(best, Tree.root_only(), lookup=DEFAULT_LOOKUP)
        decodings[f"{BEST} with lookup"] = TreeDecoding(best, lookup=DEFAULT_LOOKUP)
    trees = {name: describe(one.settings.at(batch).tree) for name, one in decodings.items() if one is not None}
    methods = [make_method(name, widened.model, settings, decoding) for name, decoding in decodings.items()]
    return methods, trees | {LOOKUP_ALONE: "a chain"}


def tuned_choice(widened: Widened, settings: GreedySettings, batch: int) -> Choice | None:
    """The static tree with most tokens a second in this shape; None where no draft is accepted."""
    config = TuneConfig(
        new_tokens=settings.new_tokens, batch=batch, repetition_penalty=settings.repetition_penalty, repeats=ROUNDS
    )
    prompts = held_out(widened.narrow, 32)[1::2]
    narrow, wide = widened.narrow.token_heads[BEST], widened.token_heads[BEST]
    texts = write_texts(narrow.backbone.model, prompts, config.request, rows=len(prompts), advance=lambda: None)
    clock = clock_of(wide.backbone.device)
    times = measure_times(wide, context_of(texts, batch), settings=config.settings, repeats=config.repeats, clock=clock)
    choices = list(static_choices(replay_all(narrow, texts, times, lambda what, total: lambda: None), times))
    return fastest(choices) if choices else None


class SameRows:
    """Compares a group's texts with plain generation's row by row.

    Where bfloat16 texts differ, float32 scores of the demo's own backbone, which is the same function, decide whether
    rounding explains it.
    """

    def __init__(self, widened: Widened, settings: Settings) -> None:
        judge = None
        if widened.model.dtype != torch.float32:
            judge = Float32Judge(model=widened.model, settings=settings)
            judge._copy = copy.copy(widened.narrow.model)
        self.same = SameText(model=widened.model, settings=settings, float32=judge)
        self.length = settings.new_tokens

    def __call__(self, prompts_BT: Tensor, plain: list[int], ours: list[int]) -> Verdict:
        """The first difference that is not excused, if any, counted over all rows."""
        rows, ties = len(prompts_BT), 0
        for b in range(rows):
            at = slice(b * self.length, (b + 1) * self.length)
            found = self.same(prompts_BT[b : b + 1], plain[at], ours[at])
            if found.differs_at is not None:
                return Verdict(differs_at=b * self.length + found.differs_at)
            ties += found.ties
        return Verdict(ties=ties)

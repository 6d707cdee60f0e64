"""What is measured of one setting: methods side by side, the parts of a millisecond, and dynamic decoding."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from benchmarks.speed.decoding.report import (
    ALONE,
    COMPILED,
    WITH_LOOKUP,
    scaled,
)
from benchmarks.speed.decoding.time_by_part import Parts, Watched, measure_parts, watch_heads, watch_plain
from benchmarks.speed.decoding.trees import Fitted
from heads.backbone.compiling.compiled_backbone import compiled
from heads.checkpoint.opening import Opened
from heads.decoding.proposers.heads import compiled_drafting
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import (
    Method,
    SampledSettings,
    Settings,
    TreeShape,
    assistant_model,
    draft_model,
    dynamic,
    lookup_alone,
    plain,
    plain_compiled,
    prompt_lookup,
    tree,
)
from heads.evaluation.tables import measure, progress_bar
from heads.evaluation.throughput import MethodResult
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One backbone with its heads, the trees that were fitted to these (none: the defaults), and the prompts."""

    opened: Opened
    fitted: Mapping[str, Fitted]
    prompts: Sequence[Tensor]
    repeats: int
    other_model: Any


def measure_setting(
    console: Console,
    ours: Measured,
    own: Measured | None,
    settings: Settings,
    name: str,
    compile: bool,
    draft: Any,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All figures of one setting: rows, parts of a millisecond, dynamic decoding's rows, and what compiling took."""
    rows, warm_up = measure_speed(console, ours, settings, name, compile, draft)
    prompts = options.parts_prompts
    parts = measure_where(console, ours, settings, name, prompts, rows) if prompts else []
    dynamic_rows = [] if own is None else measure_dynamic(console, own, settings, name, options.threshold)
    found: dict[str, Sequence[Any]] = {"rows": rows, "parts": parts, "dynamic": dynamic_rows}
    return {kind: [dataclasses.asdict(row) for row in listed] for kind, listed in found.items()} | {
        "warm_up": warm_up,
        "parts_prompts": min(prompts, len(ours.prompts)),
    }


def tree_methods(
    ours: Measured, settings: Settings, kind: str, *, compile: bool = False
) -> list[tuple[TokenHeads, Method]]:
    """Each folder of heads, alone or with lookup, with its fitted or its default tree."""
    found = []
    for name, heads in ours.opened.token_heads.items():
        lookup = 0 if kind == ALONE else DEFAULT_LOOKUP
        label = f"{name}{kind}{COMPILED if compile else ''}"
        shape = shape_of(ours, name, kind)
        found.append((heads, tree(ours.opened.model, heads, settings, label, shape, lookup, compile)))
    return found


def shape_of(ours: Measured, name: str, kind: str) -> TreeShape:
    """The tree of a row; None is the heads' default."""
    fitted = ours.fitted.get(name)
    return None if fitted is None else fitted.shape(lookup=kind == WITH_LOOKUP, device=ours.opened.model.device)


def build_methods(ours: Measured, settings: Settings, draft: Any) -> list[Method]:
    """All methods of a table that do not compile: heads alone first, then what copies, then the draft model."""
    model, (first, *_) = ours.opened.model, ours.opened.token_heads.values()
    methods = [plain(model, settings), *(method for _, method in tree_methods(ours, settings, ALONE))]
    if isinstance(settings, SampledSettings):
        for name, heads in ours.opened.token_heads.items():
            label = f"{name}{ALONE}, typical acceptance"
            methods.append(tree(model, heads, settings, label, shape_of(ours, name, ALONE), 0, rule="typical"))
    methods += [lookup_alone(model, first, settings), prompt_lookup(model, settings)]
    methods += [method for _, method in tree_methods(ours, settings, WITH_LOOKUP)]
    if draft is not None:
        methods += [draft_model(model, draft, settings), assistant_model(model, draft, settings)]
    return methods


def measure_speed(
    console: Console, ours: Measured, settings: Settings, name: str, compile: bool, draft: Any
) -> tuple[list[MethodResult], str]:
    """Compare all methods; returns their rows and, with `compile`, a sentence on what compiling took."""
    model, warm_up = ours.opened.model, ""
    methods = build_methods(ours, settings, draft)
    if compile:
        graphs = compiled_methods(ours, settings)
        warm_up = compile_first(ours.opened, graphs, ours.prompts)
        methods += graphs
    rows = measure(
        console, model, methods, settings, ours.prompts, ours.repeats, f"speed, {name}", other_model=ours.other_model
    )
    return rows, warm_up


def compiled_methods(ours: Measured, settings: Settings) -> list[Method]:
    """What compiles, in the order of `build_methods`, so that compiled rows have compiled rows to stand beside."""
    model, (first, *_) = ours.opened.model, ours.opened.token_heads.values()
    alone, with_lookup = (
        [method for _, method in tree_methods(ours, settings, kind, compile=True)] for kind in (ALONE, WITH_LOOKUP)
    )
    copied = lookup_alone(model, first, settings, compile=True)
    return [plain_compiled(model, settings), *alone, copied, *with_lookup]


def compile_first(opened: Opened, methods: Sequence[Method], prompts: Sequence[Tensor]) -> str:
    """Compile every graph of the run outside all timings; returns a sentence with the seconds.

    Which graphs a looked-up chain needs depends on the text, so rows with lookup read all prompts; others need two.
    """
    before = compile_seconds(opened)
    start = time.perf_counter()
    for method in methods:
        for prompt_1T in prompts if "lookup" in method.name else prompts[:2]:
            method.run(prompt_1T)
    graphs, seconds = (now - then for now, then in zip(compile_seconds(opened), before, strict=True))
    return (
        f"warm-up with compiling, not in the tables: {time.perf_counter() - start:.0f} s, of which our {graphs:.0f} "
        f"new graphs took {seconds:.0f} s"
    )


def compile_seconds(opened: Opened) -> tuple[int, float]:
    """The number of graphs compiled so far, for passes and for drafting, and the seconds of compiling."""
    all_heads = list(opened.token_heads.values())
    made = [compiled(all_heads[0].backbone).compile_seconds, *(compiled_drafting(h).compile_seconds for h in all_heads)]
    return sum(map(len, made)), sum(sum(seconds.values()) for seconds in made)


def measure_dynamic(
    console: Console, own: Measured, settings: Settings, name: str, threshold: float
) -> list[MethodResult]:
    """Dynamic decoding, and trees of the same heads, against plain generation of their own backbone."""
    model, ((folder, token_heads),) = own.opened.model, own.opened.token_heads.items()
    methods = [
        dataclasses.replace(plain(model, settings), name=f"plain, {folder}'s own backbone"),
        dynamic(model, token_heads, settings, f"{folder}, dynamic, threshold {threshold}", threshold),
        *(method for _, method in tree_methods(own, settings, ALONE)),
        lookup_alone(model, token_heads, settings),
        *(method for _, method in tree_methods(own, settings, WITH_LOOKUP)),
    ]
    what = f"dynamic, {name}"
    return measure(console, model, methods, settings, own.prompts, own.repeats, what, other_model=own.other_model)


def measure_where(
    console: Console,
    ours: Measured,
    settings: Settings,
    name: str,
    num_prompts: int,
    rows: Sequence[MethodResult],
) -> list[Parts]:
    """Measure the parts of plain generate and of each of our methods, as shares of their rows' milliseconds."""
    model, prompts = ours.opened.model, ours.prompts[:num_prompts]
    watched: list[tuple[Method, Watched]] = [(plain(model, settings), functools.partial(watch_plain, model))]
    for kind in (ALONE, WITH_LOOKUP):
        for token_heads, method in tree_methods(ours, settings, kind):
            watched.append((method, functools.partial(watch_heads, token_heads)))
    runs = len(watched) * len(prompts) * ours.repeats
    with progress_bar(console, f"milliseconds, {name}", runs) as advance:
        found = measure_parts(watched, prompts, ours.repeats, model.device, advance)
    return scaled(found, rows)

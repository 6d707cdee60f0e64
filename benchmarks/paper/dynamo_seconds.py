"""Judged texts of dynamic decoding with seconds: what dynamo_sentences.py and dynamo_sizes.py share.

Texts, judge, win rates and lines are those of `headway evaluate HEADS --suite sentence-completion`, and stored. Seconds
are never stored: a plain text and a dynamic one are timed right after each other, so that load on the machine slows
both down, and the speed-up is the sum of plain seconds over the sum of dynamic ones for as many tokens.
"""
# E value of ε_b, P prompt, R repeat

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from benchmarks.shared import NGRAMS
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.judged.sentences import Prompt, prompts_of
from heads.evaluation.judged.win_rates import Figures, line_of_scores, sum_up
from heads.evaluation.judged.writing import open_baseline, write
from heads.evaluation.runs.rows import Rows
from heads.evaluation.runs.task import SuiteTask, fingerprint, settings_of
from heads.evaluation.suites.sentence_completion import Config, run
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import clock_of
from heads.ngrams.table import NgramTable

KEPT = Path("checkpoints/runs/dynamo-sentences")


def add_judging_flags(parser: argparse.ArgumentParser, *, seeds: int, step: float, repeats: int) -> None:
    """Add the flags that say which texts are written, who judges them, and how often they are timed."""
    parser.add_argument("--prompts", choices=["code", "english"], default="code", help="english: table 7")
    parser.add_argument("--seeds", type=int, default=seeds, help="texts of each prompt")
    parser.add_argument("--step", type=float, default=step, help="between values of ε_b")
    parser.add_argument("--tokens", type=int, default=32, help="most new tokens of a text")
    parser.add_argument("--repeats", type=int, default=repeats, help="timings of each prompt and ε_b, plain in turn")
    judge = "endpoint (HEADWAY_JUDGE_URL, HEADWAY_JUDGE_MODEL), or another model's folder for its log-likelihood"
    parser.add_argument("--judge", default="checkpoints/demo/draft", help=judge)
    parser.add_argument(
        "--prices",
        type=float,
        nargs=2,
        default=[],
        metavar=("ASKED", "ANSWERED"),
        help="dollars for a million tokens of an endpoint; the price of questions is said before they are asked",
    )


def config_of(options: argparse.Namespace, **given: Any) -> Config:
    """The suite's options: its own thresholds, with the demo's n-grams as co-occurrence masks as in the paper.

    The suite's order of thresholds, "otsu_first", is the only one of five that made text likelier beyond noise, and
    that only under the model that wrote it (docs/decisions.md).
    """
    asked = options.judge == "endpoint"
    settings: dict[str, Any] = {
        "judge": "endpoint" if asked else "likelihood",
        "judge_model": None if asked else options.judge,
        "prices": list(options.prices),
        "prompts": options.prompts,
        "draws": options.seeds,
        "step": options.step,
        "max_new_tokens": options.tokens,
        "cooccurrence": NGRAMS,
    }
    return Config(**settings | given)


def judge_texts(heads: str, config: Config) -> dict[str, Any]:
    """The suite's results; texts and verdicts of an earlier call of the same settings are read."""
    task = SuiteTask(folder=Path(heads))
    folders = [heads, config.judge_model, config.cooccurrence]
    settings = {
        "config": settings_of(config),
        "folders": [fingerprint(Path(folder)) for folder in folders if folder is not None and Path(folder).is_dir()],
        "machine": describe_machine(task.device),
        "versions": versions(),
    }
    task.rows = Rows(KEPT / "texts.jsonl", settings)
    return run(task, config)


def time_texts(
    task: SuiteTask, config: Config, thresholds: Sequence[float], repeats: int, clock: Callable[[], float] | None = None
) -> tuple[Figures, Figures]:
    """(E, P) seconds of plain and of dynamic decoding for one text of each prompt, medians of interleaved repeats.

    All texts have `config.max_new_tokens` tokens: while they are timed, no token ends them. The table of n-grams is
    opened once, before the first.
    """
    baseline, _ = open_baseline(task)
    table = None if config.cooccurrence is None else NgramTable.open(config.cooccurrence)
    clock = clock or clock_of(task.model.device)
    prompts = prompts_of(config.prompts)
    with never_ending(task.model), never_ending(baseline):
        time_pair(task, baseline, table, prompts[0], config, thresholds[0], 0, clock)  # warm-up
        seconds_EPR2 = np.array(
            [
                [
                    [time_pair(task, baseline, table, prompt, config, threshold, i, clock) for i in range(repeats)]
                    for prompt in prompts
                ]
                for threshold in track(thresholds, "seconds", console=task.console, transient=True)
            ]
        )
    plain_EP, dynamic_EP = np.moveaxis(np.median(seconds_EPR2, axis=2), -1, 0)
    return plain_EP, dynamic_EP


def time_pair(
    task: SuiteTask,
    baseline: Any,
    table: NgramTable | None,
    prompt: Prompt,
    config: Config,
    threshold: float,
    repeat: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Seconds of a plain and of a dynamic text, one right after the other, by turns in either order."""
    decoding = DynamicDecoding(
        task.token_heads,
        threshold,
        table,
        torch.Generator(task.model.device).manual_seed(config.seed),
        adaptive=None if config.adaptive == "none" else config.adaptive,
        blur=config.blur,
        transparency=config.transparency,
    )

    def plain() -> None:
        write(baseline, task.tokenizer, prompt, config.max_new_tokens, 1)

    def dynamic() -> None:
        write(task.model, task.tokenizer, prompt, config.max_new_tokens, 1, decoding)

    first, second = (plain, dynamic) if repeat % 2 == 0 else (dynamic, plain)
    taken = []
    for method in (first, second):
        torch.manual_seed(config.seed)
        start = clock()
        method()
        taken.append(clock() - start)
    return (taken[0], taken[1]) if first is plain else (taken[1], taken[0])


@contextlib.contextmanager
def never_ending(model: Any) -> Iterator[None]:
    """No token ends a text of the model."""
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        model.generation_config.eos_token_id = ends


def by_seconds(results: dict[str, Any], seconds: tuple[Figures, Figures]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The suite's lines of win rates and of scores, against measured speed-ups in place of tokens per pass."""
    sums = {name: np.array(found) for name, found in results["by_prompt"].items()}
    return (
        sum_up(sums["wins"], sums["losses"], *seconds, results["most"]),
        line_of_scores(sums["scores"], sums["scored"], *seconds),
    )


def describe_seconds(repeats: int) -> str:
    how_often = f"medians of {repeats} repeats" if repeats > 1 else "once"
    return (
        f"Seconds: one text of each prompt for each ε_b, plain and dynamic in turn, {how_often}, all in "
        f"this call; they are added up over prompts before they are divided. Win rates and scores: all texts."
    )

"""DynaMo's sentence-completion benchmark (section 3.4, appendix A.3): `python -m benchmarks.paper.dynamo_sentences`.

Ten prompts, ten seeds each, are continued by plain sampling and by dynamic decoding at ε_b from 0 to 1. A judge scores
each text alone (figures 15 and 16) and compares it with plain generation's text of the same prompt and seed (figures 3,
4, 13, 18 and 19); ablations of the method (figure 10, table 8) are compared at one ε_b. By default the judge is the
log-likelihood under the demo's draft model, which tells nothing of meaning, so tables name it and show the share of
repeated 4-grams too; `--judge endpoint` asks a language model. `headway evaluate HEADS --suite sentence-completion`
does the same for any heads, with tokens per pass as the speed; here seconds are measured too. The demo was trained on
Python, so the prompts are code; `--prompts english` takes those of table 7. Texts, times and answers are stored, so a
repeated call goes on where it was stopped.
"""
# E value of ε_b, N pair of a prompt and a seed, P prompt, S resample

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.paper.dynamo_texts import PAPER_REQUEST
from benchmarks.shared import describe_cpu, figures_table, open_ngrams, parser_of, run_benchmark, say, wide_console
from heads.backbone.loading import BackboneConfig, load_backbone
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.generated_text import repeated_ngrams
from heads.evaluation.judged.judge import Judge, LikelihoodJudge
from heads.evaluation.judged.llm_judges import EndpointJudge
from heads.evaluation.judged.sentences import prompts_of
from heads.evaluation.judged.win_rates import fit_line, same_quality
from heads.evaluation.pictures import PALETTE, new_figure, save_figure, tidy
from heads.evaluation.runs.rows import Rows
from heads.evaluation.runs.task import fingerprint
from heads.evaluation.throughput import RESAMPLES, SHARES, resample

Figures = NDArray[np.float64]
ABLATIONS: dict[str, dict[str, Any]] = {
    "CO + AT + G-3": {"adaptive": "static_first", "blur": 3},
    "CO + AT": {"adaptive": "static_first"},
    "CO": {"adaptive": None},
    "CO-0.5 + AT + G-3": {"adaptive": "static_first", "blur": 3, "transparency": 0.5},
    "AT + G-3": {"adaptive": "static_first", "blur": 3, "transparency": 0.0},
}
"""Table 8: co-occurrence masks, adaptive threshold, Gaussian blur."""
PAPERS_OWN = "CO + AT + G-3"
ABLATED_AT = 0.5
COLUMNS = ("× plain", "tokens\nper pass", "wins", "ties", "losses", "win rate", "score", "repeated\n4-grams")
KEPT = Path("checkpoints/runs/dynamo-sentences")


@dataclass(frozen=True, kw_only=True)
class Point:
    """Dynamic decoding at one ε_b, for each pair of a prompt and a seed.

    Attributes:
        speed_N: plain generation's seconds a token divided by those of dynamic decoding.
        passes_N: tokens per pass, the theoretical speed-up.
        won_N: 1 for a win against plain generation's text, 0 for a tie, -1 for a loss; nan for an unreadable verdict,
            which counts as none of these.
        score_N: the judge's score of the text; nan for an unreadable verdict.
        prompt_N: index of the pair's prompt.
        repeated: share of repeated 4-grams.
    """

    threshold: float
    prompt_N: NDArray[np.int64]
    speed_N: Figures
    passes_N: Figures
    won_N: Figures
    score_N: Figures
    repeated: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    if options.quick:
        options.seeds, options.step = min(options.seeds, 3), max(options.step, 0.1)
    console, opened = wide_console(), open_heads([options.heads])
    opened.model.generation_config.eos_token_id = None
    judge = open_judge(options, opened)
    bench = Bench(opened, options, judge)
    points = [bench.point(x, PAPERS_OWN) for x in track(thresholds(options.step), "ε_b", transient=True)]
    ablated = {name: bench.point(ABLATED_AT, name) for name in ABLATIONS}
    say(
        console,
        f"{options.heads}; {len(bench.prompts)} {options.prompts} prompts × {options.seeds} seeds, {options.tokens} "
        f"new tokens, judge: {judge.name}; {describe_cpu()}",
    )
    show(console, points, ablated, bench)
    if options.picture:
        draw(points, bench, options.picture)


def thresholds(step: float) -> list[float]:
    """Values of ε_b from 0 to 1.

    >>> thresholds(0.5)
    [0.0, 0.5, 1.0]
    """
    found: list[float] = np.round(np.arange(0, 1 + step / 2, step), 4).tolist()
    return found


class Bench:
    """The texts, their times and the judge's verdicts; each is stored and made only once."""

    def __init__(self, opened: Opened, options: argparse.Namespace, judge: Judge) -> None:
        self.opened, self.options, self.judge = opened, options, judge
        self.types = {prompt.text: prompt.kind for prompt in prompts_of(options.prompts)}
        self.prompts = list(self.types)
        self.ngrams = open_ngrams(opened)
        (self.token_heads,) = opened.token_heads.values()
        heads = {"heads": str(options.heads), "weights": fingerprint(Path(options.heads))}  # they may be trained again
        self.rows = Rows(path=KEPT / "texts.jsonl", settings={**heads, "tokens": options.tokens, **PAPER_REQUEST})
        self.pairs = [(prompt, seed) for prompt in self.prompts for seed in range(options.seeds)]

    def point(self, threshold: float, method: str) -> Point:
        plain = [self.text(prompt, seed, "plain", None) for prompt, seed in self.pairs]
        name = f"{method} at {threshold}"
        found = [self.text(prompt, seed, name, self.decoding(threshold, method, seed)) for prompt, seed in self.pairs]
        prompts = [prompt for prompt, _ in self.pairs]
        texts, others = ([row["text"] for row in rows] for rows in (found, plain))
        scores, winners = self.judge.verdicts(
            list(zip(prompts, texts, strict=True)), list(zip(prompts, texts, others, strict=True)), 0
        )
        seconds = [row["seconds"] / row["tokens"] for row in plain]
        return Point(
            threshold=threshold,
            prompt_N=np.array([self.prompts.index(prompt) for prompt in prompts]),
            speed_N=np.array([s * row["tokens"] / row["seconds"] for s, row in zip(seconds, found, strict=True)]),
            passes_N=np.array([row["tokens"] / row["passes"] for row in found]),
            won_N=np.array([{"A": 1.0, "tie": 0.0, "B": -1.0}.get(winner or "", np.nan) for winner in winners]),
            score_N=np.array([np.nan if score is None else score for score in scores]),
            repeated=float(np.mean([row["repeated"] for row in found])),
        )

    @functools.cached_property
    def plain_scores(self) -> Figures:
        texts = [(prompt, self.text(prompt, seed, "plain", None)["text"]) for prompt, seed in self.pairs]
        return np.array([np.nan if score is None else score for score in self.judge.scores(texts)])

    def decoding(self, threshold: float, method: str, seed: int) -> Callable[[], DynamicDecoding]:
        return lambda: DynamicDecoding(
            self.token_heads,
            threshold,
            self.ngrams,
            torch.Generator().manual_seed(seed),
            **ABLATIONS[method],
        )

    def text(self, prompt: str, seed: int, method: str, decoding: Callable[[], DynamicDecoding] | None) -> Any:
        """The stored text, or a new one, which is stored; `decoding` None is plain generation."""
        key = f"{method}, {seed}, {prompt}"
        if (kept := self.rows.get(key)) is None:
            kept = self.write(prompt, seed, decoding)
            self.rows.put(key, kept)
        return kept

    def write(self, prompt: str, seed: int, decoding: Callable[[], DynamicDecoding] | None) -> dict[str, Any]:
        inputs = self.opened.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        torch.manual_seed(seed)
        given = {} if decoding is None else {"custom_generate": decoding()}
        start = time.perf_counter()
        out = self.opened.model.generate(
            **inputs, max_new_tokens=self.options.tokens, pad_token_id=0, return_dict_in_generate=True, **PAPER_REQUEST,
            **given,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        new = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return {
            "text": self.opened.tokenizer.decode(new),
            "tokens": len(new),
            "seconds": seconds,
            "passes": out.stats.row_passes if decoding is not None else len(new),
            "repeated": repeated_ngrams(new),
        }


def win_rate(won_N: Figures) -> float:
    """Wins over losses; a half is added to both, so that a point without losses has a rate.

    >>> win_rate(np.array([1.0, 1.0, -1.0, 0.0]))
    1.6666666666666667
    """
    return float(((won_N > 0).sum() + 0.5) / ((won_N < 0).sum() + 0.5))


def regression(speeds_E: Figures, rates_E: Figures) -> tuple[float, float]:
    """Slope and intercept of the line through the win rates; slope 0 if all speeds are the same."""
    return fit_line(speeds_E, rates_E) or (0.0, float(rates_E.mean()))


def resampled_lines(points: Sequence[Point], speed: Callable[[Point], Figures]) -> Figures:
    """(S, 2): slope and intercept in each resample of a bootstrap over prompts, paired over all ε_b.

    Prompts are resampled with all their seeds, since texts of one prompt resemble each other whatever the seed.
    """
    won_NE = np.stack([point.won_N for point in points], axis=1)
    prompt_N = points[0].prompt_N
    times_SP = resample(int(prompt_N.max()) + 1, RESAMPLES, np.random.default_rng(0))
    times_SN = times_SP[:, prompt_N]
    rates_SE = (times_SN @ (won_NE > 0) + 0.5) / (times_SN @ (won_NE < 0) + 0.5)  # `win_rate` of each resample
    speeds_SE = times_SN @ np.stack([speed(point) for point in points], axis=1) / times_SN.sum(axis=1, keepdims=True)
    return np.array([regression(*line) for line in zip(speeds_SE, rates_SE, strict=True)])


def show(console: Console, points: Sequence[Point], ablated: dict[str, Point], bench: Bench) -> None:
    table = figures_table("\nagainst plain generation", "ε_b", *COLUMNS)
    for point in points:
        table.add_row(f"{point.threshold:.2f}", *cells(point))
    console.print(table)
    say(console, f"plain generation's score: {np.nanmean(bench.plain_scores):.2f}")
    table = figures_table(f"\nablations at ε_b = {ABLATED_AT} (table 8)", "method", *COLUMNS)
    for name, point in ablated.items():
        table.add_row(name, *cells(point))
    console.print(table)
    speeds: dict[str, Callable[[Point], Figures]] = {
        "same-quality speed-up": lambda point: point.speed_N,
        "theoretical same-quality speed-up, drafting free": lambda point: point.passes_N,
    }
    for name, speed in speeds.items():
        say(console, f"{name}: {describe_same_quality(points, speed)}")
    say(console, f"verdicts that could not be read: {bench.judge.unreadable}")


def cells(point: Point) -> list[str]:
    counts = [str(int((point.won_N == won).sum())) for won in (1, 0, -1)]
    score = f"{np.nanmean(point.score_N):.2f}" if not np.isnan(point.score_N).all() else "–"
    speed = (f"{point.speed_N.mean():.2f}", f"{point.passes_N.mean():.2f}")
    return [*speed, *counts, f"{win_rate(point.won_N):.2f}", score, f"{point.repeated:.0%}"]


def mean_speeds(points: Sequence[Point], speed: Callable[[Point], Figures]) -> Figures:
    return np.array([speed(point).mean() for point in points])


def crossing_of(points: Sequence[Point], speed: Callable[[Point], Figures]) -> float | None:
    """The speed at which the line through the win rates is 1; None if the line does not fall."""
    rates = np.array([win_rate(point.won_N) for point in points])
    return same_quality(regression(mean_speeds(points, speed), rates))


def describe_same_quality(points: Sequence[Point], speed: Callable[[Point], Figures]) -> str:
    """`crossing_of` with its interval; * marks a crossing beyond all measured speeds."""
    speeds, crossing = mean_speeds(points, speed), crossing_of(points, speed)
    if crossing is None:
        return "none, since the win rate does not fall with the speed here"
    found = (same_quality((slope, intercept)) for slope, intercept in resampled_lines(points, speed).tolist())
    crossings = np.array([np.nan if one is None else one for one in found])
    low, high = np.nanquantile(crossings, SHARES)
    beyond = "*" if not speeds.min() <= crossing <= speeds.max() else ""
    return f"{crossing:.2f}{beyond} ({low:.2f} to {high:.2f}; measured from {speeds.min():.2f} to {speeds.max():.2f})"


def draw(points: Sequence[Point], bench: Bench, path: str) -> None:
    """Figures 3 (13), 4 (18), 15, 16 and 19."""
    figure = new_figure(12, 7.5)
    ((rate, wins, scores), (histogram, types, speeds)) = figure.subplots(2, 3)
    draw_rates(rate, points)
    draw_wins(wins, points)
    mean_speeds = [point.speed_N.mean() for point in points]
    scores.scatter(mean_speeds, [np.nanmean(point.score_N) for point in points], color=PALETTE[0], s=16)
    scores.axhline(float(np.nanmean(bench.plain_scores)), color="black", linestyle="--", linewidth=1)
    tidy(scores, "score against speed-up (figure 16)", "× plain; dashed: plain's score")
    histogram.hist([bench.plain_scores, points[-1].score_N], label=["plain", "ε_b = 1"], color=list(PALETTE[:2]))
    histogram.legend(frameon=False, fontsize=8)
    tidy(histogram, "scores (figure 15)", "score")
    kinds = sorted(set(bench.types.values()))
    members = {kind: np.array([bench.types[prompt] == kind for prompt, _ in bench.pairs]) for kind in kinds}
    by_kind = [float(np.mean([win_rate(point.won_N[members[kind]]) for point in points])) for kind in kinds]
    types.barh(kinds, by_kind, color=PALETTE[2])
    types.axvline(1, color="black", linestyle="--", linewidth=1)
    tidy(types, "win rate by type (figure 19)", "wins / losses, mean over ε_b")
    thresholds = [point.threshold for point in points]
    speeds.plot(thresholds, mean_speeds, color=PALETTE[0], label="× plain, measured")
    speeds.plot(thresholds, [point.passes_N.mean() for point in points], color=PALETTE[1], label="tokens per pass")
    speeds.legend(frameon=False, fontsize=8)
    tidy(speeds, "speed-up by ε_b", "ε_b")
    save_figure(figure, path)


def draw_rates(axes: Any, points: Sequence[Point]) -> None:
    """Figure 3: win rate against speed-up, the regression and its 95 % band."""
    speeds = np.array([point.speed_N.mean() for point in points])
    rates = np.array([win_rate(point.won_N) for point in points])
    x = np.linspace(speeds.min(), speeds.max(), 50)
    lines = resampled_lines(points, lambda point: point.speed_N)
    low, high = np.quantile(lines[:, :1] * x + lines[:, 1:], SHARES, axis=0)
    slope, intercept = regression(speeds, rates)
    axes.fill_between(x, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
    axes.plot(x, slope * x + intercept, color=PALETTE[0])
    axes.scatter(speeds, rates, color=PALETTE[0], s=16)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    tidy(axes, "win rate against speed-up (figure 3)", "× plain; band: 95 %")


def draw_wins(axes: Any, points: Sequence[Point]) -> None:
    """Figure 4: the share of wins, ties and losses at each ε_b."""
    bottom = np.zeros(len(points))
    width = 0.9 * (points[1].threshold - points[0].threshold) if len(points) > 1 else 0.05
    for won, color in ((1, PALETTE[2]), (0, PALETTE[1]), (-1, PALETTE[5])):
        share = np.array([(point.won_N == won).mean() for point in points])
        axes.bar([point.threshold for point in points], share, width, bottom, color=color)
        bottom += share
    tidy(axes, "wins, ties, losses by ε_b (figures 4, 18)", "ε_b; from below wins, ties, losses")


def open_judge(options: argparse.Namespace, opened: Opened) -> Judge:
    if options.judge == "endpoint":
        prices = None if options.prices is None else tuple(options.prices)
        return EndpointJudge.from_environment(cache=KEPT / "answers.jsonl", prices=prices)
    other = load_backbone(BackboneConfig(name_or_path=options.judge))
    return LikelihoodJudge(other, opened.tokenizer, opened.model)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_sentences", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads that are not grounded")
    add_judging_flags(parser, seeds=10, step=0.02)
    parser.add_argument("--quick", action="store_true", help="at most 3 seeds, steps of at least 0.1")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures here")
    return parser


def add_judging_flags(parser: argparse.ArgumentParser, *, seeds: int, step: float) -> None:
    """Add the flags that say which texts are written and who judges them."""
    parser.add_argument("--prompts", choices=["code", "english"], default="code", help="english: table 7")
    parser.add_argument("--seeds", type=int, default=seeds, help="texts of each prompt")
    parser.add_argument("--step", type=float, default=step, help="between values of ε_b")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a text")
    judge = "endpoint (HEADWAY_JUDGE_URL, HEADWAY_JUDGE_MODEL), or another model's folder for its log-likelihood"
    parser.add_argument("--judge", default="checkpoints/demo/draft", help=judge)
    parser.add_argument(
        "--prices",
        type=float,
        nargs=2,
        metavar=("ASKED", "ANSWERED"),
        help="dollars for a million tokens of an endpoint; the price of questions is said before they are asked",
    )


if __name__ == "__main__":
    run_benchmark(main)
